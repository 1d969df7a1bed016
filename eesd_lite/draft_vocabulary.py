"""The tokens that an exit head may draft, where that is not the whole vocabulary: the most frequent ones.

lm_head is a good part of a draft step of a small model with many tokens; a copy of the rows of the frequent ones is
read instead. The target still chooses among all tokens, so what is emitted stays the same.
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

from eesd_lite.errors import EesdError

SMALLEST = 16  # tokens; fewer would not even hold the punctuation
LONGEST_LIST = 16384  # ids that are stored in order of frequency


@dataclass(frozen=True)
class DraftVocabulary:
    """`ids` int64 [N], ascending, so that ties go to the lowest id here too; `lm_head` [N, hidden], a copy."""

    ids: np.ndarray
    lm_head: Tensor

    @classmethod
    def of(cls, lm_head: Tensor, ids: Iterable[int]) -> DraftVocabulary:
        """The rows of `lm_head` for these different ids, on the same device."""
        chosen = np.array(sorted(ids), dtype=np.int64)
        return cls(chosen, lm_head.index_select(0, torch.from_numpy(chosen).to(lm_head.device)).contiguous())


def check_size(size: int | None, vocabulary: int | None = None) -> None:
    """EesdError for a size that no model could have, or (with `vocabulary` tokens) not this one."""
    if size is None or (size >= SMALLEST and (vocabulary is None or size <= vocabulary)):
        return
    most = "the tokens of the model" if vocabulary is None else f"the model's {vocabulary} tokens"
    raise EesdError(f"draft_vocab must be from {SMALLEST} to {most}, not {size}")


def frequency_order(tokens: np.ndarray, limit: int = LONGEST_LIST) -> np.ndarray:
    """The ids of a text, int32, the most frequent first, among equals the lowest; at most `limit`."""
    ids, counts = np.unique(tokens, return_counts=True)
    return ids[np.argsort(-counts, kind="stable")][:limit].astype(np.int32)


def most_frequent(size: int, *, order: Sequence[int], always: Iterable[int], vocabulary: int) -> list[int]:
    """`size` different ids below `vocabulary`: those of `always`, then in `order`, then ascending."""
    wanted = dict.fromkeys(token for token in (*sorted(always), *order, *range(vocabulary)) if token < vocabulary)
    return list(wanted)[:size]
