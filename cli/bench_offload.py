"""`eesd bench offload`: a model under real memory limits, over link rates and controllers, beside other programs.

Progress on stderr; the last line on stdout is one JSON object. With --out a folder gets report.md, report.json and
pictures.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from cli.bench import PATH, POSITIVE, Names
from cli.common import draft_vocab_option, head_bits_option, reports_errors
from cli.render import ProgressDisplay
from eesd_lite.drafter_names import DRAFTERS


@click.command("offload", short_help="Measure under real memory limits, beside other programs.")
@click.argument("model")
@click.option(
    "--memory", "memories", required=True, help="For the model, on top of the runtime: 96MiB, or several, by commas."
)
@click.option("--whole-process", is_flag=True, help="--memory is the limit of the whole process, runtime included.")
@click.option("--exit-layers", type=Names(), default="", help="Draft at these layers: 10,20.  [default: plain only]")
@click.option("--head", help='Exit head: a file, "instant" or "random".  [default: the one that belongs to the model]')
@click.option(
    "--drafter",
    "drafters",
    type=Names(),
    default="head",
    show_default=True,
    help=f"Who drafts: {', '.join(DRAFTERS)}, or several, by commas; ngram needs no exit layer.",
)
@draft_vocab_option
@head_bits_option
@click.option("--controllers", type=Names(), default="calibrated", show_default=True, help="Beside plain decoding.")
@click.option(
    "--link-rates", "rates", type=Names(), default="disk", show_default=True, help="disk,400MB/s,... (simulated)."
)
@click.option("--baseline", "baselines", type=Names(), default="", help="Peers: accelerate,airllm,llama.cpp.")
@click.option("--gguf", type=PATH, help="The model for llama.cpp.  [default: the recipe's]")
@click.option("--prompts", type=PATH, help="JSONL with a key prompt, or one prompt a line.  [default: shipped ones]")
@click.option("--limit-prompts", type=POSITIVE, default=4, show_default=True)
@click.option("--max-new-tokens", type=POSITIVE, default=32, show_default=True)
@click.option(
    "--stop-at-eos",
    "ignore_eos",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Answers end where the model ends them.  [default: they go on to --max-new-tokens]",
)
@click.option(
    "--baseline-tokens", type=POSITIVE, default=8, show_default=True, help="Peers that are slow answer so much."
)
@click.option("--repeat", type=POSITIVE, default=1, show_default=True)
@click.option("--context", type=POSITIVE, default=512, show_default=True)
@click.option(
    "--draft-limit", type=POSITIVE, help="Tokens that a round may draft.  [default: what the controllers need]"
)
@click.option("--threads", type=POSITIVE)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Write report.md, report.json and pictures here."
)
@reports_errors
def bench_offload(
    memories: str, exit_layers: tuple[str, ...], rates: tuple[str, ...], out: Path | None, **options: Any
) -> None:
    """Run plain decoding, drafting and other programs side by side, each under the same real memory limit."""
    from eesd_lite.bench.offload.settings import OffloadSettings, parse_rate
    from eesd_lite.units import parse_size

    settings = OffloadSettings(
        memories=tuple(parse_size(size) for size in memories.split(",")),
        exit_layers=tuple(_layer(text) for text in exit_layers),
        rates=tuple(parse_rate(text) for text in rates),
        **options,
    )
    from eesd_lite.bench.offload.run import run_offload

    display = ProgressDisplay()
    with display.showing(f"preparing {settings.model}"):
        report = run_offload(settings, display)
    if out is not None:
        _write(report, out)
    click.echo(json.dumps(report, ensure_ascii=True, allow_nan=False))
    wrong = [name for p in report["points"] for name, f in p["contenders"].items() if f.get("identical") is False]
    if wrong:
        click.echo(
            f"eesd bench offload: error: {wrong[0]} differs from plain decoding; this is a bug, please report it",
            err=True,
        )
        sys.exit(1)


def _layer(text: str) -> int:
    if not text.isdigit():
        raise click.BadParameter(f"{text!r} is not a layer number", param_hint="--exit-layers")
    return int(text)


def _write(report: dict[str, Any], out: Path) -> None:
    from eesd_lite.bench.offload import plots
    from eesd_lite.bench.offload.report import markdown

    out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["eesd", *sys.argv[1:]])
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "report.md").write_text(markdown(report, command), encoding="utf-8")
    if plots.available():
        plots.draw(report, out)
    else:
        click.echo("eesd bench offload: note: no pictures without matplotlib: pip install 'eesd-lite[plots]'", err=True)
