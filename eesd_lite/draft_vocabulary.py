"""The tokens that an exit head may draft, where that is not the whole vocabulary: the most frequent ones.

lm_head is a good part of a draft step of a small model with many tokens; a copy of the rows of the frequent ones is
read instead, in 16 bits or fewer. The target still chooses among all tokens, so what is emitted stays the same.
Frequencies come from the head's own file, else from the recipe, else ids stand in order: tokenizers are made by merges,
frequent ones first. Cutting the vocabulary to what is frequent in text of the model's own follows FR-Spec
(arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eesd_lite.draft_weights import DraftWeights
from eesd_lite.head_packing import pack_rounded, rounded_kernels
from eesd_lite.ops import Ops
from eesd_lite.packing import KernelSet
from quant.linear import GPTQLinear

LONGEST_LIST = 16384  # ids that are stored in order of frequency


@dataclass(frozen=True)
class DraftVocabulary:
    """`ids` int64 [N], ascending, so that ties go to the lowest id here too; None: all. `lm_head`: a copy of their rows
    [N, hidden], or a product by it in fewer bits, which may have rows of zeros at its end."""

    ids: np.ndarray | None
    lm_head: Tensor | GPTQLinear
    size: int

    @classmethod
    def of(
        cls, lm_head: Tensor, ids: Iterable[int] | None, *, bits: int = 16, kernels: KernelSet | None = None
    ) -> DraftVocabulary:
        """The rows of `lm_head` for these different ids, on the same device; `kernels` where `bits` are not 16."""
        chosen = None if ids is None else np.array(sorted(ids), dtype=np.int64)
        rows = lm_head if chosen is None else lm_head.index_select(0, torch.from_numpy(chosen).to(lm_head.device))
        if kernels is None or bits == 16:
            return cls(chosen, rows.contiguous(), len(rows))
        draft = DraftWeights(bits, len(rows))
        filled = torch.zeros(draft.rows(len(lm_head)) - len(rows), rows.shape[1], dtype=rows.dtype)
        parts = [part.cpu() for part in (rows, filled) if len(part)]
        kernel, stored = pack_rounded(parts, draft, rounded_kernels(kernels, bits))
        there = {name: tensor.to(lm_head.device) for name, tensor in stored.items()}
        return cls(chosen, GPTQLinear(kernel, there), len(rows))

    def logits(self, x: Tensor, ops: Ops) -> Tensor:
        """x [rows, hidden] in the compute dtype -> float32 [rows, N]."""
        if isinstance(self.lm_head, Tensor):
            return ops.logits(x, self.lm_head)
        return self.lm_head(x)[:, : self.size].to(torch.float32)


def frequency_order(tokens: np.ndarray, limit: int = LONGEST_LIST) -> np.ndarray:
    """The ids of a text, int32, the most frequent first, among equals the lowest; at most `limit`."""
    ids, counts = np.unique(tokens, return_counts=True)
    return ids[np.argsort(-counts, kind="stable")][:limit].astype(np.int32)


def most_frequent(size: int, *, order: Sequence[int], always: Iterable[int], vocabulary: int) -> list[int]:
    """`size` different ids below `vocabulary`: those of `always`, then in `order`, then ascending."""
    wanted = dict.fromkeys(token for token in (*sorted(always), *order, *range(vocabulary)) if token < vocabulary)
    return list(wanted)[:size]
