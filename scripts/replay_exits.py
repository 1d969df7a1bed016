"""Two resident heads against each alone, on recorded traces of the same answers: `python scripts/replay_exits.py`.

A controller that may draft at either exit meets the luck of both traces; costs are those of `eesd replay`, with one
unit for both (a draft step at the deeper exit) and the times of one trace scaled to the plain round of the other.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

from eesd_lite.controller import make_controller
from eesd_lite.controllers_exits import ExitsController
from eesd_lite.costs import RoundCosts
from eesd_lite.replay.curves import CostCurve, make_curve
from eesd_lite.replay.player import Played, hiccups, play
from eesd_lite.replay.trace import Trace

FOLDER = Path(__file__).parent.parent / "docs/benchmarks/traces"
EXITS, CURVES, NOISE = (10, 20), ("memory", "sweep:2", "sweep:5", "sweep:10", "sweep:40", "cpu:10"), 0.03


def play_both(traces: dict[int, Trace], curves: dict[int, CostCurve], seed: int) -> tuple[Played, Counter[int]]:
    """Every answer a conversation; the sums, and rounds by exit (0: plain)."""
    played, rounds, chance = Played(), Counter[int](), random.Random(seed)
    costs = {at: RoundCosts() for at in traces}
    beliefs = {at: trace.belief.chain for at, trace in traces.items()}
    some = next(iter(traces.values()))
    for number, answer in enumerate(some.answers):
        controller = ExitsController("calibrated", beliefs, rng_seed=2 * (seed + number), costs=costs)
        index, last = 0, len(answer.answer) - 1
        while index < last:
            limit = max(0, min(some.k_max, int(some.about["params"]["max_new_tokens"]) - index - 2))
            at, drafted = controller.choose_exit(limit), 0
            controller.begin(limit)
            position = traces[at].answers[number].positions[index]
            while drafted < min(limit, len(position.tokens)) and controller.go_on():
                controller.drafted(position.confidences[drafted])
                drafted += 1
            accepted, noise = min(drafted, position.accepted), hiccups(chance, NOISE)
            controller.draft_took(curves[at].draft_seconds[drafted] * noise)
            controller.observe(accepted, curves[at].seconds[drafted] * noise)
            rounds[at if drafted else 0] += 1
            index += accepted + 1
            played.tokens += accepted + 1 - max(0, index - last)
            played.seconds += curves[at].seconds[drafted]
    return played, rounds


def main(kind: str) -> None:
    traces = {at: Trace.load(FOLDER / f"smollm2-135m-exit{at}-{kind}.npz") for at in EXITS}
    steps = {at: dict(trace.about["seconds"]) for at, trace in traces.items()}
    plain = {at: times["lower"] + times["verify"][0] for at, times in steps.items()}
    unit = steps[EXITS[1]]["lower"] + steps[EXITS[1]]["head"]
    for at, times in steps.items():
        scale = plain[EXITS[1]] / plain[at]
        times |= {"lower": scale * times["lower"], "head": scale * times["head"], "unit": unit}
        times["verify"] = [scale * seconds for seconds in times["verify"]]
    for name in CURVES:
        curves = {at: make_curve(name, times) for at, times in steps.items()}
        alone = {
            at: play(
                trace, curves[at],
                lambda n, costs, t=trace: make_controller("calibrated", n, costs=costs, prior=t.belief.chain),  # type: ignore[misc]
                noise=NOISE,
            ).tokens_per_second
            for at, trace in traces.items()
        }  # fmt: skip
        both, rounds = play_both(traces, curves, 0)
        off = 1.0 / curves[EXITS[1]].seconds[0]
        shares = ", ".join(f"{at or 'plain'} {rounds[at] / rounds.total():.2f}" for at in (0, *EXITS))
        single = ", ".join(f"exit {at} {speed / off:.3f}" for at, speed in alone.items())
        speed = both.tokens_per_second
        print(f"{name}: {single}, both {speed / off:.3f} ({speed / max(alone.values()):.3f} of the better); {shares}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "greedy")
