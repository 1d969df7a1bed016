"""From turns to figures: speeds, what a round spends its seconds on, how well reading hides behind computing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eesd_lite.bench.contenders import Run
from eesd_lite.bench.disk import DiskRate
from eesd_lite.bench.report import DIGITS, first_difference, rate, spread, total_stats

if TYPE_CHECKING:
    from eesd_lite.bench.offload.run import Contender


def contender_figures(contender: Contender, plain: Contender) -> dict[str, Any]:
    """Everything about one contender at one point; `failed` says why there is nothing more."""
    figures: dict[str, Any] = {
        "exit_layer": contender.exit_layer,
        "limit_bytes": contender.peer.limit_bytes,
        "limit_method": contender.peer.group.method if contender.peer.group is not None else None,
        "peak_bytes": contender.peer.group.peak_bytes() if contender.peer.group is not None else None,
        "peak_rss_bytes": contender.peer.peak_rss_bytes,
    }
    if contender.failed is not None:
        return figures | {"failed": contender.failed}
    own = [_shared(runs, others) for runs, others in zip(contender.runs, plain.runs, strict=True)]
    ratios = [rate(runs) / rate(others) for runs, others in own if rate(others) > 0]
    figures |= {
        "tokens_per_second": spread([rate(runs) for runs in contender.runs]),
        "over_plain": round(statistics.median(ratios), DIGITS) if ratios else None,
        "tokens": sum(len(run.ids) for runs in contender.runs for run in runs),
    }
    if contender.controller is None:
        return figures | contender.peer.figures()
    return figures | _engine_figures(contender, plain)


def _shared(runs: Sequence[Run], others: Sequence[Run]) -> tuple[Sequence[Run], Sequence[Run]]:
    """The prompts that both answered."""
    count = min(len(runs), len(others))
    return runs[:count], others[:count]


def _engine_figures(contender: Contender, plain: Contender) -> dict[str, Any]:
    stats = total_stats(contender.runs)
    rounds, plan = max(stats.rounds, 1), contender.peer.info["plan"]
    verifying = stats.decode_seconds - stats.draft_seconds
    computing = verifying - stats.wait_seconds
    return {
        "identical": first_difference(plain.runs[0], contender.runs) is None,
        "tau": round(stats.tau, DIGITS),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "rounds": stats.rounds,
        "accepted_length_histogram": stats.accepted_length_histogram,
        "draft_length_histogram": stats.draft_length_histogram,
        "seconds_per_round": {
            "draft": round(stats.draft_seconds / rounds, 6),
            "wait": round(stats.wait_seconds / rounds, 6),
            "compute": round(computing / rounds, 6),
        },
        "overlap": _overlap(stats.decode_seconds, stats.wait_seconds, stats.read_seconds),
        "resident_layers": plan["resident_layers"],
        "planned_bytes": plan["total_bytes"],
        "sweep_bytes": plan["sweep_bytes"],
        "sweeps": stats.sweeps,
        "offloaded_bytes": stats.verify_offloaded_bytes + stats.prefill_offloaded_bytes,
        "draft_offloaded_bytes": stats.draft_offloaded_bytes,
    }


def _overlap(seconds: float, wait: float, read: float) -> float | None:
    """Share of the shorter of reading and computing that ran beside the other while decoding; None: no reading."""
    shorter = min(read, seconds - wait)
    if shorter <= 0:
        return None
    both = read + (seconds - wait) - seconds
    return round(max(0.0, min(1.0, both / shorter)), DIGITS)


def disk_figures(
    link: float | None, raw: Sequence[DiskRate], rate: float | None, sweep_bytes: int, plain: dict[str, Any]
) -> dict[str, Any]:
    """The raw rate, and plain decoding's share of what the link allows; {} when nothing is streamed."""
    if link is None or not sweep_bytes or "tokens_per_second" not in plain:
        return {}
    slower = link if rate is None else min(link, rate)
    streamed = plain["tokens_per_second"]["median"] * sweep_bytes
    return {
        "raw_bytes_per_second": spread([turn.bytes_per_second for turn in raw]) | {"mean": round(link)},
        "method": raw[0].method,
        "plain_bytes_per_second": round(streamed),
        "plain_share_of_link": round(streamed / slower, DIGITS),
    }
