"""Playing a trace: a controller decides at the recorded positions, time is what a cost curve says.

The loop is the engine's (`Engine._round`) with the model taken out, so that all controllers meet the same luck.
`oracle` knows what would be accepted and takes the fastest way through an answer: no controller can beat it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from eesd_lite.controller import Controller, LearnsDraftTime
from eesd_lite.costs import RoundCosts
from eesd_lite.replay.curves import CostCurve
from eesd_lite.replay.trace import Answer, Trace

MakeController = Callable[[int, RoundCosts], Controller]  # from a seed and the plan's costs as learned so far
Costs = TypeVar("Costs")
Plays = TypeVar("Plays")
MODES = ("conversations", "one", "cold")
_HICCUP = 0.01  # share of rounds that take five times as long, when times are noisy


@dataclass
class Played:
    """Sums over answers. `seconds` are the curve's own, whatever noise the controller was shown."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def by_answer(
    make: Callable[[int, Costs], Plays], no_costs: Callable[[], Costs], mode: str, seed: int
) -> Iterator[Plays]:
    """Each answer's controller, without end; what is kept from one to the next depends on the mode, as in `play`."""
    assert mode in MODES, mode
    costs = no_costs()
    controller = make(seed, costs)
    for number in count(1):
        yield controller
        if mode != "one":
            costs = no_costs() if mode == "cold" else costs
            controller = make(seed + number, costs)


def play(
    trace: Trace,
    curve: CostCurve,
    make: MakeController,
    *,
    mode: str = "conversations",
    noise: float = 0.0,
    seed: int = 0,
) -> Played:
    """Every answer of the trace. By `mode`: a conversation each, as in an engine (beliefs begin anew, the plan's costs
    are known from the ones before); turns of one conversation; or "cold", where costs are forgotten as well.

    `noise` is the spread of the seconds that the controller sees (and one round in a hundred takes five times as long).
    """
    played, chance = Played(), random.Random(seed)
    for answer, controller in zip(trace.answers, by_answer(make, RoundCosts, mode, seed), strict=False):
        _play_answer(answer, trace, curve, controller, played, lambda: hiccups(chance, noise))
    return played


def _play_answer(
    answer: Answer, trace: Trace, curve: CostCurve, controller: Controller, played: Played, factor: Callable[[], float]
) -> None:
    longest, index, last = int(trace.about["params"]["max_new_tokens"]), 0, len(answer.answer) - 1
    while index < last:
        position = answer.positions[index]
        limit = max(0, min(trace.k_max, longest - index - 2))
        controller.begin(limit)
        drafted = 0
        while drafted < min(limit, len(position.tokens)) and controller.go_on():
            controller.drafted(position.confidences[drafted])
            drafted += 1
        accepted = min(drafted, position.accepted)
        noise = factor()
        if isinstance(controller, LearnsDraftTime):
            controller.draft_took(curve.draft_seconds[drafted] * noise)
        controller.observe(accepted, curve.seconds[drafted] * noise)
        index += accepted + 1
        played.tokens += accepted + 1 - max(0, index - last)  # the last round's bonus may lie behind the end
        played.seconds += curve.seconds[drafted]
        played.rounds += 1
        played.drafted += drafted
        played.accepted += accepted


def hiccups(chance: random.Random, noise: float) -> float:
    """What the seconds that a controller sees are multiplied by."""
    if not noise:
        return 1.0
    return math.exp(chance.gauss(0.0, noise)) * (5.0 if chance.random() < _HICCUP else 1.0)


def oracle(trace: Trace, curve: CostCurve) -> Played:
    """The fastest way through every answer, found backwards from its end."""
    played = Played()
    for answer in trace.answers:
        quickest([position.accepted for position in answer.positions], curve.seconds, played)
    return played


def quickest(accepted: Sequence[int], seconds: Sequence[float], played: Played) -> None:
    """Add the fastest way through one answer where so many right tokens can be drafted at its positions.

    `seconds[k]`: a round that drafts k of them and nothing else.
    """
    last = len(accepted)
    best: list[tuple[float, int]] = [(0.0, 0)] * (last + 1)  # seconds from here to the end, tokens drafted here
    for index in range(last - 1, -1, -1):
        best[index] = min(
            (seconds[k] + best[min(index + k + 1, last)][0], k) for k in range(accepted[index] + 1)
        )  # fmt: skip
    index = 0
    while index < last:
        k = best[index][1]
        played.rounds, played.drafted, played.accepted = played.rounds + 1, played.drafted + k, played.accepted + k
        index += k + 1
    if last:
        played.tokens, played.seconds = played.tokens + last, played.seconds + best[0][0]


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))
