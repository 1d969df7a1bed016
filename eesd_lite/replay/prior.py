"""Counting how often a head's tokens were kept, by its confidence: how `acceptance.GENERIC` was made from traces."""

from __future__ import annotations

from collections.abc import Sequence

from eesd_lite.acceptance import AcceptancePrior
from eesd_lite.head_prior import count_levels
from eesd_lite.replay.trace import Trace


def acceptance_of(traces: Sequence[Trace]) -> AcceptancePrior:
    """Over all positions of all traces; every trace counts the same."""
    return count_levels(
        *([(p.confidences, p.accepted) for answer in trace.answers for p in answer.positions] for trace in traces)
    )
