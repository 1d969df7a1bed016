"""The target model as the speculative loop sees it: embed, layers below the exit, layers from the exit on, logits.

Holds what is resident whatever the plan (embedding, final norm, lm_head, rotary tables, KV cache) and borrows layers
from a `LayerBank`, which counts every byte of an offloaded layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from eesd_lite.cache import KVCache, Rows
from eesd_lite.config import ModelConfig
from eesd_lite.layer_bank import LayerBank
from eesd_lite.ops import Ops, Reach
from eesd_lite.progress import Progress, no_progress
from eesd_lite.sizing import LOGITS_ROWS, PREFILL_CHUNK
from eesd_lite.transformer import run_layers


@dataclass
class Target:
    """`exit_layer` splits the layers into `lower` and `upper`; without drafting it is 0 and everything is upper.

    Where several heads are resident the split is the round's, and states entering other exits are handed to `passed`.
    """

    config: ModelConfig
    ops: Ops
    bank: LayerBank
    kv: KVCache
    reaches: tuple[Reach, ...]  # one for every layer
    embedding: Tensor  # [vocab, hidden] in the compute dtype
    norm: Tensor
    lm_head: Tensor
    exit_layer: int
    device: torch.device
    exits: tuple[int, ...] = ()  # of all resident heads, ascending
    passed: Callable[[int, Tensor, Rows], None] | None = (
        None  # exit layer, states [rows, hidden] (not to be kept), rows
    )

    def embed(self, token_ids: list[int]) -> Tensor:
        """float32 [rows, hidden]"""
        ids = torch.tensor(token_ids, device=self.embedding.device)
        return F.embedding(ids, self.embedding).to(torch.float32)

    def lower(self, hidden: Tensor, rows: Rows, progress: Progress = no_progress) -> Tensor:
        """Layers below the exit layer, in place; returns `hidden`."""
        self._run(range(self.exit_layer), hidden, rows, progress)
        return hidden

    def upper(self, hidden: Tensor, rows: Rows, progress: Progress = no_progress) -> Tensor:
        """The exit layer and everything after it, in place: one sweep."""
        self._run(range(self.exit_layer, self.config.num_hidden_layers), hidden, rows, progress)
        return hidden

    def _run(self, layers: range, hidden: Tensor, rows: Rows, progress: Progress) -> None:
        def done(index: int) -> None:
            tokens = "1 token" if len(rows) == 1 else f"{len(rows)} tokens"
            progress(f"reading {tokens}, layer", index + 1, self.config.num_hidden_layers)

        stops = [at for at in self.exits if at in layers and at != self.exit_layer] if self.passed is not None else []
        for start, stop in pairwise((layers.start, *stops, layers.stop)):
            if start in stops and self.passed is not None:
                self.passed(start, hidden, rows)
            run_layers(
                self.bank, range(start, stop), hidden, rows, kv=self.kv, reaches=self.reaches, chunk=PREFILL_CHUNK,
                done=None if progress is no_progress else done,
            )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] from states after the last layer; a row's bits do not depend on the others."""
        normed = self.ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        parts = [self.ops.logits(part.contiguous(), self.lm_head) for part in normed.split(LOGITS_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
