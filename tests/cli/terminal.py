"""A chat in a pseudo-terminal, with a scripted model: what is typed, what is shown, what the model was asked."""

from __future__ import annotations

import io
import re
import termios

import pexpect
import pyte

from eesd_lite.text import TextCodec
from tests.cli.conftest import LIMIT, ROOT, Scripted

READING = "\x1b[?2004h"  # the line editor switches bracketed paste on before it draws the prompt
CTRL_C, CTRL_D, ALT_ENTER, UP, TAB = "\x03", "\x04", "\x1b\r", "\x1b[A", "\t"
# Colours, cursor movements and modes: what a terminal swallows.
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])|\r")


class Terminal:
    """A chat in a terminal of 80 columns."""

    def __init__(self, scripted: Scripted, *arguments: str, model: bool = True, **env: str) -> None:
        self.scripted = scripted
        env = {"PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "80", **env}  # pexpect does not answer cursor queries
        self.process = pexpect.spawn(
            scripted.command[0], [*scripted.command[1:], *(["model"] if model else []), *arguments], cwd=str(ROOT),
            env=scripted.environment(**env), encoding="utf-8", timeout=LIMIT, dimensions=(24, 80),
        )  # fmt: skip
        self.process.logfile_read = io.StringIO()

    def expect(self, text: str) -> str:
        """Wait for a text; what came before it, without escape codes."""
        self.process.expect_exact(text)
        return ESCAPES.sub("", self.process.before)

    def prompt(self) -> str:
        """Wait until a question can be typed; what was shown before."""
        before = self.expect(READING)
        self.process.expect_exact(">>>")
        return before

    def send(self, text: str) -> None:
        self.process.send(text)

    def ask(self, text: str) -> str:
        """Send a question; what is shown up to the next prompt."""
        self.send(text + "\r")
        return self.prompt()

    def lines(self) -> list[str]:
        """What a reader sees: the screen and all that scrolled off it."""
        screen = pyte.HistoryScreen(80, 24, history=10_000)
        pyte.Stream(screen).feed(self.process.logfile_read.getvalue())
        rows = [*screen.history.top, *(screen.buffer[y] for y in range(24))]
        lines = ["".join(row[x].data for x in range(80)).rstrip() for row in rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def end(self) -> int:
        """The exit code; the terminal is as it was before."""
        self.process.expect(pexpect.EOF)
        modes = termios.tcgetattr(self.process.child_fd)[3]
        usual = termios.ECHO | termios.ICANON | termios.ISIG
        assert modes & usual == usual, "the terminal was left in another mode"
        self.process.close()
        return int(self.process.exitstatus)


def asked(terminal: Terminal, turn: int) -> str:
    codec = TextCodec.from_folder(terminal.scripted.folder)
    return codec.decode(terminal.scripted.turns()[turn]["prompt"])
