"""The line where the user types, by prompt_toolkit: editing, a paste of many lines as one question, Alt-Enter.

Ctrl-C empties the line; on an empty line it raises KeyboardInterrupt. Ctrl-D on an empty line raises EOFError. The line
is drawn on stderr: stdout is for answers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cli.common import is_terminal

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = ">>> "


class PromptLine:
    """Reads one question after another from a terminal."""

    def __init__(self) -> None:
        self._session: PromptSession[str] | None = None
        if is_terminal(sys.stderr) or is_terminal(sys.stdout):
            self._session = _session()

    def read(self) -> str:
        """The next question."""
        if self._session is None:  # nowhere to draw
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")
        return self._session.prompt(PROMPT, prompt_continuation="... ")


def _session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

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

    output = create_output(stdout=sys.stderr if is_terminal(sys.stderr) else sys.stdout)
    return PromptSession(key_bindings=keys, output=output)
