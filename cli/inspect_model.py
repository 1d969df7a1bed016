"""`eesd inspect`: what a model folder is, from its headers, in a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cli.common import is_terminal, reports_errors
from eesd_lite.units import format_size

if TYPE_CHECKING:
    from eesd_lite.inspection import Inspection, Weights


@click.command("inspect", short_help="What a model folder is, from its headers.")
@click.argument("model")
@click.option("--weights", "weights_file", metavar="FILE", help="Which file or index, where the folder holds several.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, sizes in bytes.")
@reports_errors
def inspect(model: str, weights_file: str | None, as_json: bool) -> None:
    """Describe MODEL: a prepared recipe's name, a folder, or a Hub id in the cache.

    Reads headers only, a moment for any size. A folder that would not load is described too, with the reasons,
    and the exit status is 0 all the same: `loads` in --json tells.
    """
    from eesd_lite.inspection import inspect_model

    found = inspect_model(model, weights_file)
    if as_json:
        click.echo(json.dumps({**asdict(found), "loads": not found.refusals}))
        return
    _show(found)


def _show(found: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(found):
        table.add_row(name, value)
    # A pipe gets long lines whole; a terminal gets them folded.
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if is_terminal(sys.stdout) else 500)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def rows(found: Inspection) -> Iterator[tuple[str, str]]:
    """Name and value of every line, in reading order."""
    config, text = found.config, found.text
    yield "model", found.name + (f" (recipe {found.recipe})" if found.recipe and found.recipe != found.name else "")
    yield "folder", found.folder
    yield "family", str(config.get("model_type", "unknown"))
    yield "layers", str(config.get("num_hidden_layers", "unknown"))
    yield "shape", _shape(config)
    if found.context is not None:
        window = f", sliding window {config['sliding_window']}" if config.get("sliding_window") else ""
        yield "context", f"{found.context}{window}"
    yield "rope", found.rope
    if found.weights is not None:
        yield from _weights(found.weights)
    if found.kv_bytes_per_token is not None:
        yield "KV cache", f"{format_size(found.kv_bytes_per_token)} per token"
    tokens = "" if text.tokens is None else f", {text.tokens} tokens for {config.get('vocab_size', '?')} rows"
    yield "tokenizer", f"{text.tokenizer}{tokens}"
    yield "begins with", text.bos
    yield "ends at ids", ", ".join(map(str, text.eos_ids)) or "none"
    yield "chat template", text.template
    yield "exit heads", ", ".join(map(str, found.heads)) or "none; --head instant makes one, eesd train a better one"
    yield from (("note", note) for note in found.notes)
    yield "loads", "yes, as far as headers tell" if not found.refusals else "no"
    yield from (("refused", line) for line in found.refusals)


def _shape(config: dict[str, Any]) -> str:
    names = {
        "hidden_size": "hidden", "intermediate_size": "intermediate", "num_attention_heads": "heads",
        "num_key_value_heads": "KV heads", "head_dim": "per head", "vocab_size": "vocabulary",
    }  # fmt: skip
    parts = [f"{label} {config[key]}" for key, label in names.items() if key in config]
    if config.get("biases"):
        parts.append(f"biases on {' '.join(config['biases'])}")
    if config.get("qk_norm"):
        parts.append("norms over query and key heads")
    return ", ".join(parts) or "unknown"


def _weights(weights: Weights) -> Iterator[tuple[str, str]]:
    forms = _counted(weights.bits, weights.plain_modules)
    yield "bits", "4-bit, packed layers only" if weights.packed_only else forms
    if weights.bits:
        groups = {("one group" if size == -1 else str(size)): n for size, n in weights.group_sizes.items()}
        yield "group size", _counted(groups, 0)
        if weights.sym is not None:
            yield "grid", "symmetric" if weights.sym else "asymmetric"
            yield "act-order", weights.act_order
            yield "zero points", weights.zero_points
    yield "lm_head", weights.lm_head
    yield "size", f"{format_size(weights.total_bytes)} ({weights.total_bytes} bytes) in {_files(weights.files)}"
    yield "a layer, stored", _each(weights.stored_layers)
    if weights.packed_layers:
        yield "a layer, packed", _each(weights.packed_layers)
    outside = ", ".join(f"{name} {format_size(size)}" for name, size in weights.outside_layers.items())
    yield "outside layers", outside or "nothing"


def _files(count: int) -> str:
    return "one weight file" if count == 1 else f"{count} weight files"


def _counted(found: dict[str, int], plain: int) -> str:
    """One value alone; several with how often each occurs."""
    parts = [name if len(found) == 1 and not plain else f"{name} ({n} matrices)" for name, n in found.items()]
    if plain:
        parts.append(f"16-bit ({plain} matrices)" if found else "16-bit")
    return ", ".join(parts) or "no matrices"


def _each(sizes: tuple[int, ...]) -> str:
    if not sizes:
        return "none"
    if min(sizes) == max(sizes):
        return f"{format_size(sizes[0])} ({sizes[0]} bytes), {format_size(sum(sizes))} together"
    return f"{format_size(min(sizes))} to {format_size(max(sizes))}, {format_size(sum(sizes))} together"
