"""Controllers against fixed lengths and the oracle, over cost curves: the figures of `eesd replay`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eesd_lite.controller import make_controller
from eesd_lite.progress import Progress, no_progress
from eesd_lite.replay.curves import DEFAULT_CURVES, CostCurve, make_curve
from eesd_lite.replay.ngram import ngram_trace
from eesd_lite.replay.player import Played, geometric_mean, oracle, play
from eesd_lite.replay.trace import Trace

DEFAULT_CONTROLLERS = ("hf", "beta", "calibrated")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What to compare. Fixed lengths 0 (off) to k_max and the oracle always take part."""

    controllers: tuple[str, ...] = DEFAULT_CONTROLLERS
    curves: tuple[str, ...] = DEFAULT_CURVES
    mode: str = "conversations"  # or "one", or "cold": see `player.play`
    drafter: str = "head"  # or "ngram": look-ups in the same texts
    noise: float = 0.03
    seeds: int = 3  # luck of the draws and of the noise; figures are over all seeds together

    def __post_init__(self) -> None:
        for spec in self.controllers:
            make_controller(spec)


def compare(trace: Trace, settings: ReplaySettings, progress: Progress = no_progress) -> dict[str, Any]:
    """The JSON object: per curve tokens per second and shares of the best fixed length and of the oracle; over all."""
    trace = ngram_trace(trace) if settings.drafter == "ngram" else trace
    curves = [make_curve(name, trace.about["seconds"]) for name in settings.curves]
    points = []
    for number, curve in enumerate(curves):
        progress(f"replaying {curve.name}", number, len(curves))
        points.append(_point(trace, curve, settings))
    return {
        "benchmark": "eesd replay",
        "trace": {**trace.about, "answers": len(trace.answers), "positions": _positions(trace)},
        "settings": {**vars(settings)},
        "points": points,
        "overall": overall(points),
    }


def _point(trace: Trace, curve: CostCurve, settings: ReplaySettings) -> dict[str, Any]:
    fixed = {spec: _fixed(trace, curve, spec) for spec in ("off", *(f"fixed:{k}" for k in range(1, trace.k_max + 1)))}
    learning = {spec: _seeds(trace, curve, spec, settings) for spec in settings.controllers if spec not in fixed}
    best = max(fixed, key=lambda spec: fixed[spec].tokens_per_second)
    most, limit = fixed[best].tokens_per_second, oracle(trace, curve).tokens_per_second
    return {
        "curve": curve.name,
        "round_seconds": [round(seconds, 6) for seconds in curve.seconds],
        "best_fixed": best,
        "oracle_tokens_per_second": round(limit, 4),
        "controllers": {
            spec: {
                "tokens_per_second": round(played.tokens_per_second, 4),
                "of_best_fixed": round(played.tokens_per_second / most, 4),
                "of_oracle": round(played.tokens_per_second / limit, 4),
                "tau": round(played.tokens / played.rounds, 4) if played.rounds else 0.0,
                "drafted_per_round": round(played.drafted / played.rounds, 3) if played.rounds else 0.0,
            }
            for spec, played in {**fixed, **learning}.items()
        },
    }


def _fixed(trace: Trace, curve: CostCurve, spec: str) -> Played:
    return play(trace, curve, lambda seed, costs: make_controller(spec))


def _seeds(trace: Trace, curve: CostCurve, spec: str, settings: ReplaySettings) -> Played:
    """All seeds added up."""
    total = Played()
    for seed in range(settings.seeds):
        one = play(
            trace,
            curve,
            lambda number, costs: make_controller(spec, number, costs=costs, prior=trace.belief.chain),
            mode=settings.mode,
            noise=settings.noise,
            seed=1000 * seed,
        )
        for name, value in vars(one).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def overall(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Over all points: geometric mean of tokens per second relative to the best fixed shape of each, and the worst."""
    found = {}
    for spec in points[0]["controllers"] if points else ():
        shares = [point["controllers"][spec]["of_best_fixed"] for point in points]
        of_oracle = [point["controllers"][spec]["of_oracle"] for point in points]
        found[spec] = {
            "of_best_fixed": round(geometric_mean(shares), 4),
            "worst_of_best_fixed": min(shares),
            "of_oracle": round(geometric_mean(of_oracle), 4),
        }
    return found


def _positions(trace: Trace) -> int:
    return sum(len(answer.positions) for answer in trace.answers)
