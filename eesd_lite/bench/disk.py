"""The disk's own rate, measured on the very files that the engine streams.

O_DIRECT goes past the page cache, so that the figure is the disk's and not memory's. Where the platform or the file
system refuses it, pages are dropped with fadvise before each pass and the method says so. Used by the report, which
puts the streamer's rate beside this one.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from eesd_lite.blob_reader import BlobReader
from eesd_lite.errors import StreamError

BLOCK_BYTES = 4 << 20  # large enough that the request size no longer matters on common disks
ENOUGH_BYTES = 1 << 30  # a turn of a large model does not have to see all of its files
_ALIGNMENT = 4096


@dataclass(frozen=True)
class DiskRate:
    bytes_read: int
    seconds: float
    method: str  # "O_DIRECT" or "fadvise"

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_read / self.seconds


def mean_rate(turns: Sequence[DiskRate]) -> float:
    """Bytes per second over several turns together."""
    return sum(turn.bytes_read for turn in turns) / sum(turn.seconds for turn in turns)


def raw_rate(files: Sequence[Path], seconds: float = 0.5) -> DiskRate:
    """Reads whole files one after another, each at least once but for very large ones, until `seconds` have gone by.

    As many reads are under way at once as the engine's reader has, since a disk may be faster with two than with one.
    """
    assert files, "no files to read"
    handles: list[tuple[int, bool]] = []
    try:
        for path in files:
            handles.append(_open(path))
        blocks = _Blocks(handles, seconds)
        started = time.perf_counter()
        with ThreadPoolExecutor(BlobReader.parallel) as pool:
            workers = [pool.submit(_read_blocks, blocks) for _ in range(BlobReader.parallel)]
            total = sum(worker.result() for worker in workers)
        elapsed = time.perf_counter() - started
    except OSError as error:
        raise StreamError(f"cannot read {error.filename or files[0]}: {error.strerror or error}") from error
    finally:
        for handle, _ in handles:
            os.close(handle)
    if not total:
        raise StreamError(f"{files[0]} and its {len(files) - 1} siblings are empty")
    method = "O_DIRECT" if all(direct for _, direct in handles) else "fadvise"
    return DiskRate(total, elapsed, method)


class _Blocks:
    """What is to be read next, for several threads: (handle, offset, length), file by file, until it is enough."""

    def __init__(self, handles: Sequence[tuple[int, bool]], seconds: float) -> None:
        self._blocks = self._walk(handles, seconds)
        self._lock = threading.Lock()

    def next(self) -> tuple[int, int, int] | None:
        with self._lock:
            return next(self._blocks, None)

    @staticmethod
    def _walk(handles: Sequence[tuple[int, bool]], seconds: float) -> Iterator[tuple[int, int, int]]:
        started, given = time.perf_counter(), 0
        for turn, (handle, direct) in enumerate(itertools.cycle(handles)):
            enough = turn >= len(handles) or given >= ENOUGH_BYTES
            if enough and time.perf_counter() - started >= seconds:
                return
            if not direct:
                _forget(handle)
            size = os.fstat(handle).st_size
            for offset in range(0, size, BLOCK_BYTES):
                # The last block is asked for in full and comes back short: O_DIRECT wants lengths in whole sectors.
                yield handle, offset, min(BLOCK_BYTES, -(-(size - offset) // _ALIGNMENT) * _ALIGNMENT)
            given += size


def _read_blocks(blocks: _Blocks) -> int:
    """One thread's share; the bytes that came."""
    total = 0
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # page-aligned, as O_DIRECT wants it
        while (block := blocks.next()) is not None:
            handle, offset, length = block
            with memoryview(buffer) as view, view[:length] as part:
                total += os.preadv(handle, [part], offset)
    return total


def drop_pages(path: Path) -> None:
    """Asks the system to forget the cached pages of a file; does nothing where that cannot be asked."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _forget(handle)
    finally:
        os.close(handle)


def _open(path: Path) -> tuple[int, bool]:
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(path, os.O_RDONLY | direct), True
        except OSError:
            pass  # tmpfs and some network file systems refuse O_DIRECT
    return os.open(path, os.O_RDONLY), False


def _forget(handle: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
