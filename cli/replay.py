"""`eesd replay`: controllers on a recorded trace under injected costs; a table on stderr, one JSON object on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from cli.bench import Names
from cli.common import reports_errors
from cli.render import ProgressDisplay


@click.command("replay", short_help="Compare controllers on a recorded trace, under injected costs.")
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--costs",
    "curves",
    type=Names(),
    metavar="CURVES",
    help="memory, sweep:S, hidden:S:H, jump:S:K, cpu:S; S is the sweep in draft steps.  [default: twelve of them]",
)
@click.option("--controllers", type=Names(), default="hf,beta,calibrated", show_default=True)
@click.option(
    "--mode",
    type=click.Choice(["conversations", "one", "cold"]),
    default="conversations",
    show_default=True,
    help="Answers are conversations on one plan, turns of one conversation, or each begins without known costs.",
)
@click.option(
    "--drafter",
    type=click.Choice(["head", "ngram"]),
    default="head",
    show_default=True,
    help="The recorded head, or look-ups in the same texts without a head.",
)
@click.option("--noise", type=click.FloatRange(0, 1), default=0.03, show_default=True, help="Of the seconds they see.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of what draws lots.")
@click.option("--json", "json_only", is_flag=True, help="Nothing but the JSON object: no progress, no table.")
@reports_errors
def replay(trace: Path, json_only: bool, curves: tuple[str, ...] | None, **options: Any) -> None:
    """Play TRACE (from `eesd trace`) under cost curves: every fixed length, the controllers, and an oracle.

    No clock is read: the same command prints the same figures everywhere.
    """
    from eesd_lite.replay.compare import ReplaySettings, compare
    from eesd_lite.replay.trace import Trace

    if curves:
        options["curves"] = curves
    settings, recorded = ReplaySettings(**options), Trace.load(trace)
    if json_only:
        report = compare(recorded, settings)
    else:
        display = ProgressDisplay()
        with display.showing(f"replaying {trace.name}"):
            report = compare(recorded, settings, display)
        click.echo(render(report), err=True)
    click.echo(json.dumps(report, allow_nan=False))


def render(report: dict[str, Any]) -> str:
    """One row per cost curve: the best fixed length, then every controller's share of it and of the oracle."""
    about, names = report["trace"], [n for n in report["overall"] if not n.startswith("fixed:") and n != "off"]
    rows = [["costs", "best fixed", "tokens/s", *(f"{name}" for name in names), *(f"{n}/oracle" for n in names)]]
    for point in report["points"]:
        figures = point["controllers"]
        rows.append(
            [
                point["curve"],
                point["best_fixed"],
                f"{figures[point['best_fixed']]['tokens_per_second']:.1f}",
                *(f"{figures[name]['of_best_fixed']:.3f}" for name in names),
                *(f"{figures[name]['of_oracle']:.3f}" for name in names),
            ]
        )
    overall = report["overall"]
    single = max((n for n in overall if n not in names), key=lambda n: overall[n]["of_best_fixed"], default="")
    means = [*(f"{overall[n]['of_best_fixed']:.3f}" for n in names), *(f"{overall[n]['of_oracle']:.3f}" for n in names)]
    rows.append(["all (geometric)", "", "", *means])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    source = "look-ups in the text" if about.get("drafter") == "ngram" else f"exit {about['exit_layer']}"
    head = (
        f"{about['model']}, {source}, temperature {about['params']['temperature']:g}, "
        f"{about['answers']} answers, {about['positions']} positions; shares of the best fixed length at each point"
    )
    last = f"the best single fixed length over all: {single}, {overall[single]['of_best_fixed']:.3f}" if single else ""
    return "\n".join([head, *lines, last])
