"""`eesd replay`: controllers on a recorded trace under injected costs; a table on stderr, one JSON object on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.bench import Names
from cli.common import Number, Rate, reports_errors
from cli.render import ProgressDisplay
from eesd_lite.progress import Progress, no_progress
from eesd_lite.units import format_size

if TYPE_CHECKING:
    from eesd_lite.replay.tree_trace import TreeTrace


@click.command("replay", short_help="Compare controllers on a recorded trace, under injected costs.")
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--costs",
    "curves",
    type=Names(),
    metavar="CURVES",
    help="memory, sweep:S, hidden:S:H, jump:S:K, cpu:S, with trees gpu:S; S is the sweep in draft steps.  "
    "[default: a dozen of them]",
)
@click.option("--controllers", type=Names(), help="[default: hf,beta,calibrated; with trees tree,calibrated]")
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
@click.option("--noise", type=Number(0, 1), default=0.03, show_default=True, help="Of the seconds they see.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of what draws lots.")
@click.option("--scale", metavar="SHAPE@PRESET", help="A trace of trees under the costs of llama-2-70b@24gb, say.")
@click.option("--link-rate", type=Rate(), help="With --scale: host to device, a second.  [default: 25GB]")
@click.option("--device-rate", type=Rate(), help="With --scale: the card's memory, a second.  [default: by preset]")
@click.option("--device-tflops", type=Number(0, min_open=True), help="With --scale.  [default: by preset]")
@click.option("--layer-time", type=Number(min=0), metavar="MICROSECONDS",
              help="With --scale: launching one layer's kernels.  [default: 100]")  # fmt: skip
@click.option("--json", "json_only", is_flag=True, help="Nothing but the JSON object: no progress, no table.")
@reports_errors
def replay(trace: Path, json_only: bool, drafter: str, scale: str | None, **options: Any) -> None:
    """Play TRACE (from `eesd trace`) under cost curves: every fixed length, the controllers, and an oracle.

    A trace of trees is played with trees of fixed sizes as well; with --scale under the costs of a large model on a
    card, all simulated. No clock is read: the same command prints the same figures everywhere.
    """
    from eesd_lite.replay.trace import Trace
    from eesd_lite.replay.tree_trace import TreeTrace, has_trees

    card = {name: options.pop(name) for name in ("link_rate", "device_rate", "device_tflops", "layer_time")}
    if scale is None and any(value is not None for value in card.values()):
        raise click.UsageError("--link-rate, --device-rate, --device-tflops and --layer-time go with --scale")
    if scale is not None and options["curves"]:
        raise click.UsageError("--scale brings its own costs; leave out --costs")
    options = {name: value for name, value in options.items() if value is not None}
    run: Callable[[Progress], dict[str, Any]]
    recorded = Trace.load(trace)
    if has_trees(recorded) and drafter == "head":
        run, show = _with_trees(TreeTrace.load(trace), options, scale, card)
    elif scale is not None:
        raise click.UsageError("--scale needs a trace of trees (eesd trace --trees) and --drafter head")
    else:
        from eesd_lite.replay.compare import ReplaySettings, compare

        settings = ReplaySettings(**options, drafter=drafter)
        run, show = (lambda progress: compare(recorded, settings, progress)), render
    if json_only:
        report = run(no_progress)
    else:
        display = ProgressDisplay()
        with display.showing(f"replaying {trace.name}"):
            report = run(display)
        click.echo(show(report), err=True)
    click.echo(json.dumps(report, allow_nan=False))


def _with_trees(
    recorded: TreeTrace, options: dict[str, Any], scale: str | None, card: dict[str, Any]
) -> tuple[Callable[[Progress], dict[str, Any]], Callable[[dict[str, Any]], str]]:
    """What runs, and what shows the report."""
    from eesd_lite.replay.compare_trees import TreeReplaySettings, compare_trees

    settings = TreeReplaySettings(**options)
    if scale is None:
        return (lambda progress: compare_trees(recorded, settings, progress)), render_trees
    from eesd_lite.replay.true_scale import make_card, simulate

    assumed = make_card(scale, **card)
    return (lambda progress: simulate(recorded, scale, assumed, settings)), render_scale


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
    lines = _columns(rows)
    source = "look-ups in the text" if about.get("drafter") == "ngram" else f"exit {about['exit_layer']}"
    head = (
        f"{about['model']}, {source}, temperature {about['params']['temperature']:g}, "
        f"{about['answers']} answers, {about['positions']} positions; shares of the best fixed length at each point"
    )
    last = f"the best single fixed length over all: {single}, {overall[single]['of_best_fixed']:.3f}" if single else ""
    return "\n".join([head, *lines, last])


def render_trees(report: dict[str, Any]) -> str:
    """One row per cost curve: the best chain and tree of fixed size, then every controller's share of the better."""
    about, fixed = report["trace"], ("fixed:", "tree:")
    names = [n for n in report["overall"] if not n.startswith(fixed) and n != "off"]
    rows = [["costs", "best chain", "best tree", "tokens/s", *names, *(f"{n}/oracle" for n in names), "nodes"]]
    for point in report["points"]:
        figures = point["controllers"]
        best = max((point["best_chain"], point["best_tree"]), key=lambda spec: figures[spec]["tokens_per_second"])
        rows.append(
            [
                point["curve"],
                point["best_chain"],
                point["best_tree"],
                f"{figures[best]['tokens_per_second']:.1f}",
                *(f"{figures[name]['of_best_fixed']:.3f}" for name in names),
                *(f"{figures[name]['of_oracle']:.3f}" for name in names),
                " ".join(f"{figures[name]['drafted_per_round']:.1f}" for name in names),
            ]
        )
    overall = report["overall"]
    means = [f"{overall[n][key]:.3f}" for key in ("of_best_fixed", "of_oracle") for n in names]
    worst = [f"{overall[n]['worst_of_best_fixed']:.3f}" for n in names]
    rows += [["all (geometric)", "", "", "", *means], ["worst", "", "", "", *worst]]
    rows = [row + [""] * (len(rows[0]) - len(row)) for row in rows]
    return "\n".join([f"{_origin(about)}; shares of the better of best chain and best tree", *_columns(rows)])


def render_scale(report: dict[str, Any]) -> str:
    """Tokens per second of every controller at true scale, what was assumed, and public figures."""
    assumed, point = report["assumptions"], report["point"]
    fixed = ("off", point["best_chain"], point["best_tree"])
    names = [*fixed, *(n for n in point["controllers"] if n != "off" and not n.startswith(("fixed:", "tree:")))]
    rows = [["simulated", "tokens/s", "tau", "nodes"]]
    for name in dict.fromkeys(names):
        figures = point["controllers"][name]
        rows.append(
            [name, *(f"{figures[key]:.2f}" for key in ("tokens_per_second", "tau", "drafted_per_round"))]
        )  # fmt: skip
    drafts, verifies = (" / ".join(f"{s * 1000:.1f}" for s in assumed[key]) for key in _TIMES)
    return "\n".join(
        [
            f"SIMULATED, {report['scale']}: costs from its plan, luck from {_origin(report['trace'])}",
            *_columns(rows),
            f"drafts at exit {assumed['exit_layer']} of {assumed['layers']}, {assumed['resident_layers']} layers "
            f"resident, context {assumed['context']}",
            f"link {format_size(assumed['link_rate'])}/s: a sweep of {format_size(assumed['offloaded_bytes'])} takes "
            f"{assumed['sweep_seconds']:.3f} s; nothing is fetched while drafting",
            f"card: memory {format_size(int(assumed['device_memory_rate']))}/s, "
            f"{assumed['device_operations'] / 1e12:g} TFLOP/s, "
            f"{assumed['layer_seconds'] * 1e6:g} microseconds to launch a layer",
            f"milliseconds at 1 / 16 / 64 rows: a draft step {drafts}, a verify {verifies}",
            *(f"public, not run here: {figure}" for figure in report["public_figures"]),
        ]
    )


_TIMES = ("draft_step_seconds", "verify_seconds")


def _origin(about: dict[str, Any]) -> str:
    return (
        f"{about['model']}, exit {about['exit_layer']} of {about['layers']}, "
        f"temperature {about['params']['temperature']:g}, {about['answers']} answers"
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
