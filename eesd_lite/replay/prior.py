"""Counting how often a head's tokens were kept, by its confidence: how `acceptance.GENERIC` was made from traces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from eesd_lite.acceptance import EDGES, AcceptancePrior
from eesd_lite.replay.trace import Trace

_DRAFTS = 1000.0  # every trace is scaled to so many


def acceptance_of(traces: Sequence[Trace]) -> AcceptancePrior:
    """Over all positions of all traces; tokens after the first rejected one were never judged. Rounded, at least 1."""
    levels = len(EDGES) + 1
    kept, judged = [0.0] * levels, [0.0] * levels
    following = [[0.0] * levels for _ in range(levels + 1)]
    for trace in traces:
        positions = [p for answer in trace.answers for p in answer.positions if p.tokens]
        one = _DRAFTS / max(len(positions), 1)
        for position in positions:
            last = levels
            for index, confidence in enumerate(position.confidences[: position.accepted + 1]):
                level = bisect_right(EDGES, confidence)
                kept[level] += one * (index < position.accepted)
                judged[level] += one
                following[last][level] += one
                last = level

    def rounded(counts: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(max(round(count), 1)) for count in counts)

    return AcceptancePrior(EDGES, rounded(kept), rounded(judged), tuple(rounded(row) for row in following))
