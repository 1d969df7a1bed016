"""What a round with a tree costs in a replay: seconds from the groups in which it was grown.

A group is one draft step: some nodes from which the head is asked together, then some nodes that join. Drafting costs
the layers below the exit for the current token, and for every group the head by asked rows and the layers below the
exit by joined rows; a verify costs by all nodes and the current token. Chains are trees whose groups hold one node.
Plain Python.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from eesd_lite.errors import TraceError
from eesd_lite.replay.curves import SWEEPS, CostCurve

TREE_CURVES = ("memory", *(f"sweep:{s}" for s in SWEEPS), "gpu:5", "gpu:20", "gpu:40", "gpu:200", "cpu:10", "cpu:40")
_KINDS = "memory, sweep:S, gpu:S or cpu:S"
_KNEE = 4  # rows that the CPU multiplies for about the price of one

Group = tuple[int, int]  # nodes from which the head was asked, nodes that joined
ByRows = Callable[[int], float]  # rows -> seconds


@dataclass(frozen=True)
class TreeCurve:
    """Seconds of the parts of a round by rows."""

    name: str
    lower: ByRows  # the layers below the exit
    head: ByRows  # exit head and lm_head
    verify: ByRows  # the sweep, with whatever it waits for

    def draft_seconds(self, groups: Sequence[Group]) -> float:
        """What passes before verifying."""
        grown = sum(self.head(asked) + (self.lower(joined) if joined else 0.0) for asked, joined in groups if asked)
        later = sum(self.lower(joined) for asked, joined in groups if not asked and joined)
        return self.lower(1) + grown + later

    def seconds(self, groups: Sequence[Group]) -> float:
        """A whole round."""
        return self.draft_seconds(groups) + self.verify(1 + sum(joined for _, joined in groups))

    def of_chains(self, longest: int) -> CostCurve:
        """The same costs for chains of up to so many tokens."""
        chains = [[(1, 1)] * length for length in range(longest + 1)]
        seconds = tuple(accumulate((self.seconds(chain) for chain in chains), max))
        return CostCurve(self.name, seconds, tuple(self.draft_seconds(chain) for chain in chains))


def by_rows(rows: Sequence[int], seconds: Sequence[float]) -> ByRows:
    """Lines between measured numbers of rows, and on beyond the last; more rows never take less, so what a busy
    machine added to few rows is cut off."""
    steady = list(accumulate(map(float, reversed(seconds)), min))[::-1]

    def at(count: int) -> float:
        place = min(max(bisect_left(rows, count), 1), len(rows) - 1)
        low, high = rows[place - 1], rows[place]
        share = (count - low) / (high - low)
        return steady[place - 1] + max(share, 0.0) * (steady[place] - steady[place - 1])

    return at if len(rows) > 1 else lambda count: steady[0]


def make_tree_curve(name: str, measured: dict[str, Any]) -> TreeCurve:
    """The curve of that name from seconds by rows. S: the sweep in draft steps of one row.

    memory        nothing is offloaded
    sweep:S       reading the offloaded layers takes S draft steps; computing hides behind it where it is shorter
    gpu:S         layers are streamed to a card: neither a draft step nor a verify takes longer for more rows
    cpu:S         the CPU multiplies in place: S draft steps for up to four rows, then in proportion to the rows

    TraceError for any other name.
    """
    kind, _, number = name.strip().lower().partition(":")
    rows = measured["rows"]
    lower, head, verify = (by_rows(rows, measured[part]) for part in ("lower", "head", "verify"))
    unit = lower(1) + head(1)
    try:
        sweep = float(number) * unit if number else 0.0
        if not 0 <= sweep < 1e6 * unit or (kind == "memory") == bool(number):
            raise ValueError
        made = {
            "memory": lambda: TreeCurve("memory", lower, head, verify),
            "sweep": lambda: TreeCurve(name, lower, head, lambda n: max(sweep, verify(n))),
            "gpu": lambda: TreeCurve(name, lambda n: lower(1), lambda n: head(1), lambda n: max(sweep, verify(1))),
            "cpu": lambda: TreeCurve(name, lower, head, lambda n: max(sweep * max(1.0, n / _KNEE), verify(n))),
        }[kind]
    except (KeyError, ValueError):
        raise TraceError(f"there is no cost curve {name!r} of trees; choose from {_KINDS} (such as gpu:40)") from None
    return made()
