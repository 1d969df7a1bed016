"""What was asked of the weights that only drafts read: how many bits, and which rows of lm_head.

Drafts may be anything without touching what is emitted, so these weights may be rounded freely. Plain Python: the
planner counts with it, `draft_vocabulary` and `head_packing` do it.
"""

from __future__ import annotations

from dataclasses import dataclass

from eesd_lite.errors import EesdError

HEAD_BITS = (16, 8, 4)
ALL = "all"  # a copy of the whole lm_head, in fewer bits
SMALLEST = 16  # tokens; fewer would not even hold the punctuation
ROW_STEP = 16  # the int4 product takes outputs by so many: tables are filled up with rows of zeros
_GROUPS = (64, 32)  # inputs that share a scale in 4 bits; small ones cost an eighth of the bytes and round better


def usual_bits(kernel: str) -> int:
    """Where nothing was asked, for a kernel that `sizing` names: 8 cost no tau (docs/tau.md), but only the CPU has
    them."""
    return 8 if kernel.startswith("int4-cpu") else 16


@dataclass(frozen=True)
class DraftWeights:
    """`bits` of the exit head and of its copy of lm_head; `vocabulary`: tokens that it drafts, "all" for a copy of all
    rows in fewer bits, None for the target's own lm_head."""

    bits: int = 16
    vocabulary: int | str | None = None

    def check(self, known: int | None = None) -> None:
        """EesdError for what no model could have, or (with `known` tokens) not this one."""
        if self.bits not in HEAD_BITS:
            raise EesdError(f"head_bits must be 16, 8 or 4, not {self.bits!r}")
        size = self.vocabulary
        if size == ALL and self.bits == 16:
            raise EesdError("draft_vocab all is a copy of lm_head in fewer bits; set head_bits 8 or 4 with it")
        if size is None or size == ALL:
            return
        if isinstance(size, str):
            raise EesdError(f"draft_vocab must be a number of tokens, or all, not {size!r}")
        if size < SMALLEST or (known is not None and size > known):
            most = "the tokens of the model" if known is None else f"the model's {known} tokens"
            raise EesdError(f"draft_vocab must be from {SMALLEST} to {most}, not {size}")

    def rows(self, vocab_size: int) -> int:
        """Rows of lm_head that are copied, those of zeros included."""
        if self.vocabulary is None:
            return 0
        rows = vocab_size if isinstance(self.vocabulary, str) else self.vocabulary
        return rows if self.bits == 16 else -(-rows // ROW_STEP) * ROW_STEP

    def groups(self, in_features: int) -> int | None:
        """Groups of inputs that share a scale in a rounded matrix; None: it keeps its 16 bits."""
        if self.bits == 8:
            return 1
        return next((in_features // group for group in _GROUPS if in_features % group == 0), None)
