"""What a round costs in a replay: seconds by number of drafted tokens, from a name and the steps measured in a trace.

Everything is built from three measured times: a draft step (exit head, lm_head and the layers below the exit), one
pass through the layers below the exit, and a verify by rows. What a curve adds is the sweep over offloaded layers, in
draft steps. Plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from eesd_lite.errors import TraceError

SWEEPS = (5, 10, 20, 40, 80, 120, 200)
DEFAULT_CURVES = ("memory", *(f"sweep:{s}" for s in SWEEPS), "hidden:10:6", "hidden:40:6", "jump:20:4", "cpu:10")
_KINDS = "memory, sweep:S, hidden:S:H, jump:S:K or cpu:S"
_KNEE = 4  # rows that the CPU multiplies for about the price of one (docs/controller.md)


@dataclass(frozen=True)
class CostCurve:
    """`seconds[k]`: a whole round with k drafted tokens, never falling; `draft_seconds[k]`: what precedes verifying."""

    name: str
    seconds: tuple[float, ...]
    draft_seconds: tuple[float, ...]


def make_curve(name: str, steps: dict[str, Any]) -> CostCurve:
    """The curve of that name. S: the sweep in draft steps, without what verifying computes.

    memory        nothing is offloaded
    sweep:S       reading the offloaded layers takes S draft steps; computing hides behind it where it is shorter
    hidden:S:H    the first H draft steps of a round are free, for the sweep is fetched meanwhile
    jump:S:K      beyond K drafted tokens the sweep takes a quarter longer, as when the ring of buffers is outgrown
    cpu:S         the CPU multiplies in place: S draft steps for up to four rows, then in proportion to the rows

    TraceError for any other name.
    """
    kind, *numbers = name.strip().lower().split(":")
    try:
        values = [float(number) for number in numbers]
        shape = {
            ("memory", 0): lambda: _memory,
            ("sweep", 1): lambda: _sweep(values[0]),
            ("hidden", 2): lambda: _hidden(*values),
            ("jump", 2): lambda: _jump(*values),
            ("cpu", 1): lambda: _cpu(values[0]),
        }[kind, len(values)]()
        if not all(0 <= value < 1e6 for value in values):
            raise ValueError
    except (KeyError, ValueError):
        raise TraceError(f"there is no cost curve {name!r}; choose from {_KINDS} (such as sweep:40)") from None
    lower, step = float(steps["lower"]), float(steps["lower"]) + float(steps["head"])
    unit = float(steps.get("unit", step))  # look-ups draft for nothing; their sweeps count in a head's draft steps
    verify = verify_by_rows(steps)
    seconds = [lower + k * step + shape(k, unit, verify[k]) for k in range(len(verify))]
    drafting = tuple(lower + k * step for k in range(len(verify)))
    return CostCurve(name.strip().lower(), tuple(accumulate(seconds, max)), drafting)


def verify_by_rows(steps: dict[str, Any]) -> list[float]:
    """Seconds of a verify of 1, 2, ... rows. More rows never take less, so what a busy machine added is cut off."""
    return list(accumulate(map(float, reversed(steps["verify"])), min))[::-1]


Shape = Callable[[int, float, float], float]  # drafted tokens, unit of sweeps, verify of k + 1 rows -> seconds


def _memory(k: int, unit: float, verify: float) -> float:
    return verify


def _sweep(sweep: float) -> Shape:
    return lambda k, unit, verify: max(sweep * unit, verify)


def _hidden(sweep: float, free: float) -> Shape:
    return lambda k, unit, verify: max((sweep - min(k, free)) * unit, verify)


def _jump(sweep: float, longest: float) -> Shape:
    return lambda k, unit, verify: max(sweep * unit * (1.25 if k > longest else 1.0), verify)


def _cpu(sweep: float) -> Shape:
    return lambda k, unit, verify: max(sweep * unit * max(1.0, (k + 1) / _KNEE), verify)
