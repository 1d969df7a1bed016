"""The exit head at work: from the state entering target layer N to a guess of the next token.

One decoder layer with its own keys and values, an affine map and an RMSNorm, then the target's own lm_head
(DESIGN.md, section 2). Its arithmetic is row-invariant like the target's, so its cache after any number of rounds is
what a fresh prefill would give, whether its entries were computed at once or together later. Weights come from
`eesd_lite.head_file`, in 16 bits or fewer (`head_packing`).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from eesd_lite.cache import KVCache, Rows
from eesd_lite.config import ModelConfig
from eesd_lite.draft_vocabulary import DraftVocabulary
from eesd_lite.draft_weights import DraftWeights
from eesd_lite.head_file import HeadTensors
from eesd_lite.head_packing import AFFINE, head_blob, rounded_kernels
from eesd_lite.ops import Ops, Reach
from eesd_lite.packing import KernelSet
from eesd_lite.transformer import DecoderLayer, bind_linear
from eesd_lite.waiting_states import WaitingStates


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
        bits: int = 16,
    ) -> None:
        """`vocabulary`: the tokens that are drafted; None: all of them. `bits`: of the weights, 16, 8 or 4."""
        kernels = rounded_kernels(kernels, bits)
        layout, buffer = head_blob(head.tensors, DraftWeights(bits), kernels)
        if torch.device(device).type != "cpu":
            buffer = buffer.to(device)
        views = layout.views(buffer)
        self.exit_layer = head.exit_layer
        self.nbytes, self.bits = layout.nbytes, bits
        self.vocabulary = vocabulary
        self.prior = head.prior  # how often it was right when that was counted
        self._ops, self._reach, self.kv = ops, reach, kv
        self.waiting = WaitingStates(config.hidden_size, device)
        self._eps = config.rms_norm_eps
        self._layer = DecoderLayer(config, ops, layout, buffer, kernels)
        self._affine = bind_linear(AFFINE, layout, views, kernels)
        self._bias, self._norm = views[f"{AFFINE}.0.bias"], views["norm.weight"]

    def digest(self) -> str:
        """Tells heads apart: a head's bias and norm come out of its training, and its bits decide what it computes."""
        parts = torch.cat([self._bias.float().cpu(), self._norm.float().cpu()])
        return f"{hashlib.sha256(parts.numpy().tobytes()).hexdigest()[:16]} {self.bits} bits"

    def forward(self, state: Tensor, rows: Rows) -> Tensor:
        """state float32 [rows, hidden] entering layer N (left as it is) -> input of lm_head, [rows, hidden]."""
        self.fill()
        hidden = state.clone()
        self._layer.forward(hidden, rows, self.kv.layer(0), self._reach)
        mapped = self._affine(hidden.to(self._ops.dtype))
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
