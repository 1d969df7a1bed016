"""`eesd trace`: record what an exit head would draft at every position of plainly decoded answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cli.common import reports_errors
from cli.render import ProgressDisplay

PATH = click.Path(path_type=Path, dir_okay=False)
POSITIVE = click.IntRange(min=1)
_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "ignore_eos")


@click.command("trace", short_help="Record what an exit head would draft at every position.")
@click.argument("model")
@click.option("--out", type=PATH, required=True, help="The trace: one .npz file.")
@click.option("--prompts", type=PATH, help="JSONL with a key prompt, or one prompt a line.  [default: 40 shipped ones]")
@click.option("--limit-prompts", type=POSITIVE, help="Only the first so many.")
@click.option("--exit-layer", type=POSITIVE, help="Draft at this layer.  [default: the model's]")
@click.option("--head", help='Exit head: a file, "instant" or "random".  [default: the one that belongs to the model]')
@click.option("--draft-limit", type=click.IntRange(1, 64), default=16, show_default=True, help="Longest draft.")
@click.option("--trees", is_flag=True, help="Record trees as well, with chains of up to 16 tokens.")
@click.option("--nodes", type=click.IntRange(1, 64), help="Nodes of a tree.  [default: 64]")
@click.option("--max-new-tokens", type=POSITIVE, default=96, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on behind the end of an answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=POSITIVE, help="[default: as many as torch takes]")
@reports_errors
def trace(model: str, out: Path, trees: bool, nodes: int | None, **options: Any) -> None:
    """Decode the prompts plainly and record, for every position, the whole draft of MODEL's exit head.

    `eesd replay` then compares controllers on it. At every position the draft is as long as it may be, so this takes
    some 15 times as long as decoding; with --trees more.
    """
    if trees and click.get_current_context().get_parameter_source("draft_limit") is not ParameterSource.DEFAULT:
        raise click.UsageError("--draft-limit goes without --trees; trees have --nodes")
    if nodes is not None and not trees:
        raise click.UsageError("--nodes goes with --trees")
    from eesd_lite.errors import TraceError
    from eesd_lite.params import SamplingParams

    if not out.absolute().parent.is_dir():  # known before minutes of recording
        raise TraceError(f"{out}: there is no folder {out.absolute().parent}")
    params = SamplingParams(**{name: options.pop(name) for name in _SAMPLING})
    display = ProgressDisplay()
    with display.showing(f"preparing {model}"):
        if trees:
            from eesd_lite.replay.record_trees import record_tree_model

            del options["draft_limit"]
            grown = record_tree_model(model, params=params, nodes=nodes or 64, progress=display, **options)
            grown.save(out)
            done = grown.chains
        else:
            from eesd_lite.replay.record import record_model

            done = record_model(model, params=params, progress=display, **options)
            done.save(out)
    positions = sum(len(answer.positions) for answer in done.answers)
    click.echo(f"{out}: {len(done.answers)} answers, {positions} positions", err=True)
