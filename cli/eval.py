"""`eesd eval`: perplexity of a model, and with --reference its divergence from another, on the same text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from cli.common import Size, quantize_option, reports_errors, weights_option
from cli.render import ProgressDisplay

PATH = click.Path(path_type=Path, dir_okay=False)


@click.command("eval", short_help="Perplexity of a model, and its KL divergence from a reference.")
@click.argument("model")
@click.option(
    "--reference",
    metavar="MODEL",
    help="Compare with this model, such as the 16-bit original. Both are whole in memory, but for --device-memory.",
)
@click.option("--text", type=PATH, help="A text file.  [default: the 40 prompts of eesd bench]")
@click.option("--ids", type=PATH, help="Token ids instead of text: JSONL, a list of ids a line.")
@click.option(
    "--window", type=click.IntRange(min=4), default=512, show_default=True, help="Tokens that see each other."
)
@click.option("--limit-windows", type=click.IntRange(min=1), help="Only the first so many windows or lines of ids.")
@click.option("--engine", is_flag=True, help="Run MODEL with this project's engine instead of transformers.")
@click.option(
    "--device-memory",
    type=Size(),
    metavar="SIZE",
    help="With --engine: run MODEL and the reference by the engine, each within so much memory.",
)
@quantize_option
@weights_option
@click.option("--reference-dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="[default: float32, bfloat16 with --engine]")
@click.option("--threads", type=click.IntRange(min=1), help="[default: as many as torch takes]")
@click.option("--json", "json_only", is_flag=True, help="One JSON object on stdout, nothing on stderr.")
@reports_errors
def evaluate(model: str, json_only: bool, **options: Any) -> None:
    """Perplexity of MODEL on a text; with --reference also KLD(reference || model) and how often both agree.

    Prints the figures on stderr; the last line on stdout is one JSON object.
    """
    from eesd_lite.evaluate_folders import EvalSettings, evaluate_folders
    from eesd_lite.progress import no_progress

    settings = EvalSettings(model=model, **options)
    if json_only:
        report = evaluate_folders(settings, no_progress)
    else:
        display = ProgressDisplay()
        with display.showing(f"loading {model}"):
            report = evaluate_folders(settings, display)
        click.echo("\n".join(_lines(report)), err=True)
    # JSON has no infinity, which a divergence may be: it becomes a text that float() reads.
    finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in report.items()}
    click.echo(json.dumps(finite, allow_nan=False))


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['tokens']} tokens in {report['sequences']} windows", f"perplexity {report['perplexity']:.4f}"]
    if report["kld"] is not None:
        lines += [
            f"reference perplexity {report['reference_perplexity']:.4f}",
            f"KLD(reference || model) mean {report['kld']:.6f}, median {report['kld_median']:.6f}, "
            f"99 % {report['kld_99']:.6f}, largest {report['kld_max']:.4f} nats",
            f"same most likely token at {report['agreement']:.2%} of positions",
        ]
    return lines
