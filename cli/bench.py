"""`eesd bench`: what drafting gains on this machine, as a table on stderr and one JSON object as the last stdout line.

Exit code 1 also when a controller's text was not exactly plain decoding's, since that must never happen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from cli.common import (
    ExitLayer,
    Size,
    draft_vocab_option,
    drafter_option,
    head_bits_option,
    quantize_option,
    reports_errors,
    weights_option,
)
from cli.render import ProgressDisplay


class ThrottleType(click.ParamType):
    """A rate, or sweep=STEPS."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from eesd_lite.bench.settings import Throttle
        from eesd_lite.errors import EesdError

        if not isinstance(value, str):
            return value
        try:
            return Throttle.parse(value)
        except EesdError as error:
            self.fail(str(error), param, ctx)


class Names(click.ParamType):
    """Several names, separated by commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if not isinstance(value, str):
            return tuple(value)
        return tuple(part.strip() for part in value.split(",") if part.strip())


def _somebody(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise click.UsageError("--controllers names nobody; 'off' measures plain decoding alone")
    return value


PATH = click.Path(path_type=Path, dir_okay=False)
POSITIVE = click.IntRange(min=1)

_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "ignore_eos")


@click.command("bench", short_help="Measure plain decoding against drafting, on this machine.")
@click.argument("model")
@click.option("--device-memory", type=Size(), help="Same memory for all: each contender plans for itself.")
@click.option("--resident-layers", type=click.IntRange(min=0), help="Same split for all: so many layers in memory.")
@click.option(
    "--exit-layer",
    type=ExitLayer(),
    help="Draft at this layer, or at 10,20 by turns; auto: measure all.  [default: the model's]",
)
@click.option("--head", help='Exit head: a file, a folder, "instant" or "random".  [default: the model\'s own]')
@weights_option
@quantize_option
@drafter_option
@draft_vocab_option
@head_bits_option
@click.option(
    "--controllers",
    type=Names(),
    default="off,fixed:4,calibrated",
    show_default=True,
    callback=_somebody,
    help="Who takes part; off is plain.",
)
@click.option("--keep-controllers", is_flag=True, help="Let controllers learn from one prompt to the next.")
@click.option(
    "--throttle",
    type=ThrottleType(),
    metavar="RATE",
    help="Simulate a slower link: 800MB/s, or sweep=40 (draft steps).",
)
@click.option("--baseline", "baselines", type=Names(), default="", help="Peers to run too: accelerate,llama.cpp.")
@click.option("--baseline-prompts", type=POSITIVE, default=8, show_default=True, help="Peers answer the first so many.")
@click.option("--gguf", type=PATH, help="The model for llama.cpp.  [default: the recipe's]")
@click.option("--prompts", type=PATH, help="JSONL with a key prompt, or one prompt a line.  [default: 40 shipped ones]")
@click.option("--limit-prompts", type=POSITIVE, help="Only the first so many.")
@click.option("--raw-prompts", is_flag=True, help="Prompts as they are, without the chat template.")
@click.option("--max-new-tokens", type=POSITIVE, default=128, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on behind the end of an answer, to --max-new-tokens exactly.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--repeat", type=POSITIVE, default=3, show_default=True)
@click.option("--warmup-tokens", type=click.IntRange(min=0), default=32, show_default=True)
@click.option("--context", type=POSITIVE, help="Tokens to plan for.  [default: what the longest prompt needs]")
@click.option("--threads", type=POSITIVE, help="[default: as many as torch takes]")
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option(
    "--memory/--no-memory", "own_process_memory", default=True, help="Measure peak memory in extra processes."
)
@click.option("--json", "json_only", is_flag=True, help="Nothing but the JSON object: no progress, no table.")
@reports_errors
def bench(model: str, json_only: bool, **options: Any) -> None:
    """Run the same prompts through plain decoding and through each controller, taking turns, in one run.

    Prints a table on stderr; the last line on stdout is one JSON object with everything that was measured.
    """
    from eesd_lite.bench.settings import BenchSettings
    from eesd_lite.params import SamplingParams

    sampling = {name: options.pop(name) for name in _SAMPLING}
    settings = BenchSettings(model=model, params=SamplingParams(**sampling), **options)
    report = _run(settings, quiet=json_only)
    from eesd_lite.bench.table import render

    if not json_only:
        click.echo(render(report), err=True)
    click.echo(json.dumps(report, ensure_ascii=True, allow_nan=False))
    different = [name for name, figures in report["controllers"].items() if not figures["identical"]]
    for name in different:
        where = report["controllers"][name]["first_difference"]
        click.echo(
            f"eesd bench: error: {name} differs from plain decoding at prompt {where['prompt'] + 1}, "
            f"token {where['token'] + 1}; this is a bug, please report it with the JSON above",
            err=True,
        )
    for row in report.get("exits", {}).get("rows", []):
        for name in [name for name, figures in row["controllers"].items() if not figures["identical"]]:
            different.append(name)
            words = f"{name} at exit {row['exit_layer']} differs from plain decoding; this is a bug, please report it"
            click.echo(f"eesd bench: error: {words} with the JSON above", err=True)
    if different:
        sys.exit(1)


def _run(settings: Any, *, quiet: bool) -> dict[str, Any]:
    from eesd_lite.bench.run import run_bench
    from eesd_lite.progress import no_progress

    if quiet:
        return run_bench(settings, no_progress)
    display = ProgressDisplay()
    with display.showing(f"preparing {settings.model}"):
        return run_bench(settings, display)
