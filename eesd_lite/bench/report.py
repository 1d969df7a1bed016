"""From measured turns to the figures of the JSON object.

Speeds are decoded tokens over decoding seconds, summed over the prompts of one repeat; then median, minimum and
maximum over the repeats. Speed-up is paired: each repeat against plain decoding in the same repeat, then the median.
Counts are summed over all repeats. Identical means: every id of every prompt in every repeat equals plain's first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eesd_lite.bench.contenders import Run
from eesd_lite.bench.settings import PLAIN
from eesd_lite.bench.turns import Results
from eesd_lite.stats import Stats

DIGITS = 4


@dataclass(frozen=True)
class Difference:
    """Where a contender first left plain decoding's text."""

    repeat: int
    prompt: int
    token: int


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), DIGITS),
        "min": round(min(values), DIGITS),
        "max": round(max(values), DIGITS),
    }


def rate(runs: Sequence[Run]) -> float:
    """Decoded tokens a second over these runs; 0 when nothing was decoded."""
    seconds = sum(run.decode_seconds for run in runs)
    return sum(run.decoded for run in runs) / seconds if seconds > 0 else 0.0


def first_difference(reference: Sequence[Run], repeats: Sequence[Sequence[Run]]) -> Difference | None:
    """The first token that is not the reference's, in any repeat; a shorter answer differs where it ends."""
    for repeat, runs in enumerate(repeats):
        for prompt, (expected, run) in enumerate(zip(reference, runs, strict=True)):
            if expected.ids != run.ids:
                pairs = zip(expected.ids, run.ids, strict=False)
                equal = (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
                return Difference(repeat, prompt, next(equal, min(len(expected.ids), len(run.ids))))
    return None


def total_stats(repeats: Sequence[Sequence[Run]]) -> Stats:
    """The engine's counters, summed over all runs."""
    total = Stats()
    for stats in (run.stats for runs in repeats for run in runs if run.stats is not None):
        total = total.plus(stats)
    return total


def controller_figures(name: str, results: Results) -> dict[str, Any]:
    """Everything the report says about one controller, except its memory."""
    repeats, plain = results[name], results[PLAIN]
    stats = total_stats(repeats)
    speeds, ratios = [rate(runs) for runs in repeats], paired_ratios(repeats, plain)
    difference = first_difference(plain[0], repeats)
    return {
        "tokens_per_second": spread(speeds),
        "speedup": round(statistics.median(ratios), DIGITS),
        "speedup_spread": spread(ratios),
        "identical": difference is None,
        "first_difference": None if difference is None else vars(difference),
        "tokens_compared": sum(len(run.ids) for runs in repeats for run in runs),
        "tau": round(stats.tau, DIGITS),
        "acceptance_rate": round(stats.acceptance_rate, DIGITS),
        "drafted": stats.drafted,
        "draft_depth": stats.draft_depth,
        "accepted": stats.accepted,
        "rounds": stats.rounds,
        "cut": stats.cut,
        "accepted_length_histogram": stats.accepted_length_histogram,
        "draft_forwards": stats.draft_forwards,
        "target_rows": stats.target_rows,
        "draft_offloaded_bytes": stats.draft_offloaded_bytes,
        "verify_offloaded_bytes": stats.verify_offloaded_bytes,
        "prefill_offloaded_bytes": stats.prefill_offloaded_bytes,
        "sweeps": stats.sweeps,
        "prefill_tokens_per_second": round(stats.prefill_tokens_per_second, DIGITS),
        "decode_seconds": round(_decode_seconds(repeats), DIGITS),
        "seconds_per_round": round(_decode_seconds(repeats) / stats.rounds, 6) if stats.rounds else None,
    }


def baseline_figures(name: str, results: Results) -> dict[str, Any]:
    """A peer's speed, and plain decoding's on the same prompts in the same minutes."""
    repeats = results[name]
    count = len(repeats[0])
    plain = [runs[:count] for runs in results[PLAIN]]
    ratios = paired_ratios(plain, repeats)
    return {
        "tokens_per_second": spread([rate(runs) for runs in repeats]),
        "prompts": count,
        "tokens": sum(run.decoded for runs in repeats for run in runs),
        "plain_tokens_per_second": spread([rate(runs) for runs in plain]),
        "plain_speedup_over_it": round(statistics.median(ratios), DIGITS),
        "plain_speedup_spread": spread(ratios),
        "equal_ids_before_first_difference": _common_prefixes(results[PLAIN][0], repeats[0]),
    }


def disk_figures(
    raw: Sequence[float], plain: dict[str, Any], *, sweep_bytes: int, throttle: float | None
) -> dict[str, Any]:
    """The raw rate beside the streamer's, and plain decoding's share of what the link (disk or throttle) allows."""
    link = min([statistics.median(raw), *([throttle] if throttle else [])])
    allowed = link / sweep_bytes
    seconds = plain["decode_seconds"]
    return {
        "raw_bytes_per_second": spread(raw),
        "streamer_bytes_per_second": round(plain["verify_offloaded_bytes"] / seconds) if seconds else 0,
        "plain_sweep_bytes": sweep_bytes,
        "plain_tokens_per_second_that_link_allows": round(allowed, DIGITS),
        "plain_share_of_link": round(plain["tokens_per_second"]["median"] / allowed, DIGITS),
    }


def paired_ratios(repeats: Sequence[Sequence[Run]], base: Sequence[Sequence[Run]]) -> list[float]:
    """How many times faster than `base`, repeat by repeat; 0 where either decoded nothing."""
    pairs = [(rate(runs), rate(others)) for runs, others in zip(repeats, base, strict=True)]
    return [speed / other if other else 0.0 for speed, other in pairs]


def _decode_seconds(repeats: Sequence[Sequence[Run]]) -> float:
    return sum(run.decode_seconds for runs in repeats for run in runs)


def _common_prefixes(plain: Sequence[Run], peer: Sequence[Run]) -> list[int]:
    lengths = []
    for ours, theirs in zip(plain, peer, strict=False):
        pairs = enumerate(zip(ours.ids, theirs.ids, strict=False))
        lengths.append(next((i for i, (a, b) in pairs if a != b), min(len(ours.ids), len(theirs.ids))))
    return lengths
