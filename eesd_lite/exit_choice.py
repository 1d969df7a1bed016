"""Which exit layer drafts: every exit that fits, with the speed to be expected of it, beside plain decoding.

"The deepest resident exit" is one answer among several: a deep head guesses better, but its draft steps pass more
layers, and its bytes (and a deep split that they force) may cost resident layers. So each exit gets its own best plan
under the same budgets, the time of a round by the rates, and tau as a chain of the share of tokens that its head lets
expect to be kept; the best draft length and then the best exit follow. A pure function: the same integers and rates
give the same choice. An estimate, not a measurement (`eesd bench --exit-layer auto` measures). Plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from eesd_lite.errors import EesdError, HeadError
from eesd_lite.plan_cost import Rates, sweep_cost
from eesd_lite.tiers import DEVICE, DISK, HOST_COMPUTE, HOST_STREAM, Plan, PlanRequest, best_plan
from eesd_lite.units import format_size

AUTO = "auto"
LONGEST = 16  # drafted tokens of a round that are considered
CUDA_RATE = 400 * 10**9  # bytes a second from a card's memory, where nobody states it
CPU_ROW, CUDA_ROW = 0.3, 0.0  # one more row of a pass, as a share of one row: docs/tau.md, "Which exit"


ExitWish = int | str | Sequence[int] | None  # a layer, `auto`, several layers, or what is usual


def check_exit(exit_layer: ExitWish, head: str | Path | None) -> None:
    """EesdError for an exit layer that is neither numbers nor `auto`, or for `auto` where there is no choice."""
    split_exits(exit_layer)
    if isinstance(exit_layer, str) and exit_layer != AUTO:
        raise EesdError(f"exit_layer must be a number of layers or '{AUTO}', not '{exit_layer}'")
    if exit_layer == AUTO and head in ("instant", "random"):
        raise EesdError(
            f"exit layer {AUTO} chooses among heads that say how often they are right; name one with --head {head}"
        )


def _is_layer(value: object) -> TypeGuard[int]:
    """Python's True is an int: a configuration file's `true` must not become layer 1."""
    return isinstance(value, int) and not isinstance(value, bool)


def split_exits(exit_layer: ExitWish) -> tuple[int | str | None, tuple[int, ...]]:
    """The deepest exit, or what was said instead, and the others ascending.

    EesdError for one that is named twice, and for what is no number of layers.
    """
    if exit_layer is None or isinstance(exit_layer, str) or _is_layer(exit_layer):
        return exit_layer, ()
    if not isinstance(exit_layer, Sequence) or not all(_is_layer(one) for one in exit_layer):
        raise EesdError(f"exit_layer must be a number of layers, several of them, or '{AUTO}', not {exit_layer!r}")
    exits = sorted(int(one) for one in exit_layer)
    twice = [one for one, other in zip(exits, exits[1:], strict=False) if one == other]
    if twice:
        raise EesdError(f"exit layer {twice[0]} is named twice; name every exit once")
    if not exits:
        raise EesdError("no exit layer is named; name one or several, such as 10 and 20")
    return exits[-1], tuple(exits[:-1])


@dataclass(frozen=True, kw_only=True)
class ExitFigures:
    """What is expected of drafting at `exit_layer` (None: plain decoding). Zeros where `note` says why it is out."""

    exit_layer: int | None
    kept: float | None = None  # the share of drafted tokens that is expected to be kept, once those before them were
    resident_layers: int = 0
    sweep_bytes: int = 0
    sweep_seconds: float = 0.0
    draft_step_seconds: float = 0.0
    draft_length: int = 0
    tau: float = 0.0
    round_seconds: float = 0.0
    tokens_per_second: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ExitTable:
    """Plain decoding first, then exits ascending; `chosen` None: plain decoding promises most."""

    rows: tuple[ExitFigures, ...]
    chosen: int | None
    rates: Rates

    @property
    def plain(self) -> ExitFigures:
        """Plain decoding with the same memory."""
        return self.rows[0]

    def row(self, exit_layer: int | None) -> ExitFigures:
        """The figures of one exit."""
        return next(row for row in self.rows if row.exit_layer == exit_layer)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = asdict(self.rates)
        return {"chosen": self.chosen, "rows": [asdict(row) for row in self.rows], "rates": rates}


def choose_exit(request: PlanRequest, heads: Mapping[int, float | None], rates: Rates) -> ExitTable:
    """The table for these budgets; `heads` has the share of drafted tokens to be kept by exit layer, None: not known.

    `request.head_bytes` must be a head's; `request.exit_layer` is not looked at. What ties with something shallower, or
    with plain decoding, is not chosen.
    """
    assert request.head_bytes > 0 or not heads, request
    rows = [_figures(request, None, None, rates)]
    rows += [_figures(request, exit_layer, heads[exit_layer], rates) for exit_layer in sorted(heads)]
    best = max(rows, key=lambda row: row.tokens_per_second)  # the first of equals
    return ExitTable(rows=tuple(rows), chosen=best.exit_layer, rates=rates)


@dataclass(frozen=True)
class Settled:
    """An exit layer (None: plain decoding), why, and the table where one decided."""

    exit_layer: int | None
    table: ExitTable | None = None
    notes: tuple[str, ...] = ()


def settle_exit(
    request: PlanRequest, heads: Mapping[int, float | None], rates: Rates, *, default: int | None
) -> Settled:
    """The exit that promises most; with a `default`, only where that one does not fit. HeadError without any head.

    Where a split is fixed by hand a head costs no layers, and controllers stop drafting by themselves: in place of a
    default that does not fit then comes the best exit that does, even if plain decoding promises more.
    """
    if default is not None and _fits(request, default):
        return Settled(default)
    if not heads:
        raise HeadError("--exit-layer auto chooses among exit heads, and there are none; see eesd train")
    table = choose_exit(request, heads, rates)
    if default is None:
        return Settled(table.chosen, table, (_choice_note(table, table.chosen),))
    chosen = table.chosen
    if request.resident_layers is not None:
        drafting = [row for row in table.rows[1:] if not row.note]
        chosen = max(drafting, key=lambda row: row.tokens_per_second).exit_layer if drafting else None
    if chosen is None:
        return Settled(default, table)  # planning says what is missing
    words = f"exit layer {default}, this model's default, does not fit"
    return Settled(chosen, table, (f"{words}; {_choice_note(table, chosen)}",))


def _fits(request: PlanRequest, exit_layer: int) -> bool:
    enough = request.resident_layers is None or request.resident_layers >= exit_layer
    return enough and best_plan(request, exit_layer) is not None


def _choice_note(table: ExitTable, chosen: int | None) -> str:
    if chosen is None:
        return "plain decoding promises more than drafting at any exit that fits (an estimate)"
    others = ", ".join(str(row.exit_layer) for row in table.rows[1:] if row.exit_layer != chosen and not row.note)
    gain = table.row(chosen).tokens_per_second / max(table.plain.tokens_per_second, 1e-9)
    beside = f" over {others}" if others else ""
    return f"exit layer {chosen} is chosen{beside}: {gain:.2f} of plain decoding with the same memory (an estimate)"


def _figures(request: PlanRequest, exit_layer: int | None, kept: float | None, rates: Rates) -> ExitFigures:
    fixed = request.resident_layers
    if exit_layer is not None and fixed is not None and fixed < exit_layer:
        return ExitFigures(exit_layer=exit_layer, kept=kept, note=f"only {fixed} resident layers")
    plan = best_plan(request, exit_layer)
    if plan is None:
        return ExitFigures(exit_layer=exit_layer, kept=kept, note=_too_much(request, exit_layer))
    if exit_layer is not None and kept is None:
        return ExitFigures(exit_layer=exit_layer, note="the head does not say how often it is right")
    costs = RoundCost(plan, request, rates)
    share, longest = (kept or 0.0), (0 if exit_layer is None else min(LONGEST, request.draft_slack))
    taus = [sum(share**n for n in range(length + 1)) for length in range(longest + 1)]
    length = max(range(longest + 1), key=lambda k: taus[k] / costs.seconds(k, taus[k]))  # the shortest of equals
    seconds = costs.seconds(length, taus[length])
    return ExitFigures(
        exit_layer=exit_layer,
        kept=kept,
        resident_layers=plan.resident_layers,
        sweep_bytes=plan.sweep_bytes,
        sweep_seconds=sweep_cost(plan, rates).seconds,
        draft_step_seconds=costs.step if exit_layer is not None else 0.0,
        draft_length=length,
        tau=taus[length],
        round_seconds=seconds,
        tokens_per_second=taus[length] / seconds,
    )


def _too_much(request: PlanRequest, exit_layer: int | None) -> str:
    if request.tiers is not None:
        return "the saved plan has too few layers on the device"
    smallest = replace(request, device_memory=None, resident_layers=exit_layer or 0, ring_slots=2)
    least = best_plan(smallest, exit_layer)
    if request.device_memory is None or least is None or least.total_bytes <= request.device_memory:
        return "does not fit"
    return f"needs {format_size(least.total_bytes - request.device_memory)} more"


class RoundCost:
    """Seconds of a round by drafted tokens, for one plan."""

    def __init__(self, plan: Plan, request: PlanRequest, rates: Rates) -> None:
        self._row = rates.row if rates.row is not None else (CUDA_ROW if request.staging else CPU_ROW)
        rate = rates.device if rates.device is not None else (CUDA_RATE if request.staging else rates.host)
        launch = rates.layer_time * 1e-6
        exit_layer = plan.exit_layer or 0

        def layers(sizes: Sequence[int]) -> float:
            return sum(sizes) / rate + launch * len(sizes)

        placed = list(zip(plan.layer_bytes, plan.tiers, strict=True))
        self._lower = layers(plan.layer_bytes[:exit_layer])
        self._middle = layers([size for size, tier in placed[exit_layer:] if tier == DEVICE])
        moved = [size for size, tier in placed if tier in (HOST_STREAM, DISK)]
        self._moved, self._computed = layers(moved), launch * plan.tiers.count(HOST_COMPUTE)
        table = request.lm_head_bytes or request.embedding_bytes
        self._logits = table / rate
        head = dict(plan.items).get("exit head", 0) / rate + launch
        self._token = rates.token_time * 1e-6
        self.step = self._lower + head + (request.draft_vocabulary_bytes or table) / rate + self._token
        self._sweep = sweep_cost(plan, rates).seconds
        # What the ring holds is fetched while nobody waits for it.
        self._ahead = self._sweep * min(1.0, plan.ring_slots / len(moved)) if moved else 0.0

    def seconds(self, drafted: int, tau: float) -> float:
        """A round that drafts so many tokens, verifies one row more and emits `tau` of them; the last one drafted
        passes the lower layers too."""
        rows = 1.0 + self._row * drafted
        before = self._lower + drafted * self.step + self._middle * rows
        after = self._logits + tau * self._token
        waited = self._sweep - min(self._ahead, before + after)
        return before + max(waited, (self._moved + self._computed) * rows) + after
