"""Growing a token tree: best first, in groups that share one draft step.

A candidate is a token that the head proposed below a node; the probability of its path is the product of the chances
that a `TreeController` gives to the head's confidences. The controller says how many of the best candidates join the
tree together and from which of them the head is asked again. The first child of a node is what a chain would draft.
Source: SpecExec and EAGLE-2 grow trees best first to a fixed size; growing to where it stops paying is ours (DESIGN.md,
section 6). Called by `eesd_lite.engine` in place of `speculative.draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.controller import Controller
from eesd_lite.controllers_tree import TreeController
from eesd_lite.draft_tree import Draft, DraftTree
from eesd_lite.sampling import Choice
from eesd_lite.speculative import Accepted, Drafter, TreeDrafter, draft
from eesd_lite.target import Target

WIDTH = 32  # proposals taken from one node: further ones would hardly ever be among the best 64


@dataclass(frozen=True)
class _Candidate:
    """A proposed token, the node it would hang below, and the probability that it is reached and kept."""

    reach: float
    parent: int
    token: int


def draft_any(
    target: Target,
    drafter: Drafter | None,
    controller: Controller | TreeController,
    *,
    visible: Sequence[int],
    limit: int,
    depth: int,
    stop_ids: frozenset[int],
) -> Draft:
    """A chain or a tree of at most `limit` proposed nodes, as the controller has it."""
    if isinstance(controller, TreeController):
        return grow(target, drafter, controller, visible=visible, limit=limit, depth=depth, stop_ids=stop_ids)
    return draft(target, drafter, controller, visible=visible, limit=limit, stop_ids=stop_ids)


def grow(
    target: Target,
    drafter: Drafter | None,
    controller: TreeController,
    *,
    visible: Sequence[int],
    limit: int,
    depth: int,
    stop_ids: frozenset[int],
) -> Draft:
    """A tree of at most `limit` proposed nodes and `depth` levels below the last visible token.

    Every node passes the layers below the exit once. Nothing is proposed after a token in `stop_ids`.
    """
    tree = DraftTree(start=len(visible) - 1, tokens=[visible[-1]])
    states = [target.lower(target.embed([visible[-1]]), tree.row(0, target.device))]
    reach, depths, steps = [1.0], [0], 0
    proposals: dict[int, list[Choice]] = {}
    waiting: list[_Candidate] = []
    fresh = [0]
    controller.begin(limit if drafter is not None and depth > 0 else 0)
    while drafter is not None and fresh:
        open_nodes = [n for n in fresh if depths[n] < depth and (n == 0 or tree.tokens[n] not in stop_ids)]
        rivals = [candidate.reach for candidate in waiting]
        asked = [node for node in open_nodes if controller.asks(reach[node], rivals)]
        if asked:
            entering = torch.cat([states[node] for node in asked])
            found = _branches(drafter, entering, tree, asked, visible, min(limit, WIDTH), target.device)
            proposals.update(zip(asked, found, strict=True))
            waiting += _candidates(asked, found, reach, controller)
            waiting.sort(key=lambda candidate: -candidate.reach)  # stable: among equals the older comes first
        count = min(controller.take([candidate.reach for candidate in waiting]), limit - len(tree) + 1)
        chosen, waiting = waiting[:count], waiting[count:]
        if not chosen:
            break
        fresh = [tree.add(candidate.token, candidate.parent) for candidate in chosen]
        reach += [candidate.reach for candidate in chosen]
        depths += [depths[candidate.parent] + 1 for candidate in chosen]
        steps += 1
        rows = tree.rows_of(fresh, target.device)
        states += target.lower(target.embed([candidate.token for candidate in chosen]), rows).split(1)
    entering = torch.cat(states) if len(states) > 1 else states[0]
    return Draft(tree, entering, frozenset(proposals), proposals, tuple(reach), steps)


def _branches(
    drafter: Drafter,
    states: Tensor,
    tree: DraftTree,
    nodes: Sequence[int],
    visible: Sequence[int],
    count: int,
    device: torch.device,
) -> list[list[Choice]]:
    """What the drafter proposes below each of `nodes`, whose states are given."""
    rows: Rows = tree.rows_of(nodes, device)
    histories = [tree.ids_before(node, visible) for node in nodes]
    positions = [len(history) for history in histories]
    if isinstance(drafter, TreeDrafter):
        return drafter.branches(states, rows, position=positions, history=histories, count=count)
    found = []
    for row, history in enumerate(histories):
        choice = drafter.propose(
            states[row : row + 1], rows.slice(row, row + 1), position=positions[row], history=history
        )
        found.append([] if choice is None else [choice])
    return found


def _candidates(
    nodes: Sequence[int], found: Sequence[Sequence[Choice]], reach: Sequence[float], controller: TreeController
) -> list[_Candidate]:
    return [
        _Candidate(reach[node] * controller.chance(choice.confidence or 0.0), node, choice.token_id)
        for node, choices in zip(nodes, found, strict=True)
        for choice in choices
    ]


def lessons(drafted: Draft, accepted: Accepted) -> list[list[tuple[float, bool]]]:
    """By visited node: the confidence of every proposal below it, and whether the target chose it.

    Proposals that did not join the tree were judged too. Nodes that were not visited teach nothing.
    """
    judged = zip((0, *accepted.nodes), accepted.tokens, strict=True)
    return [
        [(choice.confidence or 0.0, choice.token_id == token) for choice in drafted.proposals[node]]
        for node, token in judged
        if drafted.proposals.get(node)
    ]


def tell(controller: Controller | TreeController, drafted: Draft, accepted: Accepted, seconds: float) -> None:
    """How the round went, to a controller of either kind."""
    kept = len(accepted.nodes)
    if not isinstance(controller, TreeController):
        controller.observe(kept, seconds)
        return
    nodes, judged = len(drafted.tree) - 1, lessons(drafted, accepted)
    controller.learn(judged, nodes=nodes, steps=drafted.steps, accepted=kept, seconds=seconds)
