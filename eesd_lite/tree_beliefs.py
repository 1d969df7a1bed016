"""What `tree` believes of a head: what its confidence is worth, and what it proposes below a node not asked yet.

Plain Python; used by `controllers_tree`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence

from eesd_lite.acceptance import TreePrior

_ODDS_LIMIT = 7.0  # log-odds beyond are not told apart
_RECENT = 64  # visited nodes whose proposals say what asking is worth
LISTED = 8  # proposals of such a node that are looked at


class Calibration:
    """The posterior of (a, b) in log-odds(kept) = a + b * log-odds(confidence), by Laplace's approximation."""

    def __init__(self, prior: TreePrior) -> None:
        self._prior = prior
        self._precision = [0.0, 0.0, 0.0]  # of the data: aa, ab, bb
        self._pull = [0.0, 0.0]  # precision times mean, of the data
        self.mean = (prior.shift, prior.slope)

    def fade(self, keep: float) -> None:
        """Observations so far count less."""
        self._precision = [keep * value for value in self._precision]
        self._pull = [keep * value for value in self._pull]

    def learn(self, confidence: float, kept: bool) -> None:
        """One judged proposal."""
        x = log_odds(confidence)
        a, b = self.mean
        expected = probability(a + b * x)
        weight = max(expected * (1.0 - expected), 1e-4)
        target = weight * (a + b * x) + (kept - expected)
        for place, value in enumerate((weight, weight * x, weight * x * x)):
            self._precision[place] += value
        self._pull[0] += target
        self._pull[1] += target * x
        aa, ab, bb = self._posterior()
        prior = self._prior
        right = (
            self._pull[0] + prior.precision[0] * prior.shift + prior.precision[1] * prior.slope,
            self._pull[1] + prior.precision[1] * prior.shift + prior.precision[2] * prior.slope,
        )
        scale = aa * bb - ab * ab
        self.mean = ((bb * right[0] - ab * right[1]) / scale, (aa * right[1] - ab * right[0]) / scale)

    def draw(self, rng: random.Random) -> tuple[float, float]:
        """(a, b) from the posterior; b is never negative: more confidence is not less."""
        aa, ab, bb = self._posterior()
        spread_b = math.sqrt(aa / (aa * bb - ab * ab))
        b = self.mean[1] + spread_b * rng.gauss(0.0, 1.0)
        a = self.mean[0] - ab / aa * (b - self.mean[1]) + rng.gauss(0.0, 1.0) / math.sqrt(aa)
        return a, max(b, 0.0)

    def _posterior(self) -> tuple[float, float, float]:
        aa, ab, bb = self._precision
        more = self._prior.precision
        return aa + more[0], ab + more[1], bb + more[2]


class Typical:
    """Log-odds of what the head proposed at nodes visited lately, best first; at first, what heads usually propose."""

    def __init__(self, nodes: Iterable[Sequence[float]]) -> None:
        self._nodes: deque[list[float]] = deque(maxlen=_RECENT)
        for confidences in nodes:
            self.add(confidences)

    def add(self, confidences: Sequence[float]) -> None:
        """A node's proposals, likeliest first."""
        self._nodes.append([log_odds(c) for c in confidences[:LISTED]])

    def best(self, belief: tuple[float, float]) -> float:
        """What the best proposal of a node is worth on average."""
        a, b = belief
        return sum(probability(a + b * odds[0]) for odds in self._nodes) / len(self._nodes)

    def gain(self, belief: tuple[float, float], prices: Sequence[float], least: float) -> float:
        """What the best group of a node's proposals is worth on average: their chances less prices[count - 1]; at least
        `least`, which is what it costs to ask and then to stop."""
        a, b = belief
        total = 0.0
        for odds in self._nodes:
            most, chances = least, 0.0
            for x, price in zip(odds, prices, strict=False):
                chances += probability(a + b * x)
                most = max(most, chances - price)
            total += most
        return total / len(self._nodes)


def log_odds(p: float) -> float:
    p = min(max(p, 1e-9), 1.0 - 1e-9)
    return min(max(math.log(p / (1.0 - p)), -_ODDS_LIMIT), _ODDS_LIMIT)


def probability(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds)) if log_odds > -700 else 0.0
