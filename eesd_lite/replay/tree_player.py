"""Playing a trace of trees: a controller grows inside the recorded trees, time is what a cost curve says.

`regrow` is `tree_growth.grow` with the model taken out. A controller may choose any of the recorded nodes and no
others: below proposals that did not join the recorded tree nothing is known, so nothing is proposed there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from eesd_lite.controllers_tree import TreeController
from eesd_lite.replay.player import Played, by_answer, hiccups, quickest
from eesd_lite.replay.tree_curves import Group, TreeCurve
from eesd_lite.replay.tree_trace import RecordedTree, TreeTrace
from eesd_lite.tree_costs import TreeCosts

MakeTree = Callable[[int, TreeCosts], TreeController]  # from a seed and the plan's costs as learned so far


@dataclass(frozen=True)
class Regrown:
    """One draft: its groups, the nodes that joined, how many of them are kept, and what was judged."""

    groups: tuple[Group, ...]
    nodes: tuple[int, ...]
    accepted: int
    lessons: tuple[tuple[tuple[float, bool], ...], ...]


def regrow(tree: RecordedTree, controller: TreeController, *, limit: int, depth: int) -> Regrown:
    """The tree that `controller` grows of recorded nodes: at most `limit` of them, `depth` levels below the token."""
    reach, depths = {0: 1.0}, {0: 0}
    waiting: list[tuple[float, int]] = []
    fresh, joined, asked_all = [0], [0], set()
    groups: list[Group] = []
    controller.begin(limit if depth > 0 else 0)
    while fresh:
        rivals = [value for value, _ in waiting]
        asked = [node for node in fresh if depths[node] < depth and controller.asks(reach[node], rivals)]
        asked_all.update(asked)
        for node in asked:
            waiting += [
                (reach[node] * controller.chance(tree.confidences[child - 1]), child) for child in tree.children[node]
            ]
        waiting.sort(key=lambda candidate: -candidate[0])  # stable, as in `grow`
        count = min(controller.take([value for value, _ in waiting]), limit - len(joined) + 1)
        chosen, waiting = waiting[:count], waiting[count:]
        if asked or chosen:
            groups.append((len(asked), len(chosen)))
        fresh = [node for _, node in chosen]
        joined += fresh
        reach.update((node, value) for value, node in chosen)
        depths.update((node, depths[tree.parents[node - 1]] + 1) for node in fresh)
    path, present = [0], set(joined)
    while (child := next((c for c in tree.children[path[-1]] if tree.kept[c - 1]), None)) in present:
        assert child is not None
        path.append(child)
    lessons = [
        tuple((tree.confidences[child - 1], tree.kept[child - 1]) for child in tree.children[node])
        for node in path
        if node in asked_all and tree.children[node]
    ]
    return Regrown(tuple(groups), tuple(joined[1:]), len(path) - 1, tuple(lessons))


def play_trees(
    trace: TreeTrace,
    curve: TreeCurve,
    make: MakeTree,
    *,
    mode: str = "conversations",
    noise: float = 0.0,
    seed: int = 0,
    log: list[tuple[Group, ...]] | None = None,
) -> Played:
    """Every answer of the trace; modes and noise as in `player.play`. The groups of every round go to `log`."""
    played, chance = Played(), random.Random(seed)
    for trees, controller in zip(trace.trees, by_answer(make, TreeCosts, mode, seed), strict=False):
        drafts = _play_answer(trees, trace, curve, controller, played, lambda: hiccups(chance, noise))
        if log is not None:
            log += drafts
    return played


def _play_answer(
    trees: tuple[RecordedTree, ...], trace: TreeTrace, curve: TreeCurve, controller: TreeController, played: Played,
    factor: Callable[[], float],
) -> list[tuple[Group, ...]]:  # fmt: skip
    longest, index, last = int(trace.chains.about["params"]["max_new_tokens"]), 0, len(trees)
    rounds = []
    while index < last:
        draft = regrow(trees[index], controller, limit=trace.nodes, depth=max(0, longest - index - 2))
        seconds, steps = curve.seconds(draft.groups), sum(joined > 0 for _, joined in draft.groups)
        controller.learn(
            draft.lessons, nodes=len(draft.nodes), steps=steps, accepted=draft.accepted, seconds=seconds * factor()
        )
        played.tokens += draft.accepted + 1 - max(0, index + draft.accepted + 1 - last)
        played.seconds += seconds
        played.rounds += 1
        played.drafted += len(draft.nodes)
        played.accepted += draft.accepted
        index += draft.accepted + 1
        rounds.append(draft.groups)
    return rounds


def tree_oracle(trace: TreeTrace, curve: TreeCurve) -> Played:
    """The fastest way through every answer with nothing but right nodes, of the tree or of the chain."""
    played = Played()
    for answer, trees in zip(trace.chains.answers, trace.trees, strict=True):
        reach = [max(p.accepted, tree.accepted) for p, tree in zip(answer.positions, trees, strict=True)]
        seconds = curve.of_chains(max(reach, default=0)).seconds
        quickest(reach, seconds, played)
    return played
