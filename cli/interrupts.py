"""Ctrl-C while an answer runs: it stops the engine at once, but never between showing a token and recording it.

The exception is raised only inside `waiting()`, which wraps the engine's work. Anywhere else the wish is noted in
`pending`, for the loop to look at when its books are in order; a second Ctrl-C there is raised in any case.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """A context manager around one answer; the handler that was there before returns afterwards."""

    def __init__(self) -> None:
        self.pending = False
        self._waiting = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The part in which Ctrl-C raises KeyboardInterrupt."""
        self._waiting = True
        try:
            if self.pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.pending = self.pending, True
        if self._waiting or again:
            raise KeyboardInterrupt
