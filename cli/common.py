"""What all programs share: errors as one line with an exit code, option types, output that no console refuses.

Exit codes: 0 done, 1 an error that the user can do something about, 2 wrong arguments (click's own), 130 Ctrl-C.
Errors of any other kind are bugs and keep their traceback.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

import click

from eesd_lite.draft_weights import ALL, HEAD_BITS, SMALLEST
from eesd_lite.drafter_names import DRAFTERS
from eesd_lite.errors import USER_ERRORS, BudgetError
from eesd_lite.exit_choice import AUTO
from eesd_lite.units import parse_size

USER_ERROR, INTERRUPTED = 1, 130
Function = TypeVar("Function", bound=Callable[..., Any])


class Size(click.ParamType):
    """A number of bytes, written as people write it."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except BudgetError as error:
            self.fail(str(error), param, ctx)


class Rate(Size):
    """Bytes per second, with or without the "/s"."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        rate = super().convert(value.removesuffix("/s") if isinstance(value, str) else value, param, ctx)
        if rate == 0:
            self.fail("a rate must be more than 0 bytes a second", param, ctx)
        return rate


class Number(click.FloatRange):
    """A number within bounds; nan is in none, and infinity is no number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not in the range {self._describe_range()}", param, ctx)
        return number


class ExitLayer(click.ParamType):
    """A number of layers, several, or `auto`."""

    name = "layer"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        text = value.strip().lower()
        if "," in text:
            return tuple(self._number(part.strip(), 1, param, ctx, "no") for part in text.split(","))
        return AUTO if text == AUTO else self._number(text, self.least, param, ctx, "neither auto nor a")

    def _number(
        self, text: str, least: int, param: click.Parameter | None, ctx: click.Context | None, words: str
    ) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) < least:
            self.fail(f"{text!r} is {words} number of layers from {least} on; write 20, 10,20 or auto", param, ctx)
        return int(text)


weights_option = click.option(
    "--weights", metavar="FILE", help="The weight file or index to read, where MODEL holds several."
)


quantize_option = click.option(
    "--quantize", type=click.Choice(["nf4", "fp4"]), help="Load a 16-bit MODEL in bitsandbytes' 4-bit form."
)


drafter_option = click.option(
    "--drafter",
    type=click.Choice(DRAFTERS),
    default="head",
    show_default=True,
    help="Draft with the exit head, from repeated text (needs no head), or both.",
)


class DraftTokens(click.ParamType):
    """A number of tokens, or `all`."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, str) and value.strip().lower() == ALL:
            return ALL
        text = str(value).strip()
        if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) < SMALLEST:
            self.fail(f"{text!r} is neither {ALL} nor a number of tokens from {SMALLEST} on", param, ctx)
        return int(text)


class HeadBits(click.ParamType):
    """16, 8 or 4, also where a configuration file has a number."""

    name = "bits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if str(value) not in map(str, HEAD_BITS):
            self.fail(f"{value!r} is not one of 16, 8 and 4", param, ctx)
        return int(value)


draft_vocab_option = click.option(
    "--draft-vocab",
    type=DraftTokens(),
    metavar="N|all",
    help="Draft the N most frequent tokens only; all: every token, from a copy of lm_head in --head-bits.",
)


head_bits_option = click.option(
    "--head-bits",
    type=HeadBits(),
    metavar="16|8|4",
    help="Bits of the weights that only drafts read: exit head and --draft-vocab.  [default: 8, on a GPU 16]",
)


def program_name() -> str:
    """What messages start with: the program and its subcommand."""
    context = click.get_current_context(silent=True)
    return context.command_path if context is not None else "eesd"


def reports_errors(function: Function) -> Function:
    """Turn errors that users can cause into one line on stderr and an exit code; used on every command."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        harden_streams()
        try:
            result = function(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()
            return result
        except BrokenPipeError:
            silence_stdout()  # `| head -1` has seen enough: no error
            sys.exit(0)
        except USER_ERRORS as error:
            _complain(str(error))
        except OSError as error:  # full disk, no permission: the message names the file
            if error.filename is None and error.strerror is None:
                raise
            _complain(f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror))
        except KeyboardInterrupt:
            words = "interrupted; nothing half-written is left, the same command goes on"
            click.echo(f"{program_name()}: {words}", err=True)
            sys.exit(INTERRUPTED)

    return command  # type: ignore[return-value]


class _Forgiving(io.TextIOWrapper):
    """stderr where nothing can be written: what is said there is lost, and the answer on stdout is not."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def harden_streams() -> None:
    """Characters that the console's encoding lacks become question marks instead of an exception; see _Forgiving."""
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = _Forgiving(
            sys.stderr.buffer, encoding=sys.stderr.encoding, line_buffering=True, write_through=sys.stderr.write_through
        )
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        pass


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream exists and is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _complain(message: str) -> None:
    click.echo(f"{program_name()}: error: {' '.join(message.split())}", err=True)
    sys.exit(USER_ERROR)
