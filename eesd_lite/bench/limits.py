"""A real limit on a child's memory: a cgroup where this user may make one, else an rlimit, and which of them it was.

A cgroup counts anonymous memory and the page cache that the child fills, so that a mapped file cannot hide in RAM that
"the card does not have". An rlimit (RLIMIT_DATA) counts anonymous memory only. Used by `eesd bench offload`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_V1, _V2 = ("memory.limit_in_bytes", "memory.max_usage_in_bytes"), ("memory.max", "memory.peak")


@dataclass
class MemoryLimit:
    """What a child runs under. Give `enter` to subprocess as preexec_fn."""

    nbytes: int | None
    method: str  # "cgroup v1", "cgroup v2", "rlimit" or "none"
    folder: Path | None = None
    peak_file: str = ""

    def enter(self) -> None:
        """In the child, between fork and exec."""
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))
        elif self.nbytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.nbytes, self.nbytes))

    def peak_bytes(self) -> int | None:
        """The most that the cgroup has held, page cache included; None where nobody counted."""
        if self.folder is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / self.peak_file).read_text())
        return None


@contextlib.contextmanager
def limited(nbytes: int | None) -> Iterator[MemoryLimit]:
    """A limit of `nbytes` for children started in the block; None counts and limits nothing."""
    if nbytes is None:
        yield MemoryLimit(None, "none")
        return
    for parent, (limit_file, peak_file), method in _candidates():
        folder = _make(parent, limit_file, nbytes)
        if folder is not None:
            try:
                yield MemoryLimit(nbytes, method, folder, peak_file)
            finally:
                _remove(folder)
            return
    yield MemoryLimit(nbytes, "rlimit")


def _candidates() -> Iterator[tuple[Path, tuple[str, str], str]]:
    if (CGROUP / "memory").is_dir():
        yield CGROUP / "memory", _V1, "cgroup v1"
    with contextlib.suppress(OSError):
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        # A group with processes may have no controllers below it: beside this one, or at the root of a container.
        here = CGROUP / own[3:].lstrip("/")
        for parent in (here, here.parent, CGROUP):
            if "memory" in _words(parent / "cgroup.subtree_control"):
                yield parent, _V2, "cgroup v2"


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _make(parent: Path, limit_file: str, nbytes: int) -> Path | None:
    """A new group below `parent` with the limit set, or None where that is not allowed."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="eesd-", dir=parent))
    except OSError:
        return None
    try:
        (folder / limit_file).write_text(str(nbytes))
        return folder
    except OSError:
        _remove(folder)
        return None


def _remove(folder: Path) -> None:
    for _ in range(50):  # the last process may still be on its way out
        with contextlib.suppress(FileNotFoundError):
            try:
                folder.rmdir()
            except FileNotFoundError:
                raise
            except OSError:
                time.sleep(0.1)
                continue
        return
