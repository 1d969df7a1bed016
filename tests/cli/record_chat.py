"""Pictures of a real chat: python -m tests.cli.record_chat --out X.svg [--columns N] [--rows N] PROGRAM ARGUMENTS

Reads lines from standard input, types them into PROGRAM in a pseudo-terminal, each when the prompt is there, and writes
what an emulated terminal (pyte) shows at the end as SVG (rich). The pictures in docs/ were made with it.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

READING = "\x1b[?2004h"  # the line editor switches bracketed paste on before it draws the prompt
_NAMED = {"brown": "yellow", "brightbrown": "bright_yellow"}  # pyte's names for what others call yellow


def feed(screen: pyte.Screen, output: str) -> None:
    """Show terminal output on the screen."""
    pyte.Stream(screen).feed(output)


def text_of(screen: pyte.Screen) -> Text:
    """The screen and what has scrolled off it, with colours."""
    history = list(screen.history.top) if isinstance(screen, pyte.HistoryScreen) else []
    rows = [*history, *(screen.buffer[y] for y in range(screen.lines))]
    text = Text()
    for row in rows:
        line = Text()
        for x in range(screen.columns):
            cell = row[x]
            line.append(cell.data, _style(cell))
        line.rstrip()
        text.append_text(line).append("\n")
    text.rstrip()
    return text


def _style(cell: pyte.screens.Char) -> Style:
    return Style(
        color=_color(cell.fg), bgcolor=_color(cell.bg), bold=cell.bold, italic=cell.italics,
        underline=cell.underscore, strike=cell.strikethrough, reverse=cell.reverse,
    )  # fmt: skip


def _color(name: str) -> str | None:
    if name == "default":
        return None
    name = _NAMED.get(name, name)
    if len(name) == 6 and all(c in "0123456789abcdef" for c in name):
        return f"#{name}"
    return name.replace("bright", "bright_") if name.startswith("bright") and "_" not in name else name


def record(command: list[str], lines: list[str], *, columns: int = 100, rows: int = 30, timeout: float = 120) -> str:
    """Everything that the program wrote to its terminal while the lines were typed."""
    process = pexpect.spawn(
        command[0], command[1:], encoding="utf-8", timeout=timeout, dimensions=(rows, columns), echo=False
    )
    output = []

    def wait() -> None:
        process.expect_exact(READING)
        output.append(process.before + READING)
        process.expect_exact(">>>")
        output.append(process.before + ">>>")

    wait()
    for line in lines:
        process.send(line + "\r")
        wait()
    process.sendeof()
    process.expect(pexpect.EOF)
    output.append(process.before)
    process.close()
    return "".join(output)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--title", default="eesd-chat")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command
    lines = sys.stdin.read().splitlines()
    output = record(command, lines, columns=arguments.columns, rows=arguments.rows)
    screen = pyte.HistoryScreen(arguments.columns, arguments.rows, history=2000)
    feed(screen, output)
    console = Console(record=True, width=arguments.columns, file=open("/dev/null", "w"))
    console.print(text_of(screen), soft_wrap=True)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=arguments.title), flags=re.DOTALL)
    arguments.out.write_text(svg, encoding="utf-8")  # without addresses of fonts: a picture loads nothing


if __name__ == "__main__":
    main()
