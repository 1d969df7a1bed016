"""The frozen target as a teacher: dense batched passes over its dequantized weights, with the states heads learn from.

Layers that do not fit the budget are read and dequantized again for every pass, so one sweep teaches a whole batch of
positions however large the model is. Used by `eesd_lite.distill.generate` (text that the target writes itself) and by
`cache_texts` (text that the user brings).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from eesd_lite.config import ModelConfig
from eesd_lite.dense import BatchKV, DenseLayer, layer_forward, read_dense_layer, rms_norm
from eesd_lite.distill.state_cache import StateCacheWriter
from eesd_lite.errors import PromptError
from eesd_lite.head_file import states_fingerprint
from eesd_lite.preflight import EMBEDDING, FINAL_NORM, LM_HEAD, has_own_lm_head
from eesd_lite.progress import Progress, no_progress
from eesd_lite.rope import layer_reaches
from quant.checkpoint import Checkpoint


class DenseTarget:
    """The target over dense weights in `dtype`; at most `layer_budget` bytes of layers stay in memory."""

    def __init__(
        self,
        folder: Path,
        *,
        context: int,
        dtype: torch.dtype = torch.bfloat16,
        layer_budget: int = 8 * 2**30,
        quantize: str | None = None,
        weights: str | None = None,
    ) -> None:
        self.config = ModelConfig.from_folder(folder)
        self.checkpoint = Checkpoint(folder, weights, quantize=quantize)
        self.dtype = dtype
        self.reaches = layer_reaches(self.config, context)
        self.embedding = self.checkpoint.tensor(EMBEDDING).to(dtype)
        self.norm = self.checkpoint.tensor(FINAL_NORM).to(dtype)
        own = has_own_lm_head(self.checkpoint, self.config)  # the engine's rule: a head must learn what it will feed
        self.lm_head = self.checkpoint.dequantized(LM_HEAD).to(dtype) if own else self.embedding
        self._kept: dict[int, DenseLayer] = {}
        self._budget = layer_budget

    def layer(self, index: int) -> DenseLayer:
        """Layer `index`, from memory while the budget lasts."""
        if index in self._kept:
            return self._kept[index]
        layer = read_dense_layer(self.checkpoint, index).to(self.dtype)
        size = sum(t.nbytes for t in vars(layer).values() if t is not None)
        if size <= self._budget:
            self._budget -= size
            self._kept[index] = layer
        return layer

    def new_kv(self, batch: int, capacity: int) -> list[BatchKV]:
        """One key/value store per layer."""
        count = self.config.num_hidden_layers
        return [BatchKV.empty(self.config, batch, capacity, self.dtype) for _ in range(count)]

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,  # [batch, seq]
        *,
        kv: list[BatchKV] | None = None,
        start: int = 0,
        exit_layers: Sequence[int] = (),
    ) -> tuple[dict[int, Tensor], Tensor]:
        """States entering each exit layer {N: [batch, seq, hidden]}, and the state after the last (before norm)."""
        hidden = F.embedding(ids, self.embedding)
        states: dict[int, Tensor] = {}
        for index in range(self.config.num_hidden_layers):
            if index in exit_layers:
                states[index] = hidden
            past = kv[index] if kv is not None else None
            hidden = layer_forward(self.config, self.layer(index), hidden, self.reaches[index], past, start)
        return states, hidden

    @torch.inference_mode()
    def logits(self, final: Tensor) -> Tensor:
        """[..., hidden] before the norm -> [..., vocab] in the compute dtype."""
        return F.linear(rms_norm(final, self.norm, self.config.rms_norm_eps), self.lm_head)


def open_writer(
    out_dir: Path, target: DenseTarget, exit_layers: Sequence[int], weights: str | None = None
) -> StateCacheWriter:
    """A state cache for this target; one that was left unfinished is continued."""
    config, scaling = target.config, target.config.rope_scaling
    return StateCacheWriter(
        out_dir,
        hidden_size=config.hidden_size,
        exit_layers=exit_layers,
        fingerprint=states_fingerprint(target.checkpoint.folder, config, target.checkpoint.quantize, weights),
        rope={"rope_theta": config.rope_theta, "rope_scaling": asdict(scaling) if scaling else None},
    )


def cache_texts(
    folder: Path,
    out_dir: Path,
    sequences: Sequence[Sequence[int]],
    *,
    exit_layers: Sequence[int],
    progress: Progress = no_progress,
    batch_tokens: int = 8192,
    quantize: str | None = None,
    weights: str | None = None,
) -> None:
    """Pass the user's own token sequences through the target and write the state cache `out_dir`."""
    if not sequences:
        raise PromptError("the training text holds no sequence of two tokens or more")
    target = DenseTarget(folder, context=max(len(ids) for ids in sequences), quantize=quantize, weights=weights)
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))  # like lengths share a batch: little padding
    done = 0
    with open_writer(out_dir, target, exit_layers, weights) as writer:
        while done < len(order):
            length = len(sequences[order[min(done + 1, len(order)) - 1]])
            count = max(1, batch_tokens // max(1, length))
            group = [sequences[i] for i in order[done : done + count]]
            width = max(len(ids) for ids in group)
            ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in group])
            states, final = target.forward(ids, exit_layers=exit_layers)
            for row, tokens in enumerate(group):
                size = len(tokens)
                writer.append([list(tokens)], {n: s[row, :size] for n, s in states.items()}, final[row, :size])
            done += len(group)
            progress("teacher passes, sequence", done, len(order))
