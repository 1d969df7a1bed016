"""`eesd quantize`: a 16-bit folder becomes a 4-bit GPTQ folder that other tools load too (docs/conformance.md)."""

from __future__ import annotations

from pathlib import Path

import click

from cli.common import reports_errors
from cli.render import ProgressDisplay


@click.command("quantize")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--bits", type=click.IntRange(2, 8), default=4, show_default=True, help="Bits per weight.")
@click.option("--group-size", type=int, default=64, show_default=True, help="Inputs that share a scale; -1: all.")
@click.option("--desc-act", is_flag=True, help="Quantize the most active inputs first (act-order).")
@click.option("--sym/--asym", default=True, show_default=True, help="Symmetric grid, or one with a zero point.")
@click.option(
    "--format",
    "layout",
    type=click.Choice(["auto", "gptq", "gptq_v2"]),
    default="auto",
    show_default=True,
    help="How zero points are stored; gptq: as AutoGPTQ loads it. auto: gptq for --sym, gptq_v2 for --asym.",
)
@click.option(
    "--method",
    type=click.Choice(["gptq", "rtn"]),
    default="gptq",
    show_default=True,
    help="rtn: round to nearest, no calibration.",
)
@click.option(
    "--calibration",
    default="self",
    show_default=True,
    metavar="FILE|self",
    help="JSON lines with text, messages or conversations; self: the model writes it.",
)
@click.option(
    "--calibration-rows", type=click.IntRange(min=1), default=128, show_default=True, help="Rows of 512 tokens."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For the self-written text.")
@reports_errors
def quantize(
    source: str, target: Path, *, bits: int, group_size: int, desc_act: bool, sym: bool, layout: str, method: str,
    calibration: str, calibration_rows: int, seed: int,
) -> None:  # fmt: skip
    """Quantize the folder or Hub model SRC into the new folder DST.

    DST appears when it is complete. Compare the result with SRC by `eesd eval`.
    """
    from eesd_lite.errors import PrepareError

    if target.exists():
        raise PrepareError(f"{target} exists already; remove it or name another folder")
    display = ProgressDisplay()
    with display.showing(f"looking for {source}"):
        from eesd_lite.calibration import calibration_ids
        from eesd_lite.prepare import resolve_model
        from eesd_lite.quantize import quantize_folder, refuse_quantized

        folder = resolve_model(source, display).folder
        refuse_quantized(folder)  # before minutes of calibration text
        rows: list[list[int]] = []
        if method == "gptq":
            data = None if calibration == "self" else Path(calibration)
            rows = calibration_ids(folder, data, rows=calibration_rows, seed=seed, progress=display)
        quantize_folder(
            folder, target, bits=bits, group_size=group_size, desc_act=desc_act, sym=sym, layout=layout,
            method=method, calibration=rows, progress=display,
        )  # fmt: skip
    click.echo(str(target))
