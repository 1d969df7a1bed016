"""How an answer appears: raw for files and pipes, plain on a terminal, with its drafts in colour, or not until it is
complete (JSON). Markdown has a module of its own.

What goes to a terminal has passed `printable`: a model cannot move the cursor, whatever it says.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import click

from cli.render import printable

if TYPE_CHECKING:
    from eesd_lite.text import TextCodec


class Event(Protocol):
    """What `Engine.generate` yields."""

    @property
    def token_id(self) -> int | None: ...
    @property
    def text(self) -> str: ...
    @property
    def drafted(self) -> bool: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def rejected(self) -> tuple[int, ...]: ...


class View(Protocol):
    """Takes an answer piece by piece. `end` leaves the cursor at the start of a line."""

    def show(self, text: str, event: Event) -> None: ...

    def end(self) -> None: ...


class PlainView:
    """The text as it comes."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._open = False

    def show(self, text: str, event: Event) -> None:
        if text:
            write(printable(text) if self._terminal else text)
            self._open = not text.endswith("\n")

    def end(self) -> None:
        if self._open:
            write("\n")
            self._open = False


class NoView:
    """Nothing: the answer is reported whole."""

    def show(self, text: str, event: Event) -> None:
        """Nothing yet."""

    def end(self) -> None:
        """Nothing open."""


class DraftView:
    """Kept drafts, what was drafted in vain, and what the target said instead, told apart as they arrive."""

    LEGEND: ClassVar[tuple[tuple[str, dict[str, Any], str, str], ...]] = (
        ("drafted and kept", {"fg": "green"}, "", ""),
        ("drafted in vain", {"fg": "red", "strikethrough": True}, "[-", "-]"),
        ("the target's correction", {"fg": "yellow", "bold": True}, "{+", "+}"),
        ("not drafted", {}, "", ""),
    )

    def __init__(self, codec: TextCodec, *, colors: bool) -> None:
        self._codec, self._colors = codec, colors
        self._last: int | None = None
        self._open = False

    @classmethod
    def legend(cls, *, colors: bool) -> str:
        """One line that explains the rest."""
        return ", ".join(_marked(name, style, before, after, colors) for name, style, before, after in cls.LEGEND)

    def show(self, text: str, event: Event) -> None:
        if event.rejected:
            self._write(self._rejected_text(event.rejected), 1)
        self._write(text, 2 if event.rejected else 0 if event.drafted else 3)
        self._last = event.token_id if event.token_id is not None else self._last
        if text:
            self._open = not text.endswith("\n")

    def end(self) -> None:
        if self._open:
            write("\n")
            self._open = False

    def _rejected_text(self, ids: tuple[int, ...]) -> str:
        # Decoded behind the token before: some tokenizers drop the space of a first token.
        before = [self._last] if self._last is not None else []
        text = self._codec.decode([*before, *ids])[len(self._codec.decode(before)) :]
        return text.replace("\n", "\\n")

    def _write(self, text: str, kind: int) -> None:
        _, style, before, after = self.LEGEND[kind]
        lines = printable(text).split("\n")  # a style that spans a line end would colour the margin
        write("\n".join(_marked(line, style, before, after, self._colors) if line else "" for line in lines))


def _marked(text: str, style: dict[str, Any], before: str, after: str, colors: bool) -> str:
    if colors:
        return click.style(text, **style) if style else text
    return f"{before}{text}{after}"


def write(text: str) -> None:
    """Part of the answer, at once."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()
