"""One round: draft with the resident layers, verify with one sweep, keep what the target would have said.

The acceptance rule is the whole of exactness (DESIGN.md, section 3): the target's choice at a position is a function of
its logits, the settings and the seed; a proposed token is kept if and only if it is that choice. The paper (arXiv
2406.03853, section 3) verifies by its own sampler; following the target's choice, and trees under one rule, are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.controller import Controller
from eesd_lite.draft_tree import Draft, DraftTree
from eesd_lite.exit_head import ExitHead
from eesd_lite.sampling import Choice, Sampler, SubsetSampler
from eesd_lite.target import LOGITS_ROWS, Target

VERIFY_ROWS = 4  # rows of lm_head that cost what one costs: reading it once is most of the work


class Keeper(Protocol):
    """Whoever keeps something per visible token."""

    def keep(self, states: Tensor, first: int) -> None:
        """Visible tokens from position `first` on, from which nothing was proposed; their states [rows, hidden].

        Whatever is kept per token has to be there when the next token is proposed.
        """
        ...


class Drafter(Keeper, Protocol):
    """Whoever proposes tokens. Anything may be proposed: it can cost speed, never change what is emitted."""

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        """A token for `position`, given the state [1, hidden] of the node before it and the ids before it; or None."""
        ...

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Slots of an accepted path move to their final places."""
        ...


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter that proposes several tokens for several nodes at once. Others grow trees without branches."""

    def branches(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]], count: int
    ) -> list[list[Choice]]:
        """For every node, given as in `propose`: up to `count` different tokens, the likeliest first."""
        ...


class HeadDrafter:
    """Drafts with the exit head, under the noise that the target will use at the same position.

    A head with a draft vocabulary drafts from that only, with probabilities among its tokens as confidences.
    """

    def __init__(self, head: ExitHead, target: Target, sampler: Sampler) -> None:
        self._head, self._ops, self._lm_head = head, target.ops, target.lm_head
        self._vocabulary = head.vocabulary
        self._sampler: Sampler | SubsetSampler = sampler
        if head.vocabulary is not None and head.vocabulary.ids is not None:
            self._sampler = SubsetSampler(sampler, head.vocabulary.ids)

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        """See `Drafter`."""
        return self.choices(state, rows, position=[position], history=[history])[0]

    def choices(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]]
    ) -> list[Choice | None]:
        """As `propose`, for several nodes in one pass of the head."""
        return [
            None if logits is None else self._sampler.choose(logits, place, before, with_confidence=True)
            for logits, place, before in zip(self._logits(states, rows), position, history, strict=True)
        ]

    def branches(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]], count: int
    ) -> list[list[Choice]]:
        """See `TreeDrafter`: one pass of the head for all nodes."""
        return [
            [] if logits is None else self._sampler.ranked(logits, place, before, count)
            for logits, place, before in zip(self._logits(states, rows), position, history, strict=True)
        ]

    def _logits(self, states: Tensor, rows: Rows) -> Iterator[Tensor | None]:
        """By row; None for numbers that are not finite: a broken head proposes nothing, only the target's numbers may
        stop a run."""
        for part in self._head.forward(states, rows).split(LOGITS_ROWS):
            logits = self._project(part.contiguous())
            sound = torch.isfinite(torch.stack(torch.aminmax(logits, dim=1))).all(0).tolist()
            yield from (row if good else None for row, good in zip(logits, sound, strict=True))

    def _project(self, x: Tensor) -> Tensor:
        if self._vocabulary is not None:
            return self._vocabulary.logits(x, self._ops)
        return self._ops.logits(x, self._lm_head)

    def keep(self, states: Tensor, first: int) -> None:
        """See `Drafter`."""
        self._head.keep(states, first)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """See `Drafter`."""
        self._head.move(sources, targets)


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


class Logits(Protocol):
    """The target's logits by node; a tensor [nodes, vocab] will do."""

    def __getitem__(self, node: int, /) -> Tensor: ...


@dataclass
class VisitedLogits:
    """lm_head for the nodes that acceptance visits: a wide tree is verified, but only one path of it is walked.

    Up to VERIFY_ROWS rows cost what one does, so the likeliest nodes below the asked one come along.
    """

    target: Target
    hidden: Tensor  # [nodes, hidden] after the last layer
    tree: DraftTree
    _known: dict[int, Tensor] = field(default_factory=dict)

    def __getitem__(self, node: int, /) -> Tensor:
        if node not in self._known:
            nodes, child = [node], self.tree.first_child(node)
            while child is not None and len(nodes) < VERIFY_ROWS:
                nodes.append(child)
                child = self.tree.first_child(child)
            # Acceptance only goes down, so what was known is not asked again.
            self._known = dict(zip(nodes, self.target.logits(self.hidden[nodes]), strict=True))
        return self._known[node]


def verify(target: Target, drafted: Draft) -> VisitedLogits:
    """One sweep over the layers from the exit on for all nodes together; float32 logits [vocab] of a node on demand."""
    hidden = drafted.states.clone()  # the drafter may still need the states
    return VisitedLogits(target, target.upper(hidden, drafted.tree.rows(target.device)), drafted.tree)


@dataclass(frozen=True)
class Accepted:
    """`nodes`: the accepted nodes below node 0, in order; `tokens`: theirs, then the correction or bonus token."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


def accept(
    tree: DraftTree, logits: Logits, choose: Callable[[Tensor, int, Sequence[int]], int], visible: Sequence[int]
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


@dataclass(frozen=True)
class Round:
    """A finished round, for whoever wants to look: the draft, what became of it, and where the seconds went."""

    drafted: Draft
    accepted: Accepted
    visible: tuple[int, ...]  # before the round
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float  # lm_head of visited nodes, acceptance, compaction
    exit_layer: int  # where it drafted; 0: no head


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
            drafter.keep(drafted.states[node : node + 1], tree.start + depth)


def keep_prefix(keeper: Keeper, hidden: Tensor, rows: Rows, chunk: int = 128) -> None:
    """Hand the states of a prompt to a drafter or a head in bounded pieces."""
    start = int(rows.positions[0])
    for first in range(0, len(rows), chunk):
        keeper.keep(hidden[first : first + chunk], start + first)
