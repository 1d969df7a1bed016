"""`eesd cache`: what lies in EESD_HOME, and how to be rid of it."""

from __future__ import annotations

import click

from cli.common import reports_errors
from eesd_lite.units import format_size


@click.group("cache")
def cache() -> None:
    """List or remove what was prepared (EESD_HOME, default ~/.cache/eesd-lite)."""


@cache.command("ls")
@reports_errors
def list_entries() -> None:
    """List the entries: size, kind, name."""
    from eesd_lite.home import entries, home

    found = entries()
    for entry in found:
        click.echo(f"{format_size(entry.bytes):>9}  {entry.kind:8}  {entry.name}")
    total = format_size(sum(entry.bytes for entry in found))
    click.echo(f"{home()}: {f'{len(found)} entries, {total}' if found else 'empty'}", err=True)


@cache.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@reports_errors
def remove_entries(names: tuple[str, ...]) -> None:
    """Remove entries by NAME, or by kind/NAME where several kinds share it."""
    from eesd_lite.home import remove

    for name in names:
        freed = remove(name)
        click.echo(f"removed {name}, {format_size(freed)} freed", err=True)
