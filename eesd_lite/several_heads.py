"""Several resident heads: the round's own drafts, the others keep the states that pass their exits.

All heads' layers are resident, so a round may draft at any of them: layers below its exit run while drafting, those
from it on in the verification. States enter the other exits in one of the two, once per token, and are kept for the
accepted path; their keys and values are computed when that head drafts. Used by `eesd_lite.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.controller import Controller
from eesd_lite.controllers_exits import ChoosesExit
from eesd_lite.controllers_tree import TreeController
from eesd_lite.draft_tree import Draft
from eesd_lite.exit_head import ExitHead
from eesd_lite.sampling import Choice, Sampler
from eesd_lite.speculative import Accepted, HeadDrafter, keep_prefix
from eesd_lite.target import Target


class SeveralHeads:
    """The heads of one target, ascending by exit layer; there may be a single one, or none. `begin_prompt` or
    `begin_round`, then the pass; `end` at last. In between, `target.exit_layer` is the round's, then the deepest again.
    """

    def __init__(self, target: Target, heads: Sequence[ExitHead]) -> None:
        self._target = target
        self._heads = {head.exit_layer: head for head in heads}
        self._states: dict[int, list[Tensor]] = {}

    def begin_prompt(self, drafts: bool) -> None:
        """The prompt's pass, split at the deepest exit; where rounds will draft, the other heads keep what passes."""
        self.end()
        if drafts and len(self._heads) > 1:
            self._target.passed = lambda exit_layer, hidden, rows: keep_prefix(self._heads[exit_layer], hidden, rows)

    def begin_round(self, controller: Controller | TreeController, limit: int) -> None:
        """A round that drafts where the controller says, else at the deepest exit."""
        if len(self._heads) < 2:
            return
        deepest = self._target.exits[-1]
        exit_layer = controller.choose_exit(limit) if isinstance(controller, ChoosesExit) else deepest
        self._target.exit_layer = exit_layer
        self._states = {other: [] for other in self._heads if other != exit_layer}
        self._target.passed = self._note

    def _note(self, exit_layer: int, hidden: Tensor, rows: Rows) -> None:
        """Nodes pass in the order in which the tree has them: one by one or in groups below, together above."""
        self._states[exit_layer].append(hidden.clone())

    def keep(self, drafted: Draft, accepted: Accepted) -> None:
        """The other heads keep the states of the visible path."""
        path = [0, *accepted.nodes]
        for exit_layer, pieces in self._states.items():
            states = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            assert len(states) == len(drafted.tree), (exit_layer, len(states), len(drafted.tree))
            self._heads[exit_layer].keep(states[path], drafted.tree.start)
        self._states = {}

    def end(self) -> None:
        """Nothing passes any more."""
        if len(self._heads) > 1:
            self._target.passed, self._target.exit_layer, self._states = None, self._target.exits[-1], {}


class SeveralHeadsDrafter:
    """A `speculative.TreeDrafter`: whatever is asked, the head of the round's exit answers."""

    def __init__(self, heads: Sequence[ExitHead], target: Target, sampler: Sampler) -> None:
        self._target = target
        self._drafters = {head.exit_layer: HeadDrafter(head, target, sampler) for head in heads}

    @property
    def _now(self) -> HeadDrafter:
        return self._drafters[self._target.exit_layer]

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        """See `Drafter`."""
        return self._now.propose(state, rows, position=position, history=history)

    def branches(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]], count: int
    ) -> list[list[Choice]]:
        """See `TreeDrafter`."""
        return self._now.branches(states, rows, position=position, history=history, count=count)

    def keep(self, states: Tensor, first: int) -> None:
        """See `Drafter`."""
        self._now.keep(states, first)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """See `Drafter`."""
        self._now.move(sources, targets)
