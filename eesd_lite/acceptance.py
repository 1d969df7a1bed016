"""What is believed of a head before it has drafted anything: how often its tokens are kept, by its own confidence.

An AcceptancePrior is counts of judged tokens on recorded traces. GENERIC comes from two shipped heads on prompts that
no benchmark uses (`eesd trace` with docs/benchmarks/prior_prompts.txt, exits 10 and 20, each scaled to 1000 drafts);
controllers give it a small weight and scale it down where a head turns out to promise too much. Plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass

# Confidence levels are finer near 1, where a small difference in acceptance decides between 5 tokens and 15.
EDGES = (0.15, 0.3, 0.5, 0.7, 0.85, 0.93, 0.98)


@dataclass(frozen=True)
class AcceptancePrior:
    """By level of confidence (below, between and above `edges`); `following`: levels that came after a kept token of
    each level, and as the last row those that began a draft."""

    edges: tuple[float, ...]
    kept: tuple[float, ...]
    judged: tuple[float, ...]
    following: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        levels = len(self.edges) + 1
        assert len(self.kept) == len(self.judged) == levels == len(self.following) - 1, (levels, len(self.following))
        assert all(len(row) == levels for row in self.following), levels

    def acceptance(self) -> list[float]:
        """Per level; never quite 0 or 1."""
        return [(kept + 1.0) / (judged + 2.0) for kept, judged in zip(self.kept, self.judged, strict=True)]

    def next_level(self, weight: float) -> list[list[float]]:
        """`following` with rows that add up to `weight`."""
        return [[weight * count / sum(row) for count in row] for row in self.following]

    def level_counts(self, weight: float) -> list[float]:
        """`judged`, adding up to `weight`."""
        return [weight * count / sum(self.judged) for count in self.judged]

    def without_confidence(self) -> AcceptancePrior:
        """One level for all: what `beta` believes."""
        kept, judged = sum(self.kept), sum(self.judged)
        return AcceptancePrior((), (kept,), (judged,), ((judged,), (judged,)))


GENERIC = AcceptancePrior(
    EDGES,
    kept=(135, 338, 442, 508, 539, 542, 690, 458),
    judged=(876, 930, 806, 623, 566, 559, 693, 458),
    following=(
        (42, 20, 25, 17, 16, 9, 4, 2),
        (91, 63, 61, 58, 23, 13, 17, 8),
        (83, 84, 60, 62, 71, 39, 18, 13),
        (66, 114, 79, 48, 43, 57, 75, 13),
        (58, 67, 70, 70, 81, 33, 103, 35),
        (23, 49, 42, 28, 74, 78, 147, 79),
        (32, 36, 81, 54, 68, 111, 119, 157),
        (23, 23, 15, 50, 37, 110, 100, 65),
        (458, 474, 372, 237, 153, 109, 110, 86),
    ),
)
