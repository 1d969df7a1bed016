"""How much to draft: the protocol, the baselines, and the names that users type.

A controller decides after each drafted token whether to draft one more. It can change how fast text appears, never
which text. It reads no clock: whoever runs the rounds hands it the seconds. The two controllers that learn are in
controllers_thompson.py; docs/controller.md explains them. Plain Python.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from eesd_lite.acceptance import GENERIC, GENERIC_BELIEF, GENERIC_TREE, AcceptancePrior, Belief, TreePrior
from eesd_lite.controllers_exits import exits_controller
from eesd_lite.controllers_thompson import ThompsonController
from eesd_lite.controllers_tree import FixedTree, ThompsonTree, TreeController
from eesd_lite.costs import RoundCosts
from eesd_lite.errors import EesdError
from eesd_lite.tree_costs import TreeCosts

CONTROLLER_NAMES = ("calibrated", "beta", "fixed:K", "hf", "off", "tree", "tree:NODES")
LONGEST_CHAIN, LARGEST_TREE = 16, 64  # what a round may draft unless a user says otherwise
_HF_THRESHOLD = 0.4  # transformers' assistant_confidence_threshold
_SHARE = re.compile(r"0?\.[0-9]{1,6}|[01](\.0{0,6})?")  # 0 to 1
_HF_LONGEST = 20  # transformers' num_assistant_tokens


class Controller(Protocol):
    """One round: begin, then go_on and drafted in turn until go_on says no, then observe."""

    @property
    def name(self) -> str:
        """The spec that makes this controller."""

    def begin(self, limit: int) -> None:
        """A new round that may draft at most `limit` tokens; 0 is possible. Forgets a round that was not observed."""

    def go_on(self) -> bool:
        """Whether to draft one more token."""

    def drafted(self, confidence: float) -> None:
        """A token was drafted; the head gave it this probability."""

    def observe(self, accepted: int, seconds: float) -> None:
        """The round is over: so many drafted tokens were kept, and the whole round took so long."""

    def belief(self) -> dict[str, Any]:
        """What it has learned, ready for JSON."""


@runtime_checkable
class LearnsDraftTime(Protocol):
    """A controller that also wants to know how long drafting took; told once a round, before `observe`."""

    def draft_took(self, seconds: float) -> None:
        """The part of the round's seconds that passed before verifying."""


class FixedController:
    """Always drafts the same number of tokens: `fixed:K`, and `off` for none."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._left = 0

    @property
    def name(self) -> str:
        return f"fixed:{self.length}" if self.length else "off"

    def begin(self, limit: int) -> None:
        self._left = min(limit, self.length)

    def go_on(self) -> bool:
        return self._left > 0

    def drafted(self, confidence: float) -> None:
        self._left -= 1

    def observe(self, accepted: int, seconds: float) -> None:
        pass

    def belief(self) -> dict[str, Any]:
        return {}


class ThresholdController:
    """The rule of transformers' assisted generation: draft until a token's confidence is below a threshold."""

    def __init__(self, threshold: float = _HF_THRESHOLD) -> None:
        self.threshold = threshold
        self._left = 0

    @property
    def name(self) -> str:
        return "hf" if self.threshold == _HF_THRESHOLD else f"hf:{self.threshold:g}"

    def begin(self, limit: int) -> None:
        self._left = min(limit, _HF_LONGEST)

    def go_on(self) -> bool:
        return self._left > 0

    def drafted(self, confidence: float) -> None:
        self._left = self._left - 1 if confidence >= self.threshold else 0

    def observe(self, accepted: int, seconds: float) -> None:
        pass

    def belief(self) -> dict[str, Any]:
        return {}


def draft_limit_for(*specs: str) -> int:
    """The most tokens that rounds of these controllers may draft: the slots beyond the context to plan for."""
    return max(LARGEST_TREE if isinstance(any_controller(spec), TreeController) else LONGEST_CHAIN for spec in specs)


@dataclass
class PlanCosts:
    """What rounds of a plan cost, as far as they were seen: every conversation adds to it."""

    chains: RoundCosts = field(default_factory=RoundCosts)
    trees: TreeCosts = field(default_factory=TreeCosts)
    by_exit: defaultdict[int, RoundCosts] = field(default_factory=lambda: defaultdict(RoundCosts))


def plan_controller(spec: str, costs: PlanCosts, exits: Mapping[int, Belief]) -> Controller | TreeController:
    """The controller that a user names, for a plan with heads at `exits`, ascending, and what is believed of each."""
    several = exits_controller(spec, {at: belief.chain for at, belief in exits.items()}, costs=costs.by_exit)
    if several is not None:
        return several
    deepest = exits[max(exits)] if exits else GENERIC_BELIEF
    return any_controller(spec, costs=costs.chains, tree_costs=costs.trees, belief=deepest)


def any_controller(
    spec: str, rng_seed: int = 0, *, costs: RoundCosts | None = None, tree_costs: TreeCosts | None = None,
    belief: Belief = GENERIC_BELIEF,
) -> Controller | TreeController:  # fmt: skip
    """The controller that a user names, of chains or of trees; EesdError lists the names.

    Those that learn begin with the costs of the plan, of chains and of trees, if it has run before, and add to them;
    and with what is believed of the head.
    """
    tree = _tree_controller(spec, rng_seed, tree_costs, belief.tree)
    return tree if tree is not None else make_controller(spec, rng_seed, costs=costs, prior=belief.chain)


def _tree_controller(
    spec: str, rng_seed: int, costs: TreeCosts | None = None, prior: TreePrior = GENERIC_TREE
) -> TreeController | None:
    kind, colon, number = spec.strip().lower().partition(":")
    if kind != "tree":
        return None
    if not colon:
        return ThompsonTree(rng_seed, costs, prior)
    if number.isascii() and number.isdigit() and len(number) <= 4 and 1 <= int(number) <= LARGEST_TREE:
        return FixedTree(int(number))
    raise EesdError(f"tree:NODES takes a number of nodes from 1 to {LARGEST_TREE}, not {spec!r}")


def make_controller(
    spec: str, rng_seed: int = 0, *, costs: RoundCosts | None = None, prior: AcceptancePrior = GENERIC
) -> Controller:
    """The controller of chains that a user names; EesdError lists the names.

    Those that learn begin with `prior`, and with `costs` of the plan if it has run before; they add to `costs`.
    """
    if _tree_controller(spec, rng_seed) is not None:
        raise EesdError(f"{spec} grows trees; here only chains can be compared, such as calibrated or fixed:4")
    kind, _, number = spec.strip().lower().partition(":")
    if kind == "fixed" and number.isascii() and number.isdigit() and len(number) <= 4:
        return FixedController(int(number))
    if kind == "hf" and _SHARE.fullmatch(number):
        return ThresholdController(float(number))
    if not number and ":" not in spec:
        if kind == "calibrated":
            return ThompsonController(kind, rng_seed=rng_seed, costs=costs, prior=prior)
        if kind == "beta":
            return ThompsonController(kind, rng_seed=rng_seed, costs=costs, prior=prior.without_confidence())
        if kind == "hf":
            return ThresholdController()
        if kind == "off":
            return FixedController(0)
    raise EesdError(
        f"there is no controller {spec!r}; choose from {', '.join(CONTROLLER_NAMES)} (such as fixed:4 or hf:0.5)"
    )
