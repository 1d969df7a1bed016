"""Controllers that learn what drafting is worth here: `calibrated` and `beta`.

The paper (EESD, arXiv 2406.03853) gives the ideas: Thompson sampling over a Beta posterior of acceptance (Beta-TS), and
a model score calibrated by observation (Calibration-TS). Ours, because its equations were not at hand: posteriors per
level of the head's confidence, the stopping rule on measured whole-round times, forgetting, and the exploration account
that bounds what a bad head can cost. `beta` is the same with one level. See docs/controller.md.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Any

from eesd_lite.acceptance import GENERIC, AcceptancePrior
from eesd_lite.costs import RoundCosts

_PRIOR_WEIGHT = 8.0  # in observations: what a level believes before it saw any, or its part of the prior's
_NEXT_WEIGHT = 8.0  # the same for which level follows which
_KEEP = 0.99  # per observation of a level: about the last 100 count ...
_KEEP_ONE = 0.998  # ... and the last 500 of one level for all, which sees more of them
_KEEP_ALL = 0.98  # the same for the head's honesty over all levels: about the last 50
_KEEP_OFF = 0.998  # per round without drafting: what was believed when drafting stopped fades, half in 350 rounds
_MARGINAL_WEIGHT = 8.0  # in observations: how strongly the next level is guessed from all levels, not from the last
_LEAST_START = 0.03  # tokens that a draft must promise: measured times are not exact enough for less
_LEAST_MORE = 0.005  # tokens that going on must promise
_LONE_PLAIN = 0.7  # a single plain round may have been a hiccup: it counts as this much of its time
_FIRST = 3  # tokens of the first draft, at most ...
_FIRST_LEAST = 0.3  # ... while they are kept with this probability
_RATE_PRIOR = 4.0  # rounds that the promised throughput counts for
_RAMP = 4  # a draft may be so many times as long as the longest whose time is known, plus one
_EXPLORE_SHARE = 0.01  # of the time may be lost to drafting against the mean belief ...
_EXPLORE_GRANT = 2.0  # ... and so many plain rounds at the start, ...
_EXPLORE_AGAIN = 1.0  # ... or so many where a plan's costs are known from earlier conversations, and at most
_EXPLORE_MOST = 10.0  # so many saved up
_REFUSAL = 4  # rounds for which "no draft" stands: beliefs and costs move by less than a per cent in them
_EXPLORE_EVERY = 32  # rounds from one failed exploration to the next, so that cheap drafts of a bad head stay rare too


class ThompsonController:
    """Draws an acceptance per confidence level each round and drafts while some horizon pays under the draw."""

    def __init__(
        self,
        name: str,
        *,
        rng_seed: int = 0,
        costs: RoundCosts | None = None,
        prior: AcceptancePrior = GENERIC,
        explores: float = 1.0,
    ) -> None:
        """`costs`: what rounds of this plan cost, as far as it is known from earlier conversations.

        `explores`: the share of what exploration may cost, where several exits share it.
        """
        self._explores = explores
        self.name = name
        self.costs = costs if costs is not None else RoundCosts()
        self.costs.begin_conversation()
        self._edges = prior.edges
        self._random = random.Random(rng_seed)
        self._expects = prior.acceptance()
        levels = len(self._expects)
        self._weight = max(_PRIOR_WEIGHT, prior.together / levels)
        self._keep = _KEEP if levels > 1 else _KEEP_ONE
        self._all_kept = self._all_stated = 1.0  # discounted counts: tokens kept, and how many were expected to be
        self._kept = [0.0] * levels  # discounted counts of kept tokens, by level
        self._lost = [0.0] * levels
        self._next = prior.next_level(_NEXT_WEIGHT)  # by last level, the last row begins a draft
        self._seen = prior.level_counts(_NEXT_WEIGHT)  # discounted counts of levels, whatever came before
        self._account = 0.0  # seconds that exploration may cost
        self._path: list[int] = []  # levels of this round's drafted tokens
        self._reach = 1.0  # probability, under the draw, that all of them are kept
        self._draw: list[float] = []  # this round's; empty until it is needed
        self._average: list[float] = []  # posterior means of this round
        self._later = self._average_later = 0.0
        self._cap = 0
        self._limit = 0
        self._exploring = False
        self._blind = True  # no round was seen yet
        self._sure = 1.0  # probability, under the mean belief, that this round's tokens are kept
        self._draft_seconds: float | None = None
        self._rate = 0.0
        self._curve: list[float] = []
        self._wanted = False  # the last answer of go_on
        self._begun = False
        self._waiting = 0  # rounds until exploring is allowed again
        self._refused = 0  # rounds until a refusal is thought over

    def begin(self, limit: int) -> None:
        """Fixes the round's curve and rate; its draw when something depends on it."""
        costs = self.costs
        self._limit = limit
        self._path = []
        self._reach = self._sure = 1.0
        self._exploring = self._wanted = False
        self._refused -= 1
        if self._refused > 0:
            self._cap = 0
            return
        self._cap = min(limit, _RAMP * costs.longest_seen() + 1)
        self._draw = []
        self._average = self._mean()
        self._blind = costs.longest_seen() < 0
        if self._blind:
            self._cap = min(limit, _FIRST)
            return
        self._curve = costs.curve(limit)
        if costs.seen(0) == 1:
            self._curve = [_LONE_PLAIN * self._curve[0], *self._curve[1:]]
        self._average_later = self._mixture(self._seen, self._average)
        self._rate = self._blend(costs)

    def _fix_draw(self) -> None:
        """Most rounds that do not draft are decided without it."""
        if not self._draw:
            self._draw = [self._random.betavariate(a, b) for a, b in self._posterior()]
            self._later = self._mixture(self._seen, self._draw)

    def go_on(self) -> bool:
        """Whether some horizon pays from here; at the first token, also whether belief or account allow it."""
        self._wanted = self._decide()
        return self._wanted

    def _decide(self) -> bool:
        if len(self._path) >= self._cap:
            return False
        if self._blind:
            last = self._path[-1] if self._path else len(self._average)
            return self._sure * self._expected(last, self._average) >= _FIRST_LEAST
        if self._path:
            return self._pays(self._reach, self._expected(self._path[-1], self._draw), self._later)
        start = len(self._average)
        promising = self._pays(1.0, self._expected(start, self._average), self._average_later)
        # Where the mean belief says that drafting loses time, a draw may disagree, or a probe ask again, on account.
        price = max(self._curve[1] - self._curve[0], 0.01 * self._curve[0])
        if not promising and (self._account < price or self._waiting > 0):
            self._refused = _REFUSAL
            return False
        self._fix_draw()
        wants = self._pays(1.0, self._expected(start, self._draw), self._later)
        if promising:
            return wants
        self._exploring = True
        if not wants:
            self._cap = 1
        return True

    def drafted(self, confidence: float) -> None:
        """Notes the level of a drafted token."""
        level = bisect_right(self._edges, confidence)
        self._path.append(level)
        if self._blind:
            self._sure *= self._average[level]
        else:
            self._fix_draw()
            self._reach *= self._draw[level]

    def observe(self, accepted: int, seconds: float) -> None:
        """Learns from a round. Tokens after the first rejected one were never judged, so they teach nothing."""
        drafted = len(self._path)
        assert 0 <= accepted <= drafted, (accepted, drafted)
        costs = self.costs
        grant = 0.0 if self._begun else _EXPLORE_AGAIN if costs.longest_seen() >= 0 else _EXPLORE_GRANT
        self._begun, self._blind = True, False
        costs.observe(drafted, seconds, accepted + 1, self._draft_seconds)
        self._draft_seconds = None
        row = len(self._kept)
        for index, level in enumerate(self._path[: accepted + 1]):
            kept = 1.0 if index < accepted else 0.0
            self._kept[level] = self._keep * self._kept[level] + kept
            self._lost[level] = self._keep * self._lost[level] + 1.0 - kept
            for counts in (self._next[row], self._seen):
                counts[:] = [_KEEP * count for count in counts]
                counts[level] += 1.0
            self._all_kept = _KEEP_ALL * self._all_kept + kept
            self._all_stated = _KEEP_ALL * self._all_stated + self._expects[level]
            row = level
        silent = drafted == 0 and self._wanted  # nobody had anything to propose: that was not our decision
        self._exploring = self._exploring and not silent
        if drafted == 0 and self._limit > 0 and not silent:
            self._fade()
        self._keep_account(drafted, accepted, grant)
        self._path = []

    def _fade(self) -> None:
        """What was believed when drafting stopped is held less firmly."""
        self._kept = [_KEEP_OFF * count for count in self._kept]
        self._lost = [_KEEP_OFF * count for count in self._lost]

    def _keep_account(self, drafted: int, accepted: int, grant: float) -> None:
        """Time adds to what exploration may cost; a round of it takes what it cost more than its tokens were worth."""
        curve = self.costs.curve(max(drafted, 1))
        self._account += self._explores * (grant * curve[0] + _EXPLORE_SHARE * curve[drafted])
        self._waiting -= 1
        if self._exploring:
            self._waiting = 0 if accepted else _EXPLORE_EVERY
            self._account -= curve[drafted] - curve[0] - accepted / self.costs.throughput()
        self._account = min(self._account, _EXPLORE_MOST * curve[0])

    def _blend(self, costs: RoundCosts) -> float:
        """Tokens per second that decoding achieves: what recent rounds did, and what belief and costs promise."""
        later = self._average_later
        tokens, coming = 1.0, self._expected(len(self._average), self._average)
        best = tokens / self._curve[0]
        best_seconds = self._curve[0]
        for k in range(1, self._cap + 1):
            if tokens + _all_of(coming, later) <= best * self._curve[k]:
                break  # not even all that could still come would be better: longer drafts take no less time
            tokens += coming
            coming *= later
            if tokens / self._curve[k] > best:
                best, best_seconds = tokens / self._curve[k], self._curve[k]
        return costs.throughput(_RATE_PRIOR * best * best_seconds, _RATE_PRIOR * best_seconds)

    def draft_took(self, seconds: float) -> None:
        """See `controller.LearnsDraftTime`."""
        self._draft_seconds = seconds

    def _pays(self, reach: float, coming: float, later: float) -> bool:
        """The marginal value rule: some horizon's expected tokens exceed what its seconds emit on average."""
        curve, rate = self._curve, self._rate
        now = len(self._path)
        gain = -_LEAST_MORE if now else -_LEAST_START
        reach *= coming
        if now < self._cap and gain + _all_of(reach, later) <= rate * (curve[now + 1] - curve[now]):
            return False  # not even the longest draft would pay: it takes no less time than a single token
        for k in range(now + 1, self._cap + 1):
            gain += reach
            if gain > rate * (curve[k] - curve[now]):
                return True
            reach *= later
        return False

    def _expected(self, last: int, acceptance: list[float]) -> float:
        """Acceptance of a token not drafted yet: its level is unknown, but depends on the last one."""
        counts = self._next[last]
        weight = _MARGINAL_WEIGHT / sum(self._seen)
        return self._mixture([n + weight * s for n, s in zip(counts, self._seen, strict=True)], acceptance)

    @staticmethod
    def _mixture(weights: list[float], values: list[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    def _posterior(self) -> list[tuple[float, float]]:
        """Beta parameters per level. A level without observations believes the head as far as it earned it so far."""
        honesty = min(1.0, self._all_kept / self._all_stated)
        return [
            (self._weight * honesty * expected + kept, self._weight * (1 - honesty * expected) + lost)
            for expected, kept, lost in zip(self._expects, self._kept, self._lost, strict=True)
        ]

    def _mean(self) -> list[float]:
        """Posterior mean of the acceptance per level."""
        return [a / (a + b) for a, b in self._posterior()]

    def belief(self) -> dict[str, Any]:
        """Acceptance per confidence level, seconds by draft length, and the throughput, as learned so far."""
        bounds = (*self._edges, 1.0)
        levels = zip(bounds, self._mean(), self._kept, self._lost, strict=True)
        return {
            "levels": [
                {"up_to": bound, "acceptance": round(mean, 4), "observations": round(kept + lost, 1)}
                for bound, mean, kept, lost in levels
            ],
            "round_seconds": [round(s, 6) for s in self.costs.curve(16)[: self.costs.longest_seen() + 1]],
            "tokens_per_second": round(self.costs.throughput(), 3),
        }


def _all_of(first: float, ratio: float) -> float:
    """Sum of a geometric series without end."""
    return first / max(1.0 - ratio, 1e-9)
