"""The offload report in Markdown: one table a point, with the command and the machine, from the JSON object alone."""

from __future__ import annotations

from typing import Any

from eesd_lite.units import format_size


def markdown(report: dict[str, Any], command: str) -> str:
    """The whole page."""
    machine = report["machine"]
    lines = [
        f"# Offload benchmark: {report['model']['name']}",
        "",
        f"`{command}`",
        "",
        ", ".join(f"{key}: {value}" for key, value in machine.items() if not isinstance(value, (dict, list))),
        "",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "",
        "Every contender is a process of its own under a real memory limit (" + _methods(report) + "): "
        + ("the size given, runtime included." if report["settings"]["whole_process"] else
           "what its runtime holds before it loads the model, and the size given on top."),
    ]  # fmt: skip
    for point in report["points"]:
        lines += ["", *_point(point)]
    return "\n".join(lines) + "\n"


def _methods(report: dict[str, Any]) -> str:
    found = {figures["limit_method"] for point in report["points"] for figures in point["contenders"].values()}
    return ", ".join(sorted(str(method) for method in found if method is not None)) or "none"


def _point(point: dict[str, Any]) -> list[str]:
    rate = point["link_bytes_per_second"]
    link = "the disk's own rate" if rate is None else f"a link of {format_size(int(rate))}/s (simulated)"
    lines = [f"## {format_size(point['memory_bytes'])}, {link}", ""]
    if point["disk"]:
        disk = point["disk"]
        raw = disk["raw_bytes_per_second"]
        spread = f"{_gigabytes(raw['mean'])} ({_gigabytes(raw['min'])} - {_gigabytes(raw['max'])})"
        share = f"plain decoding streams {disk['plain_share_of_link']:.0%} of what the link allows."
        lines += [f"Raw {disk['method']} rate {spread}; {share}", ""]
    lines += [
        "| | tokens/s, median (min - max) | over plain | tau | resident | read a token "
        "| draft / wait / compute, ms | overlap | identical | peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, figures) for name, figures in point["contenders"].items()]
    lines += ["", *(f"* {name}: {why}" for name, why in point["skipped"].items())] if point["skipped"] else []
    return lines


def _row(name: str, figures: dict[str, Any]) -> str:
    if "failed" in figures:
        return f"| {name} | failed: {figures['failed']} | | | | | | | | |"
    speed = figures["tokens_per_second"]
    cells = [
        name,
        f"{speed['median']:.2f} ({speed['min']:.2f} - {speed['max']:.2f})",
        _number(figures["over_plain"]),
        _number(figures.get("tau")),
        str(figures.get("resident_layers", "")),
        _read(figures),
        _seconds(figures.get("seconds_per_round")),
        f"{figures['overlap']:.0%}" if figures.get("overlap") is not None else "",
        {True: "yes", False: "NO", None: ""}[figures.get("identical")],
        format_size(figures["peak_bytes"]) if figures["peak_bytes"] else "",
    ]
    return f"| {' | '.join(cells)} |"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _read(figures: dict[str, Any]) -> str:
    if "offloaded_bytes" in figures:
        return format_size(figures["offloaded_bytes"] // max(figures["tokens"], 1))
    per_pass = figures.get("disk_bytes_per_pass")
    return "" if per_pass is None else format_size(per_pass)


def _seconds(parts: dict[str, float] | None) -> str:
    return "" if parts is None else " / ".join(f"{parts[name] * 1e3:.1f}" for name in ("draft", "wait", "compute"))
