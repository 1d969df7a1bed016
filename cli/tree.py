"""`eesd tree`: one round of drafting and verifying as a picture in the terminal, or as an SVG file."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common import ExitLayer, Size, draft_vocab_option, head_bits_option, reports_errors
from cli.render import ProgressDisplay, obeys_escapes

if TYPE_CHECKING:
    from rich.console import Group

    from eesd_lite.tree_view import RoundView

POSITIVE = click.IntRange(min=1)
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")
_WIDTH = 100  # columns of an SVG
_FONTS = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)  # rich's are fetched from afar; the viewer's own will do


@click.command("tree", short_help="Draw one round: the token tree, what was accepted, where the seconds went.")
@click.argument("model")
@click.option("-p", "--prompt", required=True, help="The question.")
@click.option("--round", "number", type=POSITIVE, default=3, show_default=True, help="Which round of the answer.")
@click.option("--controller", default="tree:24", show_default=True, help="tree, tree:NODES, or one of chains.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write the picture into this file.")
@click.option("--exit-layer", type=ExitLayer(), help="Draft at this layer, or auto.  [default: the model's]")
@click.option("--head", help='Exit head: a file, "instant" or "random".  [default: the one that belongs to the model]')
@draft_vocab_option
@head_bits_option
@click.option("--resident-layers", type=click.IntRange(min=0), help="Keep so many layers in memory.")
@click.option("--device-memory", type=Size(), help="All memory that the engine may use.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=POSITIVE, help="[default: as many as torch takes]")
@reports_errors
def tree(model: str, prompt: str, number: int, svg: Path | None, **options: Any) -> None:
    """Answer the question with MODEL as far as one round, and draw that round.

    Every node shows its token and the probability that its path is kept, as the round believed it. The accepted path is
    marked, and after it the token that the target itself added.
    """
    if options["device_memory"] is not None and options["resident_layers"] is not None:
        raise click.UsageError("--device-memory and --resident-layers exclude each other")
    from eesd_lite.errors import EesdError
    from eesd_lite.params import SamplingParams

    if svg is not None and not svg.absolute().parent.is_dir():  # known before the model is loaded
        raise EesdError(f"{svg}: there is no folder {svg.absolute().parent}")
    params = SamplingParams(max_new_tokens=4096, **{name: options.pop(name) for name in _SAMPLING})
    display = ProgressDisplay()
    with display.showing(f"loading {model}"):
        from eesd_lite.engine import Engine
        from eesd_lite.tree_view import record_round

        with Engine.from_pretrained(model, progress=display, **options) as engine:
            ids = engine.text.render_chat([{"role": "user", "content": prompt}])
            view = record_round(engine, ids, params, number)
    _show(view, svg)


def _show(view: RoundView, svg: Path | None) -> None:
    from rich.console import Console

    if svg is None:
        coloured = obeys_escapes(sys.stdout)
        console = Console(no_color=not coloured, force_terminal=coloured, highlight=False)
        console.print(picture(view))
        return
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_terminal=True, highlight=False)
    console.print(picture(view))
    drawn = console.export_svg(title=f"round {view.number}")
    svg.write_text(_FONTS.sub("", drawn), encoding="utf-8")
    click.echo(f"{svg}: round {view.number}, {view.drafted} nodes", err=True)


def picture(view: RoundView) -> Group:
    """The round for rich's console."""
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree

    branches: list[Tree] = []
    last = 0
    for place, node in enumerate(view.nodes):
        label = Text(_quoted(node.text), style="bold green" if node.accepted else "")
        if place and node.reach is not None:
            label.append(f"  {node.reach:.3f}", style="dim")
        if place and node.accepted:
            label.append("  kept", style="green")
        style = "green" if node.accepted else "dim"
        branches.append(Tree(label) if node.parent < 0 else branches[node.parent].add(label, guide_style=style))
        last = place if node.accepted else last
    branches[last].add(Text(f"{_quoted(view.emitted[-1])}  the target's own", style="bold yellow"))
    return Group(
        Text(f"round {view.number}, after: ...{_quoted(view.before)[1:]}", style="dim"),
        branches[0],
        Text(f"\n{view.drafted} proposed, {len(view.emitted) - 1} kept, {len(view.emitted)} tokens emitted"),
        Text(_seconds(view), style="dim"),
    )


def _seconds(view: RoundView) -> str:
    asked = sum(node.asked for node in view.nodes)
    swept = f", {view.sweep_bytes / 1e6:.0f} MB read" if view.sweep_bytes else ""
    return (
        f"draft {view.draft_seconds * 1e3:.1f} ms (head at {asked} nodes, {view.steps} steps below the exit), "
        f"verify {view.verify_seconds * 1e3:.1f} ms ({len(view.nodes)} rows{swept}), "
        f"accept {view.accept_seconds * 1e3:.1f} ms"
    )


def _quoted(text: str) -> str:
    """In quotes, with line breaks and control characters written out."""
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + '"'
