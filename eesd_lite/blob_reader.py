"""Reading layer blobs from disk without the page cache, at the disk's rate or at a slower one that is asked for.

O_DIRECT keeps the page cache from hiding the cost and from eating the memory that the plan counts. Where the platform
or the file system lacks it, reads are buffered and the pages are dropped again; `mode` says which. Used by the streamer
on its threads, and by the loader for resident layers.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from torch import Tensor

from eesd_lite.errors import StreamError
from eesd_lite.layer_blob import BLOCK

_DIRECT = getattr(os, "O_DIRECT", 0)


class BlobReader:
    """Reads whole blobs into page-aligned buffers, for several threads. `rate` (bytes/s) imitates a slower link."""

    # A second read keeps the disk busy while the thread of the first waits for a core that computes.
    parallel = 2

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and rate <= 0:
            raise StreamError(f"throttle must be above 0 bytes per second, not {rate:g}")
        self.rate = rate
        self.mode = "direct" if _DIRECT else "buffered"
        self._files: dict[tuple[Path, str], int] = {}  # by path and mode
        self._due = 0.0
        self._lock = threading.Lock()

    def read(self, path: Path, buffer: Tensor, nbytes: int, offset: int = 0) -> None:
        """Fill the first `nbytes` of `buffer` (uint8) from `offset` on, both multiples of BLOCK; StreamError names the
        file."""
        assert nbytes % BLOCK == offset % BLOCK == 0 and buffer.numel() >= nbytes, (nbytes, offset, buffer.numel())
        started = time.perf_counter()
        target = memoryview(buffer.numpy().data)[:nbytes]
        try:
            count = self._read_once(path, target, offset)
        except OSError as error:
            raise StreamError(f"{path}: reading offloaded weights failed ({error.strerror or error})") from None
        if count != nbytes:
            raise StreamError(
                f"{path}: {count} of {nbytes} bytes; the packed file was cut, remove it with: eesd cache rm"
            )
        self._wait(started, nbytes)

    def _read_once(self, path: Path, target: memoryview, offset: int) -> int:
        mode = self.mode  # another thread may change it meanwhile
        try:
            return self._read_all(self._open(path, mode), target, offset)
        except OSError:
            if mode != "direct":
                raise
        # Some file systems (tmpfs) refuse O_DIRECT at open or at read: read buffered from here on.
        self.mode = "buffered"
        return self._read_all(self._open(path, "buffered"), target, offset)

    def _read_all(self, descriptor: int, target: memoryview, offset: int) -> int:
        done = 0
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                break
            done += count
        if self.mode == "buffered" and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def _open(self, path: Path, mode: str) -> int:
        key = (path, mode)
        with self._lock:
            if key not in self._files:
                self._files[key] = os.open(path, os.O_RDONLY | (_DIRECT if mode == "direct" else 0))
            return self._files[key]

    def _wait(self, started: float, nbytes: int) -> None:
        """Sleep until a link of `rate`, which all reads share, would have delivered.

        A late wake-up is made good by the next read.
        """
        if self.rate is None:
            return
        with self._lock:
            late = started - self._due
            self._due = (started if late > 0.002 else self._due) + nbytes / self.rate
            due = self._due
        remaining = due - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)

    def close(self) -> None:
        """Close all files; reading again opens them again."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])
