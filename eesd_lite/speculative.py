"""One round: draft with the resident layers, verify with one sweep, keep what the target would have said.

The acceptance rule is the whole of exactness (DESIGN.md, section 3): the target's choice at a position is a function of
its logits, the settings and the seed; a proposed token is kept if and only if it is that choice. The paper (arXiv
2406.03853, section 3) verifies by its own sampler; following the target's choice, and trees under one rule, are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.controller import Controller
from eesd_lite.draft_tree import DraftTree
from eesd_lite.exit_head import ExitHead
from eesd_lite.sampling import Choice, Sampler
from eesd_lite.target import Target


class Drafter(Protocol):
    """Whoever proposes tokens. Anything may be proposed: it can cost speed, never change what is emitted."""

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        """A token for `position`, given the state [1, hidden] of the node before it and the ids before it; or None."""
        ...

    def keep(self, state: Tensor, rows: Rows) -> None:
        """Visible tokens from which nothing was proposed: whatever the drafter keeps per token, keep it now."""
        ...

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Slots of an accepted path move to their final places."""
        ...


class HeadDrafter:
    """Drafts with the exit head, under the noise that the target will use at the same position."""

    def __init__(self, head: ExitHead, target: Target, sampler: Sampler) -> None:
        self._head, self._target, self._sampler = head, target, sampler

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        """See `Drafter`."""
        logits = self._target.ops.logits(self._head.forward(state, rows), self._target.lm_head)[0]
        if not bool(torch.isfinite(torch.stack(torch.aminmax(logits))).all()):
            return None  # a broken head proposes nothing; only the target's numbers may stop a run
        return self._sampler.choose(logits, position, history, with_confidence=True)

    def keep(self, state: Tensor, rows: Rows) -> None:
        """See `Drafter`."""
        self._head.keep(state, rows)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """See `Drafter`."""
        self._head.move(sources, targets)


@dataclass(frozen=True)
class Draft:
    """A finished draft: the tree, the states entering the exit layer [nodes, hidden], nodes proposed from."""

    tree: DraftTree
    states: Tensor
    proposed_from: frozenset[int]


def draft(
    target: Target,
    drafter: Drafter | None,
    controller: Controller,
    *,
    visible: Sequence[int],
    limit: int,
    stop_ids: frozenset[int],
) -> Draft:
    """Grow a chain from the last visible token until the controller wants to verify, at most `limit` tokens.

    Every node passes the layers below the exit once, the last one included, so that verification can start from kept
    states. Nothing is proposed after a token in `stop_ids`.
    """
    tree = DraftTree(start=len(visible) - 1, tokens=[visible[-1]])
    state = target.lower(target.embed([visible[-1]]), tree.row(0, target.device))
    states, proposed_from, history = [state], set(), list(visible)
    controller.begin(limit if drafter is not None else 0)
    while drafter is not None and len(tree) <= limit and controller.go_on():
        node = len(tree) - 1
        choice = drafter.propose(state, tree.row(node, target.device), position=len(history), history=history)
        proposed_from.add(node)
        if choice is None:
            break
        controller.drafted(choice.confidence if choice.confidence is not None else 0.0)
        node = tree.add(choice.token_id, node)
        history.append(choice.token_id)
        state = target.lower(target.embed([choice.token_id]), tree.row(node, target.device))
        states.append(state)
        if choice.token_id in stop_ids:
            break
    return Draft(tree, torch.cat(states) if len(states) > 1 else state, frozenset(proposed_from))


def verify(target: Target, drafted: Draft) -> Tensor:
    """One sweep over the layers from the exit on for all nodes together: float32 logits [nodes, vocab]."""
    hidden = drafted.states.clone()  # the drafter may still need the states
    return target.logits(target.upper(hidden, drafted.tree.rows(target.device)))


@dataclass(frozen=True)
class Accepted:
    """`nodes`: the accepted nodes below node 0, in order; `tokens`: theirs, then the correction or bonus token."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


def accept(
    tree: DraftTree, logits: Tensor, choose: Callable[[Tensor, int, Sequence[int]], int], visible: Sequence[int]
) -> Accepted:
    """Follow the target's choices down the tree for as long as a child proposes them.

    `choose(logits [vocab], position, ids before it)` is the target's rule. The token after the last match is emitted
    too: the correction if the tree proposed others there, the bonus if it proposed nothing.
    """
    node, history = 0, list(visible)
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        token = choose(logits[node], len(history), history)
        tokens.append(token)
        history.append(token)
        child = tree.child(node, token)
        if child is None:
            return Accepted(tuple(nodes), tuple(tokens))
        nodes.append(child)
        node = child


def crop(target: Target, drafter: Drafter | None, drafted: Draft, accepted: Accepted) -> None:
    """Leave the caches as a fresh prefill of the visible tokens would: move the accepted path, fill what was skipped.

    Slots beyond the visible tokens hold rubbish that nothing reads: a cache is as long as its owner says.
    """
    tree = drafted.tree
    path = [0, *accepted.nodes]
    sources = [tree.start + node for node in path]
    targets = [tree.start + depth for depth in range(len(path))]
    if sources != targets:
        target.kv.move(sources, targets)
    if drafter is None:
        return
    if sources != targets:
        drafter.move(sources, targets)
    for depth, node in enumerate(path):
        if node not in drafted.proposed_from:
            drafter.keep(drafted.states[node : node + 1], Rows.chain(tree.start + depth, 1, target.device))
