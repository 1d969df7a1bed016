"""`eesd train`: exit heads for a model, taught by the model itself.

Prints an estimate of time, memory and disk before the work starts. The same command continues after a kill. To spread
it over processes, by gloo on CPUs: `accelerate launch --multi_gpu --num_processes 2 -m cli.main train MODEL ...`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common import Number, quantize_option, reports_errors, weights_option
from cli.render import ProgressDisplay
from eesd_lite.progress import Progress, no_progress
from eesd_lite.units import format_size

if TYPE_CHECKING:
    from eesd_lite.distill.run import HeadReport

TOKENS, INSTANT_TOKENS, EPOCHS = 1_000_000, 50_000, 4.0
CONTINUED_RATE = 0.3  # a finished head goes on with smaller steps than a closed form


class Layers(click.ParamType):
    """Exit layers, separated by commas."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        try:
            layers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of layers such as 6,10,15", param, ctx)
        if min(layers) < 1 or len(set(layers)) < len(layers):
            self.fail(f"{value!r}: exit layers start at 1, and each is named once", param, ctx)
        return layers


@click.command("train")
@click.argument("model")
@click.option("--exit-layers", type=Layers(), required=True, metavar="N,N,...", help="A head for each of these.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Heads, states, report.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="JSON lines with text, messages or conversations, instead of self-written text.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1000),
    metavar="N",
    help=f"Training text.  [default: {TOKENS:,}; with --instant {INSTANT_TOKENS:,}]",
)
@click.option(
    "--epochs",
    type=Number(min=0, min_open=True),
    metavar="N",
    help=f"Passes over the text.  [default: {EPOCHS:g}]",
)
@click.option(
    "--minutes",
    type=Number(min=0, min_open=True),
    metavar="N",
    help="Time for each head, instead of --epochs.",
)
@click.option(
    "--start",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Go on from the heads in DIR, at a third of the learning rate.",
)
@weights_option
@quantize_option
@click.option("--instant", is_flag=True, help="Stop after the closed form: usable heads in about a minute.")
@click.option("--estimate", "only_estimate", is_flag=True, help="Only say what it would take.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@reports_errors
def train(model: str, *, out: Path | None, only_estimate: bool, **options: Any) -> None:
    """Train exit heads for MODEL. A run that was cut short is continued by the same command.

    The reported agreement and overlap are measured on text that was held out; `eesd bench` measures real decoding.
    """
    if out is None and not only_estimate:
        raise click.UsageError("--out DIR says where the heads go (or ask for --estimate only)")
    if options["epochs"] is not None and options["minutes"] is not None:
        raise click.UsageError("--epochs and --minutes exclude each other")
    if options["start"] is not None and options["instant"]:
        raise click.UsageError("--start and --instant exclude each other")
    if options["tokens"] is None:
        options["tokens"] = INSTANT_TOKENS if options["instant"] else TOKENS
    if os.environ.get("RANK", "0") != "0":  # accelerate launch: only the first process talks
        _train(model, Path(str(out)), options, no_progress)
        return
    display = ProgressDisplay()
    with display.showing(f"looking for {model}"):
        line = _estimate_line(model, options, display)
    click.echo(line, err=True)
    if only_estimate:
        return
    with display.showing("loading the trainer"):
        reports = _train(model, Path(str(out)), options, display)
    begun = "closed form" if options["start"] is None else "at the start"
    for report in reports:
        click.echo(
            f"{report.path}  agreement {report.quality.agreement:.3f} ({begun} {report.start.agreement:.3f})  "
            f"overlap {report.quality.overlap:.3f}  tau {report.tau:.2f}  {report.minutes:.1f} min"
        )
    chosen = "" if options["weights"] is None else f" --weights {options['weights']}"
    click.echo(f"use one with: eesd-chat {model}{chosen} --head {reports[0].path}", err=True)


def _estimate_line(model: str, options: dict[str, Any], progress: Progress) -> str:
    from eesd_lite.config import ModelConfig
    from eesd_lite.distill.estimate import estimate
    from eesd_lite.distill.run import check_exit_layers
    from eesd_lite.prepare import resolve_model

    config = ModelConfig.from_folder(resolve_model(model, progress).folder)
    exit_layers, minutes = options["exit_layers"], options["minutes"]
    check_exit_layers(exit_layers, config)
    untrained = options["instant"] or minutes is not None
    expected = estimate(
        config,
        exits=len(exit_layers),
        tokens=options["tokens"],
        seen_tokens=0 if untrained else int(options["tokens"] * (options["epochs"] or EPOCHS)),
        own_text=options["data"] is None,
    )
    seconds = expected.training_seconds if options["instant"] or minutes is None else 60 * minutes * len(exit_layers)
    return (
        f"estimate: text {_duration(expected.text_seconds)}, heads {_duration(seconds)}, "
        f"memory {format_size(expected.memory_bytes)} and the model's own layers, "
        f"disk {format_size(expected.disk_bytes)} (one head {format_size(expected.head_bytes)})"
    )


def _train(model: str, out: Path, options: dict[str, Any], progress: Progress) -> list[HeadReport]:
    from eesd_lite.distill.run import TrainRequest, train_heads
    from eesd_lite.distill.train import TrainSettings

    settings = TrainSettings(epochs=options["epochs"] or EPOCHS, minutes=options["minutes"], seed=options["seed"])
    if options["start"] is not None:
        settings = replace(settings, learning_rate=settings.learning_rate * CONTINUED_RATE)
    names = ("exit_layers", "tokens", "data", "instant", "start", "seed", "quantize", "weights")
    request = TrainRequest(model=model, out=out, settings=settings, **{name: options[name] for name in names})
    return train_heads(request, progress)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
