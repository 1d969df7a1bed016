"""A text without a model, for tree controllers: what a head proposes anywhere, what is right there, what rounds cost.

Everything about a place in the text follows from the ids before it, so that controllers of all kinds meet the same
text. The tree itself is grown, accepted and learned from by the real functions, on a target of zeros.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.controllers_tree import TreeController
from eesd_lite.sampling import Choice
from eesd_lite.speculative import accept
from eesd_lite.tree_growth import grow, lessons

Cost = Callable[[int, int], float]  # (nodes, steps) -> seconds
BRANCHES, UNPROPOSED = 16, 999


@dataclass(frozen=True)
class FakeHead:
    """Log-odds of the first proposal: mean and spread; `shift` is added to the truth of what all proposals state."""

    mean: float = 0.5
    spread: float = 1.8
    shift: float = 0.0

    def proposals(self, history: Sequence[int]) -> list[float]:
        """Stated confidences below these ids, descending."""
        rng = random.Random(hash((len(history), *history[-6:])) + 1)
        first = 1 / (1 + math.exp(-(self.mean + self.spread * rng.gauss(0, 1))))
        tail = rng.uniform(0.3, 0.7)
        rest = [(1 - first) * (1 - tail) * tail**n for n in range(BRANCHES - 1)]
        return sorted([first, *rest], reverse=True)

    def truth(self, history: Sequence[int]) -> int:
        """What the target says after these ids: one of the proposals, or something else."""
        draw = random.Random(hash((len(history), *history[-6:])) + 2).random()
        for token, stated in enumerate(self.proposals(history)):
            odds = math.log(stated / (1 - stated + 1e-12) + 1e-12) + self.shift
            draw -= 1 / (1 + math.exp(-odds))
            if draw < 0:
                return token
        return UNPROPOSED


class ZeroTarget:
    """As much of a Target as growing a tree needs."""

    device = torch.device("cpu")

    def embed(self, token_ids: list[int]) -> Tensor:
        return torch.zeros(len(token_ids), 1)

    def lower(self, hidden: Tensor, rows: Rows) -> Tensor:
        return hidden


@dataclass
class FakeDrafter:
    """Proposes what a FakeHead states."""

    head: FakeHead

    def branches(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]], count: int
    ) -> list[list[Choice]]:
        stated = [self.head.proposals(ids) for ids in history]
        return [[Choice(token, c) for token, c in enumerate(row[:count])] for row in stated]

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        raise AssertionError("trees ask for branches")

    def keep(self, states: Tensor, first: int) -> None: ...

    def move(self, sources: list[int], targets: list[int]) -> None: ...


@dataclass
class Outcome:
    """What one run did; `throughput` leaves out the noise of the clock."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    nodes: int = 0
    drafting_rounds: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)  # nodes and steps of every round

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds


def decode(
    controller: TreeController, head: FakeHead, cost: Cost, *, tokens: int, seed: int = 0, noise: float = 0.0
) -> Outcome:
    """Says `tokens` tokens."""
    target: Any = ZeroTarget()
    rng, outcome, visible = random.Random(seed), Outcome(), [1000 + seed, 1]
    logits = torch.zeros(65, 1)
    choose = lambda row, position, history: head.truth(history)  # noqa: E731
    while outcome.tokens < tokens:
        drafted = grow(
            target, FakeDrafter(head), controller, visible=visible, limit=64, depth=64, stop_ids=frozenset()
        )  # fmt: skip
        accepted = accept(drafted.tree, logits, choose, visible)
        nodes, kept = len(drafted.tree) - 1, len(accepted.nodes)
        seconds = cost(nodes, drafted.steps)
        noisy = seconds * math.exp(rng.gauss(0, noise)) * (5 if noise and rng.random() < 0.01 else 1)
        controller.learn(lessons(drafted, accepted), nodes=nodes, steps=drafted.steps, accepted=kept, seconds=noisy)
        visible = [*visible, *accepted.tokens]
        outcome.tokens += kept + 1
        outcome.seconds += seconds
        outcome.rounds += 1
        outcome.log.append((nodes, drafted.steps))
        outcome.nodes += nodes
        outcome.drafting_rounds += nodes > 0
    return outcome
