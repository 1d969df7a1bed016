"""Signals while an answer runs: they stop the engine at once, but never between showing a token and recording it.

The exception is raised only inside `waiting()`, which wraps the engine's work. Anywhere else the wish is noted in
`pending`, for the loop to look at when its books are in order; a second Ctrl-C there is raised in any case. SIGTERM and
SIGHUP (the terminal was closed) end the program in the same orderly way, as `Terminated`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = tuple(number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None)


class Terminated(BaseException):
    """Somebody asked the program to end; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell reports for a program that died of the signal."""
        return 128 + self.number


@contextmanager
def raising_terminated() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Terminated` inside; further ones are ignored, so that saving is not cut short."""

    def handler(number: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(number)

    # A program that was told to ignore hang-ups (nohup) goes on ignoring them.
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, old in before.items():
        if old != signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)  # None: not set by Python


class Interrupts:
    """A context manager around one answer; the handlers that were there before return afterwards."""

    def __init__(self) -> None:
        self.pending = False
        self.terminated: Terminated | None = None
        self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, *ENDING):
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The part in which a signal raises KeyboardInterrupt."""
        self._waiting = True
        try:
            if self.pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.pending = self.pending and number == signal.SIGINT, True
        if number != signal.SIGINT:
            self.terminated = self.terminated or Terminated(number)
        if self._waiting or again:
            raise KeyboardInterrupt
