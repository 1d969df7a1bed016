"""A decoder without a model, for controllers: tokens have difficulties, heads have confidences, rounds have costs.

The difficulty of neighbouring tokens is correlated, as in text. A head accepts a token of difficulty d with a
probability that its confidence more or less states. Costs are injected functions of the draft length.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from eesd_lite.controller import Controller

Cost = Callable[[int], float]


@dataclass(frozen=True)
class Head:
    """How good a head is: mean and spread of log-odds of acceptance, and how honest its confidence is."""

    mean: float
    spread: float = 1.8
    honesty: float = 1.0  # 1: confidence is the probability of acceptance; 0: it says nothing
    bias: float = 0.0  # added to the log-odds that the confidence states


GOOD = Head(1.2)
MIDDLING = Head(0.0)
BAD = Head(-4.6, spread=0.8, honesty=0.0, bias=0.5)  # accepts 2-3 %, and is not ashamed


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


class FakeText:
    """An endless text: the log-odds of acceptance at each position, with memory."""

    def __init__(self, seed: int, memory: float = 0.5) -> None:
        self._random = random.Random(seed)
        self._memory = memory
        self._values: list[float] = []

    def difficulty(self, position: int) -> float:
        while len(self._values) <= position:
            last = self._values[-1] if self._values else 0.0
            fresh = self._random.gauss(0.0, math.sqrt(1 - self._memory**2))
            self._values.append(self._memory * last + fresh)
        return self._values[position]


@dataclass
class Outcome:
    """What one run of a controller did."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    drafting_rounds: int = 0

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds


def decode(
    controller: Controller,
    *,
    head: Head | Callable[[int], Head],
    cost: Cost,
    tokens: int,
    limit: int = 16,
    noise: float = 0.0,
    seed: int = 0,
    skip: int = 0,
    growth: float = 0.0,
) -> Outcome:
    """Emits `tokens` tokens; the first `skip` of them are not counted. `growth`: how much dearer the end is."""
    text, chance = FakeText(seed), random.Random(seed + 1)
    outcome = Outcome()
    position = 0
    while position < tokens:
        now = head(position) if callable(head) else head
        controller.begin(limit)
        drafted, accepted, alive = 0, 0, True
        while controller.go_on():
            odds = now.mean + now.spread * text.difficulty(position + drafted)
            stated = now.bias + now.honesty * odds + (1 - now.honesty) * chance.gauss(0.0, 1.0)
            alive = alive and chance.random() < sigmoid(odds)
            accepted += alive
            drafted += 1
            controller.drafted(sigmoid(stated))
        seconds = cost(drafted) * (1 + growth * position / tokens)
        if noise:
            seconds *= math.exp(chance.gauss(0.0, noise))
            if chance.random() < 0.01:
                seconds *= 5  # a hiccup of the machine: controllers see it, the account of the test does not
        controller.observe(accepted, seconds)
        position += accepted + 1
        if position > skip:
            outcome.tokens += accepted + 1
            outcome.seconds += cost(drafted) * (1 + growth * position / tokens)
            outcome.rounds += 1
            outcome.drafted += drafted
            outcome.drafting_rounds += drafted > 0
    return outcome
