"""How both programs begin: streams that fail politely, and shell completion that was asked for by mistake."""

from __future__ import annotations

import os
import sys

import click

from cli.common import USER_ERROR, harden_streams


def start(command: click.Command, program: str) -> None:
    """Run `command` as the installed `program`; does not return."""
    harden_streams()
    variable = f"_{program}_COMPLETE".replace("-", "_").upper()
    try:
        command(prog_name=program)
    except (KeyError, ValueError):  # click reads what the shell's own function sets
        if not os.environ.get(variable):
            raise
        click.echo(
            f"{program}: error: {variable} asks for shell completion, but COMP_WORDS and COMP_CWORD do not say of "
            f"what; unset {variable}",
            err=True,
        )
        sys.exit(USER_ERROR)
