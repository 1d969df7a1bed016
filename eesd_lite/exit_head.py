"""The exit head at work: from the state entering target layer N to a guess of the next token.

One 16-bit decoder layer with its own keys and values, an affine map and an RMSNorm, then the target's own lm_head
(DESIGN.md, section 2). Its arithmetic is row-invariant like the target's, so its cache after any number of rounds is
what a fresh prefill would give, whether its entries were computed at once or together later. Weights come from
`eesd_lite.head_file`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from eesd_lite.cache import KVCache, Rows
from eesd_lite.config import ModelConfig
from eesd_lite.draft_vocabulary import DraftVocabulary
from eesd_lite.head_file import HeadTensors
from eesd_lite.layer_blob import BlobLayout, lay_out, page_buffer
from eesd_lite.ops import Ops, Reach
from eesd_lite.packing import HEAD_NORMS, MODULES, NORMS, KernelSet
from eesd_lite.transformer import DecoderLayer
from eesd_lite.waiting_states import WaitingStates


def _pieces(tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """The head's tensors under the names that a layer's blob uses; those of fused products lie below each other."""
    pieces: dict[str, list[Tensor]] = {}
    for module, (block, projections) in MODULES.items():
        names = [f"layer.{block}.{projection}" for projection in projections]
        pieces[f"{module}.0.weight"] = [tensors[f"{name}.weight"] for name in names]
        if any(f"{name}.bias" in tensors for name in names):
            rows = [tensors[f"{name}.weight"].shape[0] for name in names]
            biases = [tensors.get(f"{name}.bias", torch.zeros(n)) for name, n in zip(names, rows, strict=True)]
            pieces[f"{module}.0.bias"] = biases
    for name, stored_name in (NORMS | HEAD_NORMS).items():
        if f"layer.{stored_name}.weight" in tensors:
            pieces[f"{name}.weight"] = [tensors[f"layer.{stored_name}.weight"]]
    return pieces | {name: [tensors[name]] for name in ("affine.weight", "affine.bias", "norm.weight")}


def _blob(tensors: Mapping[str, Tensor], kernel: str, dtype: torch.dtype) -> tuple[BlobLayout, Tensor]:
    """The head as one blob. Every tensor is copied to its place: a head is large, and there is room for one."""
    pieces = _pieces(tensors)
    shapes = {name: (sum(len(part) for part in parts), *parts[0].shape[1:]) for name, parts in pieces.items()}
    without_bytes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    layout = lay_out(without_bytes, {f"{module}.0": kernel for module in MODULES})
    buffer = page_buffer(layout.nbytes)
    for name, view in layout.views(buffer).items():
        for part, place in zip(pieces[name], view.split([len(part) for part in pieces[name]]), strict=True):
            place.copy_(part)
    return layout, buffer


class ExitHead:
    """A head bound to one engine: weights, own KV cache, and the two things it does."""

    def __init__(
        self,
        config: ModelConfig,
        head: HeadTensors,
        *,
        ops: Ops,
        kernels: KernelSet,
        reach: Reach,
        kv: KVCache,
        device: torch.device | str = "cpu",
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """`vocabulary`: the tokens that are drafted; None: all of them."""
        layout, buffer = _blob(head.tensors, kernels.dense.name, kernels.dense.dtype)
        if torch.device(device).type != "cpu":
            buffer = buffer.to(device)
        views = layout.views(buffer)
        self.exit_layer = head.exit_layer
        self.nbytes = layout.nbytes
        self.vocabulary = vocabulary
        self._ops, self._reach, self.kv = ops, reach, kv
        self.waiting = WaitingStates(config.hidden_size, device)
        self._eps = config.rms_norm_eps
        self._layer = DecoderLayer(config, ops, layout, buffer, kernels)
        self._affine, self._bias, self._norm = views["affine.weight"], views["affine.bias"], views["norm.weight"]

    def digest(self) -> str:
        """Tells heads apart: a head's bias and norm come out of its training."""
        parts = torch.cat([self._bias.float().cpu(), self._norm.float().cpu()])
        return hashlib.sha256(parts.numpy().tobytes()).hexdigest()[:16]

    def forward(self, state: Tensor, rows: Rows) -> Tensor:
        """state float32 [rows, hidden] entering layer N (left as it is) -> input of lm_head, [rows, hidden]."""
        self.fill()
        hidden = state.clone()
        self._layer.forward(hidden, rows, self.kv.layer(0), self._reach)
        mapped = self._ops.dense(hidden.to(self._ops.dtype), self._affine, self._bias)
        return self._ops.rms_norm(mapped.to(torch.float32), self._norm, self._eps)

    def keep(self, states: Tensor, first: int) -> None:
        """Visible tokens from position `first` on, from which nothing is drafted; `states` as in `forward`.

        Their keys and values are computed when they are needed, or when too many wait.
        """
        count, waiting = len(states), self.waiting
        waiting.forget_from(first)
        if count > waiting.room:
            self.fill()
        if count > waiting.room:
            self._layer.write_kv(states, Rows.chain(first, count, states.device), self.kv.layer(0), self._reach)
        else:
            waiting.add(states, first)

    def forget_from(self, position: int) -> None:
        """Tokens from `position` on are no longer visible, so what waits there must not be computed any more."""
        self.waiting.forget_from(position)

    @torch.inference_mode()
    def fill(self) -> None:
        """Compute what waits, in one batch: afterwards the cache holds every token that was kept."""
        if len(self.waiting):
            states, rows = self.waiting.taken()
            self._layer.write_kv(states, rows, self.kv.layer(0), self._reach)
            self.waiting.forget_from(0)  # not before: an interruption leaves everything waiting

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Compact an accepted tree path, as in the target's cache."""
        self.kv.move(sources, targets)
