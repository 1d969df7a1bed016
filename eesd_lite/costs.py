"""What a whole round costs, learned while decoding: seconds by number of drafted tokens, and the throughput.

With background fetching a draft step may cost nothing until the link is busy, and costs may jump and level off, so no
formula is assumed: each draft length has the median of its recent rounds, and what is assumed is only that a longer
draft does not make a round shorter. Lengths that were not seen lately are guessed low, so that they get tried.
Plain Python; reads no clock. Used by the controllers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 31  # recent rounds per length: the median survives 15 outliers among them
_FORGET_ROUNDS = 512  # a length not seen for so long counts as unseen: costs grow with the context
_HALF_LIFE = 128  # in rounds: how fast a length that is no longer used loses weight against its neighbours
_OPTIMISM = 0.5  # share of the seen slope that is assumed beyond the longest draft seen
_ROWS = 0.6  # share of a verify of some rows that one row is guessed to take, until a plain round was seen
_RATE_KEEP = 0.985  # per round, for tokens and seconds of the throughput: about the last 67 rounds
_OUTLIER = 3.0  # a round that took more than this many times its length's usual time counts as this much


class RoundCosts:
    """Seconds of a round with k drafted tokens, and tokens per second of late."""

    def __init__(self) -> None:
        self._round = 0
        self._windows: dict[int, deque[float]] = {}
        self._ordered: dict[int, list[float]] = {}  # each window's values, sorted
        self._medians: dict[int, float] = {}
        self._last_round: dict[int, int] = {}
        self._steps: deque[float] = deque(maxlen=_WINDOW)  # drafting seconds per token of recent rounds
        self._tokens = 0.0
        self._seconds = 0.0
        self._asked = 16  # the longest draft whose seconds are computed
        self._curve: list[float] = []  # seconds by k as last computed; empty: compute again

    def observe(self, k: int, seconds: float, emitted: int, draft_seconds: float | None = None) -> None:
        """One whole round: k drafted tokens, its seconds, and the tokens that it emitted (accepted plus one).

        `draft_seconds`: the part before verifying, if that is known. It takes k steps and the pass of the token that
        the round began with, which is about half a step.
        """
        seconds = max(seconds, 1e-9)  # clocks have steps
        if k and draft_seconds is not None:
            self._steps.append(min(draft_seconds, seconds) / (k + 0.5))
        self._round += 1
        window = self._windows.get(k)
        if window is None:
            window = self._windows[k] = deque()
            self._ordered[k] = []
        ordered = self._ordered[k]
        if len(window) == _WINDOW:
            del ordered[bisect_left(ordered, window.popleft())]
        window.append(seconds)
        insort(ordered, seconds)
        # Two samples cannot outvote each other: the smaller is the one that no hiccup lengthened.
        self._medians[k] = ordered[len(ordered) // 2] if len(ordered) > 2 else ordered[0]
        self._last_round[k] = self._round
        self._tokens = _RATE_KEEP * self._tokens + emitted
        self._seconds = _RATE_KEEP * self._seconds + min(seconds, _OUTLIER * self._medians[k])
        self._curve = []

    def elsewhere(self, seconds: float, emitted: int) -> None:
        """A round that drafted in another way: it tells how fast decoding is, and what was seen here grows older."""
        self._round += 1
        self._tokens = _RATE_KEEP * self._tokens + emitted
        self._seconds = _RATE_KEEP * self._seconds + max(seconds, 1e-9)
        self._curve = []
        self._drop_old()

    def begin_conversation(self) -> None:
        """What a round takes belongs to the plan and stays; how fast decoding is depends on the text, too."""
        self._tokens = self._seconds = 0.0

    def throughput(self, more_tokens: float = 0.0, more_seconds: float = 0.0) -> float:
        """Recent tokens per second, with so many more counted in; 0 before the first round."""
        seconds = self._seconds + more_seconds
        return (self._tokens + more_tokens) / seconds if seconds > 0 else 0.0

    def seconds(self, k: int) -> float:
        """Expected seconds of a round with k drafted tokens; 0 before the first round."""
        return self.curve(k)[k]

    def step(self) -> float | None:
        """What drafting a token takes, by itself: what it adds to a round may be more (rows) or less (background)."""
        return sorted(self._steps)[(len(self._steps) - 1) // 2] if self._steps else None

    def seen(self, k: int) -> int:
        """How many recent rounds had exactly k drafted tokens."""
        return len(self._windows.get(k, ()))

    def longest_seen(self) -> int:
        """The longest recent draft; -1 before the first round."""
        return max(self._windows, default=-1)

    def curve(self, longest: int) -> list[float]:
        """seconds(k) for k = 0 .. longest at least, never falling."""
        if len(self._curve) <= longest:
            self._drop_old()
            self._asked = max(self._asked, longest)  # whoever asked for more will do so again
            self._curve = _fill(self._isotonic(), self._asked, self.step())
        return self._curve

    def _drop_old(self) -> None:
        for k in [k for k, last in self._last_round.items() if self._round - last > _FORGET_ROUNDS]:
            del self._windows[k], self._ordered[k], self._medians[k], self._last_round[k]

    def _isotonic(self) -> list[tuple[int, float]]:
        """(k, seconds) of seen lengths; neighbours in the wrong order share their weighted mean."""
        pools: list[tuple[float, float, list[int]]] = []  # mean, weight, lengths
        for k in sorted(self._medians):
            mean = self._medians[k]
            weight = len(self._windows[k]) * 0.5 ** ((self._round - self._last_round[k]) / _HALF_LIFE)
            lengths = [k]
            while pools and pools[-1][0] >= mean:
                before, before_weight, before_lengths = pools.pop()
                total = before_weight + weight
                mean = (before * before_weight + mean * weight) / total
                weight = total
                lengths = before_lengths + lengths
            pools.append((mean, weight, lengths))
        return [(k, mean) for mean, _, lengths in pools for k in lengths]


def _fill(seen: list[tuple[int, float]], longest: int, step: float | None) -> list[float]:
    """Seconds for every length from those seen: straight lines between them, a low guess on both sides."""
    if not seen:
        return [0.0] * (longest + 1)
    (first, low), (last, high) = seen[0], seen[-1]
    slope = (high - low) / (last - first) if last > first else 0.0
    curve = []
    if first > 0:
        # What is left when drafting is taken away may still be dearer than it would be for a single row.
        plain = low / (first + 1) if step is None else 0.5 * step + _ROWS * max(low - (first + 0.5) * step, 0.0)
        plain = min(plain, low)
        curve = [plain + (low - plain) * k / first for k in range(first)]
    curve.append(low)
    for (k0, s0), (k1, s1) in zip(seen, seen[1:], strict=False):
        step_between = (s1 - s0) / (k1 - k0)
        curve.extend(s0 + step_between * (k - k0) for k in range(k0 + 1, k1 + 1))
    beyond = _OPTIMISM * max(slope, step or 0.0)
    curve.extend(high + beyond * (k - last) for k in range(last + 1, longest + 1))
    return curve
