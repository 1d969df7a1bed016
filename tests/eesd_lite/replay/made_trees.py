"""Traces of trees made by hand or by lot, for tests of replaying."""

from __future__ import annotations

import random
from typing import Any

from eesd_lite.controllers_tree import FixedTree
from eesd_lite.replay.record_trees import recorded
from eesd_lite.replay.trace import Trace
from eesd_lite.replay.tree_trace import RecordedTree, TreeTrace
from eesd_lite.tree_growth import grow
from tests.eesd_lite.fake_trees import FakeDrafter, FakeHead, ZeroTarget
from tests.eesd_lite.replay.made_traces import made

ROWS = {"rows": [1, 3, 5], "lower": [0.25, 0.5, 0.75], "head": [0.75, 1.0, 1.25], "verify": [2.0, 3.0, 5.0]}

# Below node 0: 1 (0.6), 2 (0.3), and 5 (0.1), which did not join. Below 1: 3 (0.5). Below 2: 4 (0.4). Right: 2, 4.
BY_HAND = RecordedTree((0, 0, 1, 2, 0), (0.6, 0.3, 0.5, 0.4, 0.1), (1, 1, 2, 3, 0), (False, True, False, True, False))


def about_trees(trace: Trace, nodes: int) -> Trace:
    return Trace({**trace.about, "trees": {"nodes": nodes, "seconds": ROWS}}, trace.answers)


def by_hand() -> TreeTrace:
    """One answer of four tokens: BY_HAND at its first position, then nothing right."""
    wrong = RecordedTree((0, 1), (0.5, 0.5), (1, 2), (False, False))
    return TreeTrace(about_trees(made([[0, 0, 0]]), 4), ((BY_HAND, wrong, wrong),))


class Watched(FixedTree):
    """As the recorder's."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.groups: list[int] = []

    def take(self, reaches: Any) -> int:
        count = super().take(reaches)
        self.groups += [count] if count else []
        return count


def grown(controller: Any, visible: list[int], head: FakeHead, *, depth: int = 64) -> Any:
    """What the engine's own `grow` makes of a text without a model."""
    target: Any = ZeroTarget()
    return grow(target, FakeDrafter(head), controller, visible=visible, limit=64, depth=depth, stop_ids=frozenset())


def drawn_trees(seed: int, *, answers: int = 2, tokens: int = 30, nodes: int = 64) -> TreeTrace:
    """Texts of FakeHead: real trees below every position."""
    head, chains, trees = FakeHead(0.8), [], []
    for number in range(answers):
        text = [1000 + seed, number]
        for _ in range(tokens + 8):
            text.append(head.truth(text))
        found = []
        for index in range(tokens - 1):
            controller = Watched(nodes)
            drafted = grown(controller, text[: 3 + index], head, depth=tokens - index - 2)
            found.append(recorded(drafted, controller.groups, text[3 + index : 2 + tokens], nodes // 2))
        trees.append(tuple(found))
        chains.append([0] * (tokens - 1))
    rng = random.Random(seed)
    lengths = [[min(rng.choice((0, 0, 1, 2)), tokens - 1 - i) for i in range(tokens - 1)] for _ in chains]
    return TreeTrace(about_trees(made(lengths, longest=tokens), nodes), tuple(trees))
