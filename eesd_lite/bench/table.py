"""The report for people: one row per controller and peer, then a few lines about the disk and the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eesd_lite.units import format_size

_HEADINGS = ("", "tokens/s", "(min - max)", "speed-up", "identical", "tau", "accepted", "rounds", "peak RSS")


def render(report: dict[str, Any]) -> str:
    """Several lines without a trailing newline."""
    rows = [_controller_row(name, figures) for name, figures in report["controllers"].items()]
    rows += [_baseline_row(name, figures) for name, figures in report["baselines"].items() if "skipped" not in figures]
    lines = [_heading(report), *_align([_HEADINGS, *rows])]
    lines += [f"{name}: skipped, {f['skipped']}" for name, f in report["baselines"].items() if "skipped" in f]
    exits = exit_lines(report["exits"]) if report.get("exits") else []
    return "\n".join([*exits, *lines, *_notes(report)])


def exit_lines(exits: dict[str, Any]) -> list[str]:
    """What was measured at every exit before the benchmark: the best controller of each, the chosen exit marked."""
    rows = [("exit", "", "resident", "by", "draft step", "tau", "tokens/s", "of plain")]
    for row in exits["rows"]:
        name = "plain" if row["exit_layer"] is None else f"{row['exit_layer']}"
        mark = "chosen" if row["exit_layer"] == exits["chosen"] else ""
        best = row["controllers"].get(row["best_controller"])
        if best is None:
            rows.append((name, mark, *("-",) * 6))
            continue
        step = row["draft_step_seconds"]
        rows.append(
            (
                name, mark, str(row["resident_layers"]), row["best_controller"],
                f"{step * 1e3:.2f} ms" if step else "-", f"{best['tau']:.2f}", f"{best['tokens_per_second']:.2f}",
                f"{row['of_plain']:.2f}" if row["of_plain"] else "-",
            )
        )  # fmt: skip
    tokens = f"{exits['prompts']} prompts x {exits['max_new_tokens']} tokens x {exits['visits']}"
    lines = [f"exits, measured under this plan's memory ({tokens}); each with its best controller", *_align(rows)]
    lines += [f"exit {row['exit_layer']}: {row['note']}" for row in exits["rows"] if row["note"]]
    return lines + (["plain decoding was faster than every exit"] if exits["plain_is_faster"] else [])


def _heading(report: dict[str, Any]) -> str:
    settings, split = report["settings"], []
    for name, plan in report["plans"].items():
        layers = len(plan["tiers"])
        split.append(f"{name}: {plan['resident_layers']} of {layers} layers resident, exit {_exits(plan)}")
    tokens = f"{settings['prompts']} prompts x {settings['max_new_tokens']} tokens x {settings['repeat']}"
    return f"{report['model']['name']}, {tokens}, temperature {settings['temperature']:g}; {'; '.join(split)}"


def _controller_row(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    speed = figures["tokens_per_second"]
    memory = figures["peak_rss_bytes"]
    return (
        "plain" if name == "off" else name,
        f"{speed['median']:.1f}",
        f"({speed['min']:.1f} - {speed['max']:.1f})",
        f"{figures['speedup']:.2f}",
        "yes" if figures["identical"] else "NO",
        f"{figures['tau']:.2f}",
        f"{figures['acceptance_rate']:.0%}" if figures["drafted"] else "-",
        str(figures["rounds"]),
        format_size(memory) if memory else "-",
    )


def _baseline_row(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    speed = figures["tokens_per_second"]
    slower = figures["plain_speedup_over_it"]
    return (
        name,
        f"{speed['median']:.1f}",
        f"({speed['min']:.1f} - {speed['max']:.1f})",
        f"{1 / slower:.2f}" if slower else "-",
        *("-",) * 4,
        format_size(figures["peak_rss_bytes"]),
    )


def _notes(report: dict[str, Any]) -> list[str]:
    notes = [f"{name}: {note}" for name, plan in report["plans"].items() for note in plan["notes"]]
    if disk := report["disk"]:
        notes.append(
            f"disk {disk['raw_bytes_per_second']['median'] / 1e6:.0f} MB/s raw ({disk['method']}), streamer "
            f"{disk['streamer_bytes_per_second'] / 1e6:.0f} MB/s; plain reaches {disk['plain_share_of_link']:.0%} of "
            f"the {disk['plain_tokens_per_second_that_link_allows']:.1f} tokens/s that the link allows"
        )
    if throttle := report["throttle"]:
        sweep = throttle.get("draft_steps_per_sweep")
        ratio = f", one sweep lasts {sweep:g} draft steps" if sweep else ""
        notes.append(f"simulated link: {throttle['bytes_per_second'] / 1e6:.1f} MB/s for everybody{ratio}")
    for name, figures in report["baselines"].items():
        if figures.get("speedup_owed_to_4bit_bytes"):
            notes.append(
                f"plain is {figures['plain_speedup_over_it']:.1f} times as fast as {name}: "
                f"{figures['speedup_owed_to_4bit_bytes']:.2f} owed to 4-bit bytes, "
                f"{figures['speedup_owed_to_the_rest']:.2f} to the rest"
            )
    return notes


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _exits(plan: Any) -> str:
    if plan["exit_layer"] is None:
        return "none"
    others = plan.get("other_exits") or ()
    return " or ".join(map(str, (*others, plan["exit_layer"])))
