"""Seconds of a round that drafts a tree, learned while decoding: T(nodes, steps).

A chain of k tokens has one number; a tree has two: its nodes, which the sweep verifies, and the draft steps it was
grown in. The model is a start, a price per step and a convex price of nodes (slopes change at NODE_KNEES), fitted by
least squares with forgetting and no negative prices. What was not seen yet, or not for long, costs nothing, so that it
gets tried.
Plain Python; reads no clock. Used by `eesd_lite.controllers_tree`.
"""

from __future__ import annotations

from operator import mul

NODE_KNEES = (0, 3, 8, 24)  # up to some rows a product costs what one row costs; behind a disk many are free
_KEEP = 0.98  # per round: about the last 50 count
_RATE_KEEP = 0.985  # as in costs.py
_OUTLIER = 3.0  # a round that took more than this many times what was expected counts as this much
_TRUSTED_ROUNDS = 3  # before so many rounds nothing is called an outlier
_SWEEPS = 20  # of coordinate descent after each round; it starts from the last solution, ...
_PLAIN_SWEEPS = 3  # ... which a round without a draft moves little, and such rounds are short
_STALE = 0.05  # rounds' worth of belief that a price is nothing: what was not seen for long is tried again
_RIDGE = 1e-3  # relative to a feature's own weight: shares out the cost of features that only occur together


class TreeCosts:
    """Feed `observe` every round; ask `seconds(nodes, steps)` and `throughput`."""

    def __init__(self) -> None:
        size = 2 + len(NODE_KNEES)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._prices = [0.0] * size
        self._rounds = 0
        self.plain_rounds = 0
        self._tokens = self._seconds = 0.0
        self.most_nodes = -1  # the largest tree so far; -1 before the first round

    def observe(self, nodes: int, steps: int, seconds: float, emitted: int) -> None:
        """One whole round: drafted nodes, draft steps, its seconds, and the tokens that it emitted."""
        seconds = max(seconds, 1e-9)
        known = nodes <= self.most_nodes
        if self._rounds >= _TRUSTED_ROUNDS and known:
            seconds = max(1e-9, min(seconds, _OUTLIER * self.seconds(nodes, steps)))  # a fit may say 0
        self._rounds += 1
        self.plain_rounds += nodes == 0
        self.most_nodes = max(self.most_nodes, nodes)
        self._tokens = _RATE_KEEP * self._tokens + emitted
        self._seconds = _RATE_KEEP * self._seconds + seconds
        features = _features(nodes, steps)
        # Relative errors are what matters: a long round is not known to the microsecond.
        weight = 1.0 / (seconds * seconds)
        for i, x in enumerate(features):
            row = self._gram[i]
            row[:] = [_KEEP * g + weight * x * y for g, y in zip(row, features, strict=True)]
            self._moment[i] = _KEEP * self._moment[i] + weight * x * seconds
        self._solve(_SWEEPS if nodes else _PLAIN_SWEEPS)

    def seconds(self, nodes: int, steps: int) -> float:
        """Expected seconds of a round; 0 before the first."""
        prices = self._prices
        total = prices[0] + prices[1] * steps
        for place, knee in enumerate(NODE_KNEES, start=2):  # a plain round asks several times: no tuples, no zeros
            if nodes <= knee:
                break
            total += prices[place] * (nodes - knee)
        return total

    def throughput(self) -> float:
        """Recent tokens per second; 0 before the first round."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def _solve(self, sweeps: int) -> None:
        """Coordinate descent for non-negative least squares."""
        stale = _STALE / max(self._prices[0], 1e-9) ** 2
        for _ in range(sweeps):
            for i, row in enumerate(self._gram):
                if row[i] <= 0.0:
                    continue
                rest = sum(map(mul, row, self._prices)) - row[i] * self._prices[i]
                ridge = _RIDGE * row[i] + stale if i else 0.0
                self._prices[i] = max(0.0, (self._moment[i] - rest) / (row[i] + ridge))


def _features(nodes: int, steps: int) -> tuple[float, ...]:
    return (1.0, float(steps), *(float(max(0, nodes - knee)) for knee in NODE_KNEES))
