"""The line where the user types, by prompt_toolkit: editing, a paste of many lines as one question, Alt-Enter, Tab.

Ctrl-C empties the line; on an empty line it raises KeyboardInterrupt. Ctrl-D on an empty line raises EOFError. The line
is drawn on stderr: stdout is for answers. What was typed is kept in a history file, readable by its owner only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common import is_terminal
from cli.render import obeys_escapes

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

PROMPT = ">>> "
PATHS = "PATHS"  # stands for "a file's name" among the words that may follow a command

Words = Callable[[], Iterable[str]]


class PromptLine:
    """Reads one question after another from a terminal.

    `commands` are completed by Tab: each with what may follow it, a function that gives words (or `PATHS`).
    """

    def __init__(self, commands: Mapping[str, Words], history: Path | None = None) -> None:
        self._session: PromptSession[str] | None = None
        if obeys_escapes(sys.stderr) or (obeys_escapes(sys.stdout) and not is_terminal(sys.stderr)):
            self._session = _session(commands, history)

    def read(self, default: str = "") -> str:
        """The next question; `default` is already typed."""
        if self._session is None:  # nowhere to draw: the terminal's own line editing has to do
            if is_terminal(sys.stderr):
                click.echo(PROMPT + (f"(was: {default}) " if default else ""), err=True, nl=False)
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")
        return self._session.prompt(PROMPT, prompt_continuation="... ", default=default)


def _session(commands: Mapping[str, Words], history: Path | None) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def clear(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return PromptSession(
        key_bindings=keys,
        output=create_output(stdout=sys.stderr if is_terminal(sys.stderr) else sys.stdout),
        completer=_completer(commands),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        history=_history(history),
        enable_open_in_editor=True,
    )


def _history(path: Path | None) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Forgiving(FileHistory):
        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError:
                pass  # a full disk is no reason to lose the question

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        return Forgiving(str(path))
    except OSError:
        return InMemoryHistory()


def _completer(commands: Mapping[str, Words]) -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class CommandCompleter(Completer):
        def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:
            text = document.text_before_cursor
            name, space, rest = text.partition(" ")
            if not text.startswith("/") or "\n" in text:
                return
            if not space:
                yield from (Completion(word, -len(name)) for word in commands if word.startswith(name))
                return
            words = list(commands[name]()) if name in commands else []
            last = rest.rpartition(" ")[2]
            if PATHS in words:
                yield from PathCompleter(expanduser=True).get_completions(Document(rest), complete_event)
            # Words may be two ("markdown off"): the part that is still to come is offered.
            for word in words:
                if word != PATHS and word.startswith(rest):
                    yield Completion(word[len(rest) - len(last) :], -len(last))

    return CommandCompleter()


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Keys typed meanwhile do not show; they come to the next line. Painting over an answer relies on that."""
    if not is_terminal(sys.stdin) or sys.platform == "win32":
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
