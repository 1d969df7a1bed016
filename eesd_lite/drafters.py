"""Who drafts: the exit head, look-ups in the text, or both. `Engine` asks here once per generation."""

from __future__ import annotations

from collections.abc import Callable

from eesd_lite.drafter_names import NGRAM
from eesd_lite.exit_head import ExitHead
from eesd_lite.ngram_tree import NgramTreeDrafter
from eesd_lite.sampling import Sampler
from eesd_lite.speculative import Drafter, HeadDrafter
from eesd_lite.target import Target

DrafterFactory = Callable[[Target, Sampler], Drafter]


def drafter_factory(name: str, head: ExitHead | None) -> DrafterFactory | None:
    """Makes a generation's drafter; None where nobody can draft. `both` without a head is `ngram`."""
    if name == NGRAM or (name == "both" and head is None):
        return lambda target, sampler: NgramTreeDrafter()
    if head is None:
        return None
    if name == "both":
        return lambda target, sampler: NgramTreeDrafter(HeadDrafter(head, target, sampler))
    return lambda target, sampler: HeadDrafter(head, target, sampler)
