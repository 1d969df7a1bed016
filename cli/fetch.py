"""`eesd fetch`: prepare a model that this project knows by name, or list those."""

from __future__ import annotations

import click

from cli.common import reports_errors
from cli.render import ProgressDisplay
from eesd_lite.units import format_size


@click.command("fetch")
@click.argument("name", required=False)
@reports_errors
def fetch(name: str | None) -> None:
    """Download, verify, convert and quantize the recipe NAME; its folder is printed. Without NAME: list recipes.

    What is complete is kept in EESD_HOME (default ~/.cache/eesd-lite), so a second call is instant and one after a kill
    goes on where it can.
    """
    from models import RECIPES

    if name is None:
        for recipe in RECIPES.values():
            heads = ", ".join(str(head.exit_layer) for head in recipe.heads) or "none"
            sizes = (
                f"download {format_size(recipe.origin.download_bytes)}, prepared {format_size(recipe.prepared_bytes)}"
            )
            click.echo(f"{recipe.name}: {recipe.title}, {recipe.licence}, {sizes}, exit heads at layers {heads}")
        return
    from eesd_lite.prepare import fetch as prepare

    display = ProgressDisplay()
    with display.showing(f"looking for {name}", delay=0.4):
        folder = prepare(name, display)
    click.echo(str(folder))
