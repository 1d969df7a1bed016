"""A plan as text: which layer is where, every allocation by tier, and what is really allocated beside it.

Plain lines without colour, so that they can be piped, diffed and tested. Used by `eesd plan` and `eesd-chat --plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eesd_lite.exit_choice import ExitTable
from eesd_lite.plan_cost import Rates
from eesd_lite.tiers import DEVICE, DISK, HOST_COMPUTE, HOST_STREAM, Items, Plan
from eesd_lite.units import format_size

LETTERS = {DEVICE: "D", HOST_STREAM: "s", HOST_COMPUTE: "c", DISK: "."}
_MEANING = {
    DEVICE: "on the device",
    HOST_STREAM: "in host memory, streamed",
    HOST_COMPUTE: "in host memory, computed there",
    DISK: "on disk",
}
_ROW = 40  # layers in one line of the map
PASSING = {"scratch": "while it computes", "reserve": "left to others"}  # planned, but no lasting allocation


def plan_lines(plan: Plan, allocated: Mapping[str, Mapping[str, int]] | None = None) -> list[str]:
    """The plan for people; with `allocated` ({"device": {item: bytes}, "host": ...}) a second column of bytes."""
    lines = layer_map(plan)
    lines += _tier_lines("device", plan.items, None if allocated is None else allocated.get("device", {}))
    if plan.host_items or (allocated is not None and allocated.get("host")):
        lines += _tier_lines("host", plan.host_items, None if allocated is None else allocated.get("host", {}))
    return lines


def layer_map(plan: Plan) -> list[str]:
    """One letter per layer, with a legend and the bytes of each tier."""
    letters = "".join(LETTERS[tier] for tier in plan.tiers)
    rows = [letters[start : start + _ROW] for start in range(0, len(letters), _ROW)]
    lines = [f"layers {start * _ROW:>3}  {row}" for start, row in enumerate(rows)]
    for tier, letter in LETTERS.items():
        count = plan.tiers.count(tier)
        if count:
            size = f", {format_size(plan.tier_bytes(tier))}" if plan.layer_bytes else ""
            lines.append(f"        {letter}  {count} {_MEANING[tier]}{size}")
    return lines


def _tier_lines(name: str, items: Items, allocated: Mapping[str, int] | None) -> list[str]:
    planned = dict(items)
    rows: list[tuple[str, ...]] = []
    for item in [*planned, *(found for found in allocated or {} if found not in planned)]:
        size = planned.get(item, 0)
        row: tuple[str, ...] = (item, format_size(size), str(size))
        if allocated is not None:
            row += (PASSING[item] if item in PASSING else str(allocated.get(item, 0)),)
        rows.append(row)
    lasting = sum(size for item, size in items if item not in PASSING)
    if allocated is None:
        total = sum(planned.values())
        rows.append(("together", format_size(total), str(total)))
    else:
        found = sum(allocated.values())
        share = f" ({found / lasting - 1:+.2%})" if lasting else ""
        rows.append(("together, lasting", format_size(lasting), str(lasting), f"{found}{share}"))
    header = ["", "planned", "bytes"] + (["allocated"] if allocated is not None else [])
    return [f"{name}:", *columns([header, *rows])]


_EXIT_HEADINGS = ("exit", "kept", "resident", "a sweep", "draft step", "drafts", "tau", "tokens/s", "of plain")


def exit_lines(table: ExitTable) -> list[str]:
    """What every exit layer promises, the chosen one marked; for people."""
    rows: list[tuple[str, ...]] = [("", *_EXIT_HEADINGS)]
    plain = table.plain.tokens_per_second
    for row in table.rows:
        name = "plain" if row.exit_layer is None else str(row.exit_layer)
        kept = "-" if row.kept is None else f"{row.kept:.3f}"
        mark = "*" if row.exit_layer == table.chosen else ""
        if row.note:
            rows.append((mark, name, kept, *("-",) * 7))
            continue
        drafts = ("-", "-") if row.exit_layer is None else (_time(row.draft_step_seconds), str(row.draft_length))
        gain = f"{row.tokens_per_second / plain:.2f}" if plain else "-"
        speeds = (f"{row.tau:.2f}", f"{row.tokens_per_second:.2f}", gain)
        rows.append((mark, name, kept, str(row.resident_layers), _time(row.sweep_seconds), *drafts, *speeds))
    notes = [f"  exit {row.exit_layer}: {row.note}" for row in table.rows if row.note and row.exit_layer is not None]
    return ["exits, expected (an estimate; * is chosen):", *columns(rows), *notes, _rates(table.rates)]


def _rates(rates: Rates) -> str:
    """In the words of `eesd plan`, which repeats the table with them."""
    words = f"  by --disk-rate {rates.disk} --layer-time {rates.layer_time} --token-time {rates.token_time}"
    if rates.link is not None:
        words += f" --link-rate {rates.link} --host-rate {rates.host}"
    if rates.device is not None:
        words += f" --device-rate {rates.device}"
    return words if rates.row is None else f"{words} --row {rates.row:g}"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  " + "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip
