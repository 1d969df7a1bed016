"""Several resident heads under one rule: at which exit to draft this round, and how much.

Every exit has beliefs of its own and costs T of its own, both as in `controllers_thompson`; they share what decoding
achieves. A round draws for every exit, asks in the order of what the best draft length promises in tokens per second,
and drafts at the first exit whose rule says yes; if none does, the round is plain. Choosing the exit of a round by
Thompson draws is ours (DESIGN.md, section 6: the exit layer is a decision). Plain Python; reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from eesd_lite.acceptance import AcceptancePrior
from eesd_lite.controllers_thompson import ThompsonController
from eesd_lite.costs import RoundCosts


@runtime_checkable
class ChoosesExit(Protocol):
    """A controller that also says where to draft; asked once a round, before `begin`."""

    def choose_exit(self, limit: int) -> int:
        """The exit layer of a round that may draft at most `limit` tokens."""


class ExitBelief(ThompsonController):
    """One exit's share: it may also be asked what it promises, and be told of rounds that drafted elsewhere."""

    def promise(self) -> float:
        """Tokens per second of the best draft length under this round's draw; without end where nothing was tried."""
        if self._blind:
            return math.inf
        if self._refused > 0:
            return 0.0
        self._fix_draw()
        tokens, coming, best = 1.0, self._expected(len(self._average), self._draw), 1.0 / self._curve[0]
        for k in range(1, self._cap + 1):
            tokens += coming
            coming *= self._later
            best = max(best, tokens / self._curve[k])
        return best

    def elsewhere(self, emitted: int, seconds: float) -> None:
        """A round that drafted at another exit: time passes, and decoding was so fast."""
        self.costs.elsewhere(seconds, emitted)
        self._fade()
        self._waiting -= 1
        self._path = []


class ExitsController:
    """`calibrated` and `beta` where several heads are resident."""

    def __init__(
        self,
        name: str,
        exits: Mapping[int, AcceptancePrior],
        *,
        rng_seed: int = 0,
        costs: Mapping[int, RoundCosts] | None = None,
    ) -> None:
        """`exits`: what is believed of each head before it drafts.

        `costs`: what rounds of this plan cost by exit, as far as it is known from earlier conversations.
        """
        assert exits, "no exits"
        self.name = name
        priors = {at: prior.without_confidence() if name == "beta" else prior for at, prior in exits.items()}
        self._beliefs = {
            at: ExitBelief(
                name, rng_seed=rng_seed + number, costs=costs[at] if costs is not None else None, prior=priors[at],
                explores=1.0 / len(exits),
            )
            for number, at in enumerate(sorted(exits, reverse=True))  # of equals the deepest
        }  # fmt: skip
        self.exit_layer = max(exits)
        self._drafted = 0
        self._first: bool | None = None  # whether the round begins with a draft, until that was asked
        self._chosen = False

    def choose_exit(self, limit: int) -> int:
        """See `ChoosesExit`."""
        beliefs = self._beliefs
        for belief in beliefs.values():
            belief.begin(limit)
        promises = {exit_layer: belief.promise() for exit_layer, belief in beliefs.items()} if limit else {}
        order = sorted(promises, key=lambda exit_layer: -promises[exit_layer])
        wanting = next((exit_layer for exit_layer in order if beliefs[exit_layer].go_on()), None)
        self.exit_layer = max(beliefs) if wanting is None else wanting
        self._first, self._drafted, self._chosen = wanting is not None, 0, True
        return self.exit_layer

    def begin(self, limit: int) -> None:
        """Goes on from `choose_exit`, if it was called for this round."""
        if not self._chosen or limit == 0:
            self.choose_exit(limit)
        self._chosen = False

    def go_on(self) -> bool:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return self._beliefs[self.exit_layer].go_on()

    def drafted(self, confidence: float) -> None:
        self._drafted += 1
        self._beliefs[self.exit_layer].drafted(confidence)

    def draft_took(self, seconds: float) -> None:
        """See `controller.LearnsDraftTime`."""
        self._beliefs[self.exit_layer].draft_took(seconds)

    def observe(self, accepted: int, seconds: float) -> None:
        """A plain round is one at every exit; one that drafted teaches the others how fast decoding is."""
        self._chosen = False
        for exit_layer, belief in self._beliefs.items():
            if exit_layer == self.exit_layer or not self._drafted:
                belief.observe(accepted, seconds)
            else:
                belief.elsewhere(accepted + 1, seconds)
        self._drafted = 0

    def belief(self) -> dict[str, Any]:
        """By exit layer, ascending."""
        return {"exits": {exit_layer: self._beliefs[exit_layer].belief() for exit_layer in sorted(self._beliefs)}}


def exits_controller(
    spec: str, exits: Mapping[int, AcceptancePrior], rng_seed: int = 0, *, costs: Mapping[int, RoundCosts] | None = None
) -> ExitsController | None:
    """The controller of that name for several exits; None where its rule knows only the deepest."""
    kind = spec.strip().lower()
    if len(exits) < 2 or kind not in ("calibrated", "beta"):
        return None
    return ExitsController(kind, exits, rng_seed=rng_seed, costs=costs)
