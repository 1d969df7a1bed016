"""Pictures of an offload report, drawn with matplotlib where it is installed (`pip install eesd-lite[plots]`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from eesd_lite.bench.settings import PLAIN
from eesd_lite.units import format_size


def available() -> bool:
    """Whether there is anything to draw with."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """PNG files into `folder`: speed-up over link rate, controllers beside each other, rounds, draft lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for name, picture in (
        ("speedup", _speedup), ("controllers", _controllers), ("rounds", _rounds), ("lengths", _lengths),
    ):  # fmt: skip
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        if picture(report, axes):
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=110)
            drawn.append(path)
        pyplot.close(figure)
    return drawn


def _drafting(point: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: figures
        for name, figures in point["contenders"].items()
        if figures.get("tau") is not None and name != PLAIN
    }


def _rate(point: dict[str, Any]) -> float:
    own = point["disk"].get("raw_bytes_per_second", {}).get("mean", 0)
    return float(point["link_bytes_per_second"] or own) / 1e6


def _speedup(report: dict[str, Any], axes: Any) -> bool:
    """Speed-up over plain by link rate; dotted: tau, what an infinitely slow link would give."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for point in report["points"]:
        for name, figures in _drafting(point).items():
            if "fixed" not in name and point["disk"]:
                label = f"{format_size(point['memory_bytes'])}, {name}"
                lines.setdefault(label, []).append((_rate(point), figures["over_plain"], figures["tau"]))
    for label, values in lines.items():
        rates, ratios, taus = zip(*sorted(values), strict=True)
        (line,) = axes.plot(rates, ratios, marker="o", label=label)
        axes.plot(rates, taus, linestyle=":", color=line.get_color())
    axes.set(xlabel="link, MB/s", ylabel="tokens/s over plain (dotted: tau)", xscale="log")
    axes.axhline(1, color="grey", linewidth=0.5)
    if lines:
        axes.legend(fontsize="small")
    return bool(lines)


def _controllers(report: dict[str, Any], axes: Any) -> bool:
    """All ways to draft at the slowest link."""
    point = min(report["points"], key=_rate)
    found = _drafting(point)
    axes.barh(list(found), [figures["over_plain"] for figures in found.values()])
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.set(xlabel=f"tokens/s over plain, {_rate(point):.0f} MB/s, {format_size(point['memory_bytes'])}")
    return bool(found)


def _rounds(report: dict[str, Any], axes: Any) -> bool:
    """Where the seconds of a round go."""
    labels, parts = [], {"draft": [], "wait": [], "compute": []}  # type: ignore[var-annotated]
    for point in report["points"]:
        for name, figures in {PLAIN: point["contenders"][PLAIN], **_drafting(point)}.items():
            if "fixed" not in name and "seconds_per_round" in figures:
                labels.append(f"{name}, {_rate(point):.0f} MB/s, {format_size(point['memory_bytes'])}")
                for part, values in parts.items():
                    values.append(figures["seconds_per_round"][part] * 1e3)
    left = [0.0] * len(labels)
    for part, values in parts.items():
        axes.barh(labels, values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set(xlabel="ms a round")
    axes.tick_params(axis="y", labelsize="x-small")
    axes.legend(fontsize="small")
    return bool(labels)


def _lengths(report: dict[str, Any], axes: Any) -> bool:
    """How long drafts were, by link rate, for the controllers that decide."""
    drawn = False
    for point in report["points"]:
        for name, figures in _drafting(point).items():
            if "fixed" not in name and (counts := figures["draft_length_histogram"]):
                axes.plot(range(len(counts)), counts, marker=".", label=f"{name}, {_rate(point):.0f} MB/s")
                drawn = True
    axes.set(xlabel="drafted tokens of a round", ylabel="rounds")
    if drawn:
        axes.legend(fontsize="x-small")
    return drawn
