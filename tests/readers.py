"""Readers for the streamer that block, fail, or interrupt, in place of a disk."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from eesd_lite.blob_reader import BlobReader
from eesd_lite.errors import StreamError


class WatchedReader:
    """Reads for real. `permits`: how many reads are let through until `release`; `before` may raise or interrupt."""

    parallel = 1  # so that reads happen in the order of the layers

    def __init__(self, permits: int | None = None, before: Callable[[int], None] | None = None) -> None:
        self._inner = BlobReader()
        self._permits = threading.Semaphore(permits) if permits is not None else None
        self._before = before
        self.started = 0
        self.names: list[str] = []  # files that were read, in order
        self.closed = False

    def read(self, path: Path, buffer: Tensor, nbytes: int, offset: int = 0) -> None:
        self.started += 1
        if self._permits is not None and not self.closed:
            self._permits.acquire()
        if self._before is not None:
            self._before(self.started)
        self._inner.read(path, buffer, nbytes, offset)
        self.names.append(path.name)

    def release(self, count: int = 1000) -> None:
        """Let that many further reads through."""
        assert self._permits is not None
        self._permits.release(count)

    def close(self) -> None:
        self.closed = True
        self._inner.close()


def fail_at(*numbers: int) -> Callable[[int], None]:
    """A disk that fails at these reads (counted from 1)."""

    def before(number: int) -> None:
        if number in numbers:
            raise StreamError(f"read {number} failed on purpose")

    return before


def interrupt_at(number: int) -> Callable[[int], None]:
    """Ctrl-C in the main thread while it waits for this read."""

    def before(started: int) -> None:
        if started == number:
            threading.Event().wait(0.05)  # the consumer is now waiting, or busy with the layer before
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            threading.Event().wait(0.05)

    return before
