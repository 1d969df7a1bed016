"""How large a tree to draft: `tree` learns what pays here, `tree:N` always takes the N best nodes.

The rule is the one of chains (docs/controller.md): a node joins while the probability of its path, under the round's
Thompson draw, exceeds lambda times what the round's measured time T(nodes, steps) grows by. Acceptance is the head's
own confidence, calibrated by observation: log-odds a + b * log-odds(confidence), a posterior over (a, b) with
forgetting, one draw per round (the paper's Calibration-TS idea, arXiv 2406.03853; the logistic form is ours, because
the many unlikely siblings of a tree need more than levels). Plain Python; reads no clock.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from eesd_lite.acceptance import GENERIC_TREE, TreePrior
from eesd_lite.tree_beliefs import Calibration, Typical, log_odds, probability
from eesd_lite.tree_costs import TreeCosts

Lessons = Sequence[Sequence[tuple[float, bool]]]  # by visited node: each proposal's confidence, and whether it was kept

_KEEP = 0.99  # per round that drafted: about the last 100 count
_KEEP_OFF = 0.998  # per round that did not: what was believed fades, half in 350 rounds
_LEAST_START, _LEAST_MORE = 0.03, 0.005  # tokens that a draft, and going on, must promise; as for chains
_LONE_PLAIN = 0.7  # a single plain round may have been a hiccup: it counts as this much of its time
_ASKING = 0.5  # share of a draft step of one node that is spent when the head was asked and nothing joins
_RAMP = 4  # a tree may have so many times the nodes of the largest whose time is known, and so many more
_REFUSAL = 4  # as for chains
_EXPLORE_AGAIN = 1.0  # plain rounds that exploration may cost in a conversation on a plan whose costs are known
_EXPLORE_SHARE, _EXPLORE_GRANT, _EXPLORE_MOST, _EXPLORE_EVERY = 0.01, 4.0, 10.0, 32  # as for chains; twice the grant


class TreeController(ABC):
    """One round: begin; then asks and take in turn until take says 0; then learn."""

    name: str

    @abstractmethod
    def begin(self, limit: int) -> None:
        """A new round that may draft at most `limit` nodes; 0 is possible. Forgets a round that was not learned."""

    @abstractmethod
    def chance(self, confidence: float) -> float:
        """The probability that a proposal is kept, once the node above it was."""

    @abstractmethod
    def asks(self, reach: float, rivals: Sequence[float]) -> bool:
        """Whether to ask the head below a node; `rivals`, descending, are the reaches of waiting candidates."""

    @abstractmethod
    def take(self, reaches: Sequence[float]) -> int:
        """How many of the waiting candidates, descending, join the tree now; 0 ends the draft."""

    @abstractmethod
    def learn(self, lessons: Lessons, *, nodes: int, steps: int, accepted: int, seconds: float) -> None:
        """The round is over: what was judged, the tree's size, the nodes kept, and the time of the whole round."""

    @abstractmethod
    def belief(self) -> dict[str, Any]:
        """What it has learned, ready for JSON."""


def group_size(reaches: Sequence[float], room: int) -> int:
    """How many of the best candidates (reaches descending) surely belong to the best tree with `room` more nodes.

    The descendants of a candidate share out its reach, so about reach_i / reach_k of them are better than candidate k;
    k belongs to the best `room` if those of all better candidates leave a place.
    """
    ahead = 0.0
    for count, reach in enumerate(reaches[:room]):
        if ahead > room * reach:
            return count
        ahead += reach
    return min(len(reaches), room)


class FixedTree(TreeController):
    """`tree:N`: the N best nodes by the head's own confidence, whatever they cost."""

    def __init__(self, nodes: int) -> None:
        self.name = f"tree:{nodes}"
        self._nodes = nodes
        self._room = 0

    def begin(self, limit: int) -> None:
        self._room = min(limit, self._nodes)

    def chance(self, confidence: float) -> float:
        return confidence

    def asks(self, reach: float, rivals: Sequence[float]) -> bool:
        return self._room > 0 and not (len(rivals) >= self._room and rivals[self._room - 1] >= reach)

    def take(self, reaches: Sequence[float]) -> int:
        count = group_size(reaches, self._room)
        self._room -= count
        return count

    def learn(self, lessons: Lessons, *, nodes: int, steps: int, accepted: int, seconds: float) -> None:
        pass

    def belief(self) -> dict[str, Any]:
        return {}


class ThompsonTree(TreeController):
    """`tree`: grows as far as it pays; where nothing pays, plain rounds with an occasional probe."""

    name = "tree"

    def __init__(self, rng_seed: int = 0, costs: TreeCosts | None = None, prior: TreePrior = GENERIC_TREE) -> None:
        self.costs = costs if costs is not None else TreeCosts()  # belong to the plan, not to a conversation
        self.calibration = Calibration(prior)
        self._random = random.Random(rng_seed)
        self._nodes_seen = Typical(prior.nodes)
        self._account = _EXPLORE_AGAIN * self.costs.seconds(0, 0)  # seconds that exploration may cost
        self._waiting = 0  # rounds until exploring is allowed again
        self._exploring = False
        self._refused = 0  # rounds until a refusal is thought over
        self._begun(0)

    def _begun(self, cap: int) -> None:
        self._cap = cap
        self._nodes = self._steps = 0
        self._draw = self.calibration.mean
        self._rate = self.costs.throughput()
        self._typical = 0.0

    def begin(self, limit: int) -> None:
        """Fixes the round's draw and rate. The first round is plain: what a draft costs is known only against it."""
        most = self.costs.most_nodes
        self._limit = limit
        self._exploring = False
        self._refused -= 1
        if self._refused > 0:
            self._cap = self._nodes = self._steps = 0
            return
        self._begun(min(limit, _RAMP * (most + 1)) if most >= 0 else 0)
        self._draw = self.calibration.draw(self._random)
        self._typical = self._nodes_seen.best(self._draw)

    def chance(self, confidence: float) -> float:
        """Under the round's draw."""
        return probability(self._draw[0] + self._draw[1] * log_odds(confidence))

    def asks(self, reach: float, rivals: Sequence[float]) -> bool:
        """Whether the best proposal to be expected there would pay; at node 0, also whether belief or account allow."""
        room = self._cap - self._nodes
        if room <= 0 or (len(rivals) >= room and rivals[room - 1] >= reach):
            return False
        if self._nodes:
            return reach * self._typical > self._rate * (self._time(1, 0) - self._time(0, 0))
        plain = self._plain_time()
        prices = [self._rate * (self._time(count, 1) - plain) for count in range(1, min(room, 8) + 1)]
        wants = self._nodes_seen.gain(self._draw, prices, -_ASKING * prices[0]) > _LEAST_START
        if self._nodes_seen.gain(self.calibration.mean, prices, -_ASKING * prices[0]) > _LEAST_START:
            return wants
        # The mean belief says that drafting loses time. A draw may disagree, or a probe ask again, on account.
        price = max(self._time(1, 1) - plain, 0.01 * self._time(0, 0))
        if self._account < price or self._waiting > 0:
            self._refused = _REFUSAL
            return False
        self._exploring = True
        if not wants:
            self._cap = 1
        return True

    def take(self, reaches: Sequence[float]) -> int:
        """The group whose paths exceed its price by most, of candidates that surely belong to the best tree.

        Places in it are those that cost less than a candidate's reach: where three nodes are free and a fourth is dear,
        three unlikely siblings must not take what the descendants of a likely one deserve.
        """
        room = self._cap - self._nodes
        now = self._time(0, 0)
        prices = [self._rate * (self._time(count, 1) - now) for count in range(room + 1)]
        each = [price - before for before, price in pairwise(prices)]  # never falling: the price of nodes is convex
        best, ahead, most = 0, 0.0, 0.0
        for count, reach in enumerate(reaches[:room], start=1):
            if ahead > bisect_left(each, reach) * reach:
                break
            ahead += reach
            gain = ahead - prices[count] - (_LEAST_MORE if self._nodes else 0.0)
            if gain > most:
                best, most = count, gain
        if self._exploring and self._cap == 1 and self._nodes == 0:
            best = min(1, len(reaches))
        self._nodes += best
        self._steps += best > 0
        return best

    def learn(self, lessons: Lessons, *, nodes: int, steps: int, accepted: int, seconds: float) -> None:
        first = self.costs.most_nodes < 0
        self.costs.observe(nodes, steps, seconds, accepted + 1)
        if lessons:
            self.calibration.fade(_KEEP)
        elif self._limit > 0:
            self.calibration.fade(_KEEP_OFF)
        for proposals in lessons:
            self._nodes_seen.add([confidence for confidence, _ in proposals])
            for confidence, kept in proposals:
                self.calibration.learn(confidence, kept)
        self._keep_account(nodes, steps, accepted, first=first)

    def _keep_account(self, nodes: int, steps: int, accepted: int, *, first: bool) -> None:
        """Time adds to what exploration may cost; a round of it takes what it cost more than its tokens were worth."""
        plain, took = self.costs.seconds(0, 0), self.costs.seconds(nodes, steps)
        if first:
            self._account = _EXPLORE_GRANT * plain
        self._account += _EXPLORE_SHARE * took
        self._waiting -= 1
        if self._exploring:
            self._waiting = 0 if accepted else _EXPLORE_EVERY
            self._account -= took - plain - accepted / self.costs.throughput()
        self._account = min(self._account, _EXPLORE_MOST * plain)

    def _time(self, more_nodes: int, more_steps: int) -> float:
        return self.costs.seconds(self._nodes + more_nodes, self._steps + more_steps)

    def _plain_time(self) -> float:
        return self.costs.seconds(0, 0) * (_LONE_PLAIN if self.costs.plain_rounds == 1 else 1.0)

    def belief(self) -> dict[str, Any]:
        """Calibration, times by nodes (each level of four nodes one step), and the throughput, as learned so far."""
        a, b = self.calibration.mean
        return {
            "calibration": {"shift": round(a, 3), "slope": round(b, 3)},
            "round_seconds": {n: round(self.costs.seconds(n, -(-n // 4)), 6) for n in (0, 4, 16, 64)},
            "tokens_per_second": round(self.costs.throughput(), 3),
        }
