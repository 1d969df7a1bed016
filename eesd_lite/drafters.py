"""Who drafts: the exit head, look-ups in the text, or both. `Engine` asks here once per generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eesd_lite.drafter_names import NGRAM
from eesd_lite.exit_head import ExitHead
from eesd_lite.ngram_tree import NgramTreeDrafter
from eesd_lite.sampling import Sampler
from eesd_lite.several_heads import SeveralHeadsDrafter
from eesd_lite.speculative import Drafter, HeadDrafter, TreeDrafter
from eesd_lite.target import Target

DrafterFactory = Callable[[Target, Sampler], Drafter]


def drafter_factory(name: str, heads: Sequence[ExitHead]) -> DrafterFactory | None:
    """Makes a generation's drafter; None where nobody can draft. `both` without a head is `ngram`."""
    if name == NGRAM or (name == "both" and not heads):
        return lambda target, sampler: NgramTreeDrafter()
    if not heads:
        return None

    def from_heads(target: Target, sampler: Sampler) -> TreeDrafter:
        if len(heads) > 1:
            return SeveralHeadsDrafter(heads, target, sampler)
        return HeadDrafter(heads[0], target, sampler)

    if name == "both":
        return lambda target, sampler: NgramTreeDrafter(from_heads(target, sampler))
    return from_heads
