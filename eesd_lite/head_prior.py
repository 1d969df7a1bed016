"""How often a head was right, and what its confidence was worth: counted once, kept in the head's file.

A controller that begins a conversation believes these counts instead of the generic ones, which are about other heads,
and more firmly than those where it grows trees. They are taken at several temperatures, because a confidence means
something else when sampling. Plain Python; `replay.judge` collects, the scripts and `eesd train` write, the engine and
`eesd replay` read.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eesd_lite.acceptance import EDGES, GENERIC_BELIEF, AcceptancePrior, Belief, TreePrior
from eesd_lite.tree_beliefs import LISTED, log_odds, probability

CHAIN = 16  # tokens of the chains that are counted
_DRAFTS = 1000.0  # counts of chains are scaled to so many drafts
_NODES = 12  # usual nodes that are kept, averages of as many parts of equal size
_STRIDE = 5  # their order: neighbours would leave the window of recent nodes together
_NODE_WEIGHT = 40.0  # visited nodes that shift and slope weigh
_TOGETHER = 80.0  # observations that all levels of chains weigh together, where that is more than each level's own
_NEWTON = 30  # steps of fitting two numbers
_MOST = 1e9  # no number in a head's file is larger: what follows from it would not be finite


@dataclass(frozen=True)
class Judged:
    """What a head proposed at one position of a text that the target wrote: confidences of its proposals, likeliest
    first, which of them the target chose (None: none), and the confidence that a chain states for the first."""

    confidences: tuple[float, ...]
    kept: int | None
    stated: float


@dataclass(frozen=True)
class HeadPrior:
    """Beliefs by the temperature at which they were counted."""

    beliefs: Mapping[float, Belief]

    def at(self, temperature: float) -> Belief:
        """The belief that was counted nearest to this temperature; the generic one where there is none."""
        if not self.beliefs:
            return GENERIC_BELIEF
        return self.beliefs[min(self.beliefs, key=lambda t: (abs(t - temperature), t))]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"edges": list(EDGES), "temperatures": {str(t): _plain(b) for t, b in sorted(self.beliefs.items())}}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> HeadPrior:
        """What `as_dict` made; ValueError, KeyError and the like for anything else.

        Counts by other edges of confidence are left out.
        """
        if tuple(stored["edges"]) != EDGES:
            return NO_PRIOR
        found = {float(t): _belief(part) for t, part in stored["temperatures"].items()}
        if not all(map(math.isfinite, found)):
            raise ValueError("a temperature that is no number")
        return cls(found)


NO_PRIOR = HeadPrior({})


def read_prior(text: str | None) -> HeadPrior:
    """From a head's metadata; ValueError for what is damaged, whatever somebody else wrote there."""
    try:
        return NO_PRIOR if text is None else HeadPrior.of(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"acceptance: {error}") from None


def belief_of(texts: Sequence[Sequence[Judged]]) -> Belief:
    """What all positions of all texts say, at one temperature."""
    positions = [position for text in texts for position in text]
    tops = sorted((p.confidences[:LISTED] for p in positions if p.confidences), key=lambda c: c[0])
    if not tops:
        return GENERIC_BELIEF
    shift, slope, precision = _fit(positions)
    weight = _NODE_WEIGHT / len(positions)
    nodes = [_average(tops[part * len(tops) // _NODES : (part + 1) * len(tops) // _NODES]) for part in range(_NODES)]
    nodes = [nodes[part * _STRIDE % _NODES] for part in range(_NODES)]
    tree = TreePrior(
        round(shift, 4), round(slope, 4), _three(round(weight * value, 4) for value in precision),
        tuple(node for node in nodes if node),
    )  # fmt: skip
    return Belief(replace(count_levels(chains(texts)), together=_TOGETHER), tree)


def chains(texts: Iterable[Sequence[Judged]]) -> Iterator[tuple[Sequence[float], int]]:
    """(confidences, how many were kept) of the chain that would be drafted at every position.

    A draft that was right so far stands on the true text, so its next token is what is proposed there.
    """
    for text in texts:
        for first in range(len(text)):
            stated, kept = [], 0
            for position in text[first : first + CHAIN]:
                stated.append(position.stated)
                if position.kept != 0:
                    break
                kept += 1
            yield stated, kept


def count_levels(*groups: Iterable[tuple[Sequence[float], int]]) -> AcceptancePrior:
    """Counts per level over groups of chains, each scaled to the same number of drafts; rounded, at least 1.

    Tokens after the first wrong one were never judged.
    """
    levels = len(EDGES) + 1
    kept, judged = [0.0] * levels, [0.0] * levels
    following = [[0.0] * levels for _ in range(levels + 1)]
    for group in groups:
        drafts = [draft for draft in group if draft[0]]
        one = _DRAFTS / max(len(drafts), 1)
        for confidences, accepted in drafts:
            last = levels
            for index, confidence in enumerate(confidences[: accepted + 1]):
                level = bisect_right(EDGES, confidence)
                kept[level] += one * (index < accepted)
                judged[level] += one
                following[last][level] += one
                last = level

    def rounded(counts: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(max(round(count), 1)) for count in counts)

    return AcceptancePrior(EDGES, rounded(kept), rounded(judged), tuple(rounded(row) for row in following))


def _fit(positions: Sequence[Judged]) -> tuple[float, float, tuple[float, float, float]]:
    """Shift and slope of largest likelihood over all proposals, with the information about them; Newton's steps."""
    counts: dict[float, list[int]] = {}  # by log-odds to a tenth: how many proposals, how many kept
    for position in positions:
        for index, confidence in enumerate(position.confidences):
            entry = counts.setdefault(round(log_odds(confidence), 1), [0, 0])
            entry[0] += 1
            entry[1] += index == position.kept
    shift, slope, found = 0.0, 1.0, (1.0, 0.0, 1.0)
    for _ in range(_NEWTON):
        # One observation in favour of believing the head keeps this solvable where all or nothing was kept.
        pull, aa, ab, bb = [-shift, 1.0 - slope], 1.0, 0.0, 1.0
        for x, (judged, kept) in counts.items():
            expected = probability(shift + slope * x)
            weight = judged * expected * (1.0 - expected)
            aa, ab, bb = aa + weight, ab + weight * x, bb + weight * x * x
            pull[0] += kept - judged * expected
            pull[1] += (kept - judged * expected) * x
        scale = aa * bb - ab * ab
        shift += min(max((bb * pull[0] - ab * pull[1]) / scale, -1.0), 1.0)
        slope += min(max((aa * pull[1] - ab * pull[0]) / scale, -1.0), 1.0)
        found = (aa, ab, bb)
    return shift, slope, found


def _average(nodes: Sequence[Sequence[float]]) -> tuple[float, ...]:
    width = min(map(len, nodes), default=0)
    return tuple(round(sum(node[place] for node in nodes) / len(nodes), 4) for place in range(width))


def _three(values: Iterable[Any]) -> tuple[float, float, float]:
    first, second, third = (float(value) for value in values)
    return first, second, third


def _plain(belief: Belief) -> dict[str, Any]:
    chain, tree = belief.chain, belief.tree
    return {
        "kept": [int(count) for count in chain.kept],
        "judged": [int(count) for count in chain.judged],
        "following": [[int(count) for count in row] for row in chain.following],
        "shift": tree.shift,
        "slope": tree.slope,
        "precision": list(tree.precision),
        "nodes": [list(node) for node in tree.nodes],
    }


def _belief(stored: Mapping[str, Any]) -> Belief:
    kept, judged = (tuple(map(float, stored[name])) for name in ("kept", "judged"))
    rows = tuple(tuple(map(float, row)) for row in stored["following"])
    nodes = tuple(tuple(map(float, node)) for node in stored["nodes"])
    tree = TreePrior(float(stored["shift"]), float(stored["slope"]), _three(stored["precision"]), nodes)
    levels = len(EDGES) + 1
    if [len(counts) for counts in (kept, judged, *rows)] != [levels] * (levels + 3):
        raise ValueError("other levels of confidence than the edges make")
    counts = [*judged, *(value for row in rows for value in row)]
    # Written so that a number that is none fails too.
    if not all(abs(number) <= _MOST for number in (*counts, *kept, *tree.precision, tree.shift, tree.slope)):
        raise ValueError("a number that cannot be")
    if min(counts) <= 0 or not all(0 <= some <= all_ for some, all_ in zip(kept, judged, strict=True)):
        raise ValueError("counts that cannot be")
    if not nodes or not all(nodes) or not all(0 <= confidence <= 1 for node in nodes for confidence in node):
        raise ValueError("usual nodes that cannot be")
    aa, ab, bb = tree.precision
    if aa <= 0 or aa * bb <= ab * ab:
        raise ValueError("a precision that cannot be")
    return Belief(AcceptancePrior(EDGES, kept, judged, rows, _TOGETHER), tree)
