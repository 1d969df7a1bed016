"""`eesd synth`: a random model of a well-known shape and its true size, to test capacity and bandwidth with."""

from __future__ import annotations

from pathlib import Path

import click

from cli.common import reports_errors
from cli.render import ProgressDisplay


@click.command("synth", short_help="Write a random model of true shape and size.")
@click.option("--shape", required=True, metavar="NAME", help="Such as llama-2-13b; a wrong name lists them.")
@click.option("--out", "target", required=True, metavar="DIR", type=click.Path(path_type=Path), help="A new folder.")
@click.option("--group-size", type=int, help="Inputs that share a scale; -1: all.  [default: the usual, mostly 128]")
@click.option("--layers", type=click.IntRange(min=1), help="So many layers only.  [default: all]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--headers-only", is_flag=True, help="Headers and holes: for eesd inspect and plan, takes no space.")
@click.option("--packed", is_flag=True, help="Packed layers in place of the checkpoint: half the space to run it.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="With --packed: whose kernels will read them.")  # fmt: skip
@reports_errors
def synth(
    shape: str, target: Path, *, group_size: int | None, layers: int | None, seed: int, headers_only: bool,
    packed: bool, device: str,
) -> None:  # fmt: skip
    """Write a model with random weights into the new folder DIR.

    It has the shape and every byte of the real one, and runs; what it says means nothing.
    """
    from eesd_lite.errors import PrepareError
    from models.shapes import find_shape

    if packed and headers_only:
        raise click.UsageError("--packed and --headers-only exclude each other")
    if target.exists():
        raise PrepareError(f"{target} exists already; remove it or name another folder")
    found = find_shape(shape)
    display = ProgressDisplay()
    with display.showing(f"preparing to write {shape}"):
        from eesd_lite.synth import SynthSettings, write_checkpoint

        settings = SynthSettings.of(found, group_size=group_size, layers=layers, seed=seed, content=not headers_only)
        if packed:
            from eesd_lite.synth_packed import kernels_of, write_packed

            write_packed(target, settings, kernels_of(device), display)
        else:
            write_checkpoint(target, settings, display)
    click.echo(str(target))
