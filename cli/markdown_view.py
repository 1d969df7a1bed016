"""Markdown on a terminal while it streams: every piece is shown raw at once, and a finished block is painted over once.

A block is a paragraph, list or table up to its empty line, a heading, or one line of code. It is painted over only when
that is sure to hit the right rows and to lose nothing: it fits the screen, the width of every line is beyond doubt, and
the painted text has all of the raw one but its marks. Otherwise the raw text stays. There is no redrawing in between,
so nothing flickers, and what has scrolled away was right when it went.
"""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

from cli.answer_view import Event, write
from cli.render import printable

if TYPE_CHECKING:
    from rich.console import Console

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})\s*([^\s`]*)")
_HEADING = re.compile(r" {0,3}#{1,6}\s")
_LIST = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])\s")
_NUMBERED = re.compile(r"(?m)^(\s*\d{1,9})[.)]\s")  # rich shows the number without its dot
_CODE_SPAN = re.compile(r"(`+[^`]*`+)")
_NO_MARK = re.compile(r"_|\\|(?<=\w)\*\*?(?=\w)")  # is never meant as a mark outside code
_MARKS = "*`#>-+=|~:[]()"
_TOGETHER = ("\x1b[?2026h", "\x1b[?2026l")  # the terminal shows what is between as one change
_CONTEXT_LINES = 60  # of code before a line, for strings and comments that span lines


class MarkdownView:
    """See the module; `size` gives columns and rows and may change at any time."""

    def __init__(self, size: Any = None) -> None:
        self._size = size if size is not None else _terminal_size
        self._width = self._size()[0]
        self._block = ""  # on the screen in raw form, from the start of a line
        self._fence: str | None = None  # what closes the code that is open
        self._language = ""
        self._code: list[str] = []

    def show(self, text: str, event: Event) -> None:
        for piece in re.split(r"(?<=\n)", printable(text).replace("\t", "    ")):
            if not self._block:
                self._width = self._size()[0]
            write(piece)
            self._block += piece
            if piece.endswith("\n"):
                self._line_ended()

    def end(self) -> None:
        if self._block and not self._block.endswith("\n"):
            write("\n")
            self._block += "\n"
            self._line_ended()
        if self._block:
            self._settle(self._block, "")
        self._block, self._fence = "", None

    def _line_ended(self) -> None:
        before, _, line = self._block.removesuffix("\n").rpartition("\n")
        before += "\n" if before else ""
        if self._fence is not None:
            self._code_line(line)
        elif (opened := _FENCE.match(line)) is not None:
            self._settle(before, self._styled(line, "dim"))
            self._fence, self._language, self._code = opened[1], opened[2], []
        elif not line.strip():
            self._settle(before, "\n")
        elif _HEADING.match(line):
            self._settle(self._block, "")
        else:
            return  # more of the block is to come
        self._block = ""

    def _code_line(self, line: str) -> None:
        assert self._fence is not None
        mark = line.strip()
        if mark.startswith(self._fence) and set(mark) == {self._fence[0]}:
            self._fence = None
            self._replace(self._styled(line, "dim"))
            return
        self._code.append(line)
        self._replace(self._highlighted())

    def _settle(self, markdown: str, after: str) -> None:
        """Replace the block by `markdown` rendered and `after`, which stands for the rest of it."""
        painted = self._rendered(markdown) if markdown.strip() else ""
        if painted is not None and (painted or after.strip()):
            self._replace(painted + after)

    def _replace(self, painted: str) -> None:
        """Write `painted` over the block, whose last line has ended, if its rows are sure."""
        columns, rows = self._size()
        used = rows_of(self._block, columns)
        if used is not None and used < rows and columns == self._width:
            write(f"{_TOGETHER[0]}\x1b[{used}A\r\x1b[J{painted}{_TOGETHER[1]}")

    def _rendered(self, markdown: str) -> str | None:
        """The block by rich; None if something would be missing (indentation, raw HTML, entities, link definitions)."""
        from cli.markdown_style import ChatMarkdown

        if indents_text(markdown):
            return None
        console = self._console()
        console.print(ChatMarkdown(as_meant(markdown)))
        lines = console.file.getvalue().split("\n")  # type: ignore[attr-defined]
        while lines and not plain(lines[0]).strip():
            lines.pop(0)
        while lines and not plain(lines[-1]).strip():
            lines.pop()
        painted = "".join(f"{line.rstrip(' ')}\n" for line in lines)
        return painted if keeps_all(_NUMBERED.sub(r"\1 ", markdown), plain(painted)) else None

    def _highlighted(self) -> str:
        """The last line of the code."""
        from rich.syntax import Syntax

        code = self._code[-_CONTEXT_LINES:]
        text = Syntax("", self._language or "text", theme="ansi_dark").highlight("\n".join(code))
        line = text.split("\n", allow_blank=True)[len(code) - 1]
        console = self._console()
        console.print(line, soft_wrap=True, end="\n")
        painted: str = console.file.getvalue()  # type: ignore[attr-defined]
        return painted if plain(painted).rstrip("\n") == code[-1] else code[-1] + "\n"

    def _styled(self, line: str, style: str) -> str:
        console = self._console()
        console.print(line, style=style, soft_wrap=True, markup=False, highlight=False, end="\n")
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    def _console(self) -> Console:
        from rich.console import Console

        from cli.markdown_style import THEME

        return Console(
            file=io.StringIO(), force_terminal=True, width=self._size()[0], highlight=False, theme=THEME,
            legacy_windows=False, _environ={**os.environ, "COLUMNS": "", "LINES": ""},
        )  # fmt: skip


def rows_of(text: str, columns: int) -> int | None:
    """Rows that complete lines take on a terminal; None if that depends on the terminal's fonts."""
    rows = 0
    for line in text.removesuffix("\n").split("\n"):
        used = _rows_of_line(line, columns)
        if used is None:
            return None
        rows += used
    return rows


def _rows_of_line(line: str, columns: int) -> int | None:
    from rich.cells import cell_len

    if any(_is_doubtful(character) for character in line):
        return 1 if 2 * len(line) <= columns else None
    rows, column = 1, 0
    for character in line:
        width = cell_len(character)
        if column + width > columns:
            rows, column = rows + 1, 0
        column += width
    return rows


def _is_doubtful(character: str) -> bool:
    """Characters that join others, or whose width terminals disagree about."""
    if character.isascii():
        return False
    code = ord(character)
    return unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf") or 0x1F1E6 <= code <= 0x1F3FF


def indents_text(markdown: str) -> bool:
    """Whether lines outside lists are indented: code without a fence, most likely, or verse."""
    if _LIST.match(markdown.lstrip("\n")):
        return False
    return any(line.startswith("  ") and line.strip() for line in markdown.split("\n"))


def as_meant(markdown: str) -> str:
    """Source for rich that reads as people write: line ends count, `__init__`, 2*3*4 and a\\b are no marks."""
    lines = []
    for line in markdown.rstrip("\n").split("\n"):
        pieces = _CODE_SPAN.split(line)
        pieces[::2] = [_NO_MARK.sub(r"\\\g<0>", piece) for piece in pieces[::2]]
        lines.append("".join(pieces) + "  ")  # two spaces make a line end in Markdown
    return "\n".join(lines)


def keeps_all(raw: str, painted: str) -> bool:
    """Whether all of `raw` but spaces and marks is in `painted`, in its order."""
    rest = iter(painted)
    return all(any(other == c for other in rest) for c in raw if not c.isspace() and c not in _MARKS)


def plain(painted: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", painted)


def _terminal_size() -> tuple[int, int]:
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return 80, 24
    return size.columns or 80, size.lines or 24
