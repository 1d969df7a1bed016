"""What is believed of a head before it has drafted anything: how often its tokens are kept, by its own confidence.

An AcceptancePrior is counts of judged tokens on recorded traces. GENERIC comes from two shipped heads on prompts that
no benchmark uses (`eesd trace` with docs/benchmarks/prior_prompts.txt, exits 10 and 20; `replay.prior` counted);
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
    kept=(145, 356, 407, 424, 365, 215, 226, 162),
    judged=(979, 966, 742, 535, 394, 228, 228, 162),
    following=(
        (42, 17, 25, 26, 20, 8, 4, 4),
        (99, 56, 53, 45, 32, 36, 13, 9),
        (81, 89, 73, 52, 43, 33, 12, 16),
        (90, 113, 88, 56, 22, 21, 6, 22),
        (78, 60, 44, 45, 20, 15, 61, 25),
        (19, 25, 18, 36, 28, 15, 49, 7),
        (19, 38, 26, 18, 82, 25, 7, 5),
        (39, 53, 31, 16, 4, 1, 10, 9),
        (512, 515, 385, 241, 142, 74, 66, 66),
    ),
)
