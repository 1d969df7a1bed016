"""A plan's placement in a file, so that a later run has the same one.

Where a layer computes decides which kernel does, and another kernel may give other low bits: ids are the same again
only with the same placement, also when it followed from a measurement. The file holds tiers and what they belong to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eesd_lite.errors import BudgetError
from eesd_lite.exit_choice import ExitTable
from eesd_lite.tiers import TIERS, Plan

_FORMAT = 1


def write_plan(path: Path, plan: Plan, kernels: str, exits: ExitTable | None = None) -> None:
    """Save the placement; whole or not at all. `kernels` names the layout of packed layers, `exits` is what chose the
    exit layer, for people."""
    raw = {
        "format": _FORMAT,
        "kernels": kernels,
        "exit_layer": plan.exit_layer,
        "context": plan.context,
        "tiers": list(plan.tiers),
        **({} if exits is None else {"exits": exits.as_dict()}),
    }
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise BudgetError(f"{path}: the plan cannot be saved ({error.strerror or error})") from None


def read_tiers(path: Path, *, layers: int, kernels: str) -> tuple[str, ...]:
    """The tier of every layer; BudgetError names the file and what is wrong with it."""
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
        tiers, made_for, form = raw["tiers"], raw["kernels"], raw["format"]
    except OSError as error:
        raise BudgetError(f"{path}: the plan cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BudgetError(f"{path}: not a saved plan; remove it and a new one is written") from None
    if form != _FORMAT or not isinstance(tiers, list) or any(tier not in TIERS for tier in tiers):
        raise BudgetError(f"{path}: not a saved plan of format {_FORMAT} (tiers are {', '.join(TIERS)})")
    if len(tiers) != layers:
        raise BudgetError(f"{path}: a plan for {len(tiers)} layers; this model has {layers}")
    if made_for != kernels:
        raise BudgetError(
            f"{path}: made for kernels {made_for}, this run has {kernels}: its ids would not be the same; "
            "remove the file to plan anew"
        )
    return tuple(tiers)


def read_exit_layer(path: Path) -> int | None:
    """Where a saved plan drafts, None for plain decoding; BudgetError for what is no saved plan."""
    try:
        exit_layer = json.loads(path.read_text(encoding="utf-8"))["exit_layer"]
    except OSError as error:
        raise BudgetError(f"{path}: the plan cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BudgetError(f"{path}: not a saved plan; remove it and a new one is written") from None
    if exit_layer is not None and (not isinstance(exit_layer, int) or isinstance(exit_layer, bool) or exit_layer < 1):
        raise BudgetError(f"{path}: not a saved plan (exit layer {exit_layer!r}); remove it and a new one is written")
    return exit_layer
