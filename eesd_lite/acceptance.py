"""What is believed of a head before it has drafted anything: how often its tokens are kept, by its own confidence.

An AcceptancePrior is counts of judged tokens, a TreePrior is about all proposals of a node; a Belief has both. GENERIC
comes from two shipped heads on prompts that no benchmark uses (`eesd trace` with docs/benchmarks/prior_prompts.txt,
exits 10 and 20; `replay.prior` counted); controllers give it a small weight and scale it down where a head turns out to
promise too much. A head whose file says how often it was right has a belief of its own
(`eesd_lite.head_prior`). Plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass

# Confidence levels are finer near 1, where a small difference in acceptance decides between 5 tokens and 15.
EDGES = (0.15, 0.3, 0.5, 0.7, 0.85, 0.93, 0.98)


@dataclass(frozen=True)
class AcceptancePrior:
    """By level of confidence (below, between and above `edges`); `following`: levels that came after a kept token of
    each level, and as the last row those that began a draft. `together`: what all levels weigh at first."""

    edges: tuple[float, ...]
    kept: tuple[float, ...]
    judged: tuple[float, ...]
    following: tuple[tuple[float, ...], ...]
    together: float = 40.0

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
        return AcceptancePrior((), (kept,), (judged,), ((judged,), (judged,)), self.together)


@dataclass(frozen=True)
class TreePrior:
    """log-odds(kept) = shift + slope * log-odds(confidence) for every proposal of a head.

    `precision` of shift, of both together, and of slope; `nodes`: confidences of what it proposes at usual nodes,
    likeliest first.
    """

    shift: float
    slope: float
    precision: tuple[float, float, float]
    nodes: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Belief:
    """What controllers begin with: of chains and of trees."""

    chain: AcceptancePrior
    tree: TreePrior


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

# What the head says is believed at first, but not for long. Nodes: the same heads and prompts, greedy, twelfths by the
# confidence of the best proposal, averaged.
GENERIC_TREE = TreePrior(
    shift=0.0,
    slope=1.0,
    precision=(1.0, 0.0, 10.0),
    nodes=(
        (0.261, 0.143, 0.080, 0.050, 0.036, 0.027, 0.021, 0.017),
        (0.086, 0.056, 0.041, 0.032, 0.027, 0.023, 0.020, 0.018),
        (0.635, 0.109, 0.043, 0.026, 0.017, 0.012, 0.010, 0.008),
        (0.167, 0.105, 0.070, 0.050, 0.039, 0.031, 0.026, 0.022),
        (0.406, 0.167, 0.065, 0.039, 0.027, 0.020, 0.016, 0.013),
        (0.046, 0.035, 0.028, 0.023, 0.020, 0.018, 0.016, 0.014),
        (0.962, 0.012, 0.005, 0.003, 0.002, 0.001, 0.001, 0.001),
        (0.211, 0.119, 0.075, 0.052, 0.039, 0.030, 0.024, 0.020),
        (0.507, 0.150, 0.057, 0.031, 0.021, 0.016, 0.013, 0.010),
        (0.127, 0.082, 0.059, 0.045, 0.035, 0.028, 0.023, 0.020),
        (0.804, 0.061, 0.023, 0.013, 0.009, 0.007, 0.005, 0.004),
        (0.325, 0.157, 0.081, 0.046, 0.033, 0.024, 0.019, 0.016),
    ),
)
GENERIC_BELIEF = Belief(GENERIC, GENERIC_TREE)
