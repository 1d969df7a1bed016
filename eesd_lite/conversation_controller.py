"""The controller of an engine: beliefs belong to a conversation, what rounds cost belongs to the plan.

A prompt that goes on from the last one is the same conversation; any other begins a controller anew, which knows the
plan's costs and, where a head's file says it, how often that head was right. Plain Python; used by `eesd_lite.engine`.
"""

from __future__ import annotations

from collections.abc import Mapping

from eesd_lite.controller import Controller, PlanCosts, plan_controller
from eesd_lite.controllers_tree import TreeController
from eesd_lite.head_prior import HeadPrior


class ConversationController:
    """`current` decides. One that is assigned to it stays (a warm start) until `set`."""

    def __init__(self, spec: str, priors: Mapping[int, HeadPrior]) -> None:
        """`priors`: what each head's file says of it, by exit layer, ascending. EesdError for an unknown `spec`."""
        self._priors = dict(priors)
        self._costs = PlanCosts()
        self._last_prompt: list[int] | None = None  # of the conversation that the controller knows
        self._temperature = 0.0  # of that conversation's beginning: what is believed of a head depends on it
        self.set(spec)

    def set(self, spec: str) -> None:
        """Decide anew how much is drafted. EesdError for an unknown `spec`, and all is as it was."""
        self._current = self._fresh(spec)
        self.spec, self._keeps_learning = spec, False

    def _fresh(self, spec: str) -> Controller | TreeController:
        beliefs = {exit_layer: prior.at(self._temperature) for exit_layer, prior in self._priors.items()}
        return plan_controller(spec, self._costs, beliefs)

    @property
    def current(self) -> Controller | TreeController:
        """What decides now."""
        return self._current

    @current.setter
    def current(self, controller: Controller | TreeController) -> None:
        self._current, self._keeps_learning = controller, True

    def forget(self) -> None:
        """The conversation is over."""
        if self._last_prompt is not None and not self._keeps_learning:
            self._current = self._fresh(self.spec)
        self._last_prompt = None

    def continue_or_begin(self, ids: list[int], temperature: float) -> None:
        """A prompt that goes on from the last one is the conversation's next turn; any other begins a new one."""
        last = self._last_prompt
        begins = last is None or not (len(ids) > len(last) and ids[: len(last)] == last)
        if begins and (last is not None or temperature != self._temperature) and not self._keeps_learning:
            self._temperature = temperature
            self._current = self._fresh(self.spec)
        self._last_prompt = ids
