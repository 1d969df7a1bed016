"""A real limit on a child's memory: a cgroup where this user may make one, else an rlimit, and which of them it was.

A cgroup counts anonymous memory and the page cache that the child fills, so that a mapped file cannot hide in RAM that
"the card does not have". An rlimit (RLIMIT_DATA) counts anonymous memory only. Used by `eesd bench offload`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Files:
    """What a version of cgroups calls things."""

    version: str
    limit: str
    usage: str
    peak: str


_V1 = _Files("cgroup v1", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes")
_V2 = _Files("cgroup v2", "memory.max", "memory.current", "memory.peak")


@dataclass
class MemoryGroup:
    """Children that share a limit. Give `enter` to subprocess as preexec_fn."""

    folder: Path | None = None  # None: no cgroup, every child limits itself
    files: _Files | None = None
    limit_bytes: int | None = None

    @property
    def method(self) -> str:
        """How the limit is enforced."""
        return self.files.version if self.files is not None else "rlimit"

    def limit(self, nbytes: int) -> None:
        """From now on, or without cgroups for children that start from now on: no more than `nbytes`."""
        self.limit_bytes = nbytes
        if self.folder is not None and self.files is not None:
            (self.folder / self.files.limit).write_text(str(nbytes))

    def enter(self) -> None:
        """In the child, between fork and exec."""
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))
        elif self.limit_bytes is not None:
            import resource  # not on Windows

            resource.setrlimit(resource.RLIMIT_DATA, (self.limit_bytes, self.limit_bytes))

    def usage_bytes(self) -> int | None:
        """What the group holds now, page cache included; None where nobody counts."""
        return self._read(self.files.usage) if self.files is not None else None

    def peak_bytes(self) -> int | None:
        """The most that it has held."""
        return self._read(self.files.peak) if self.files is not None else None

    def _read(self, name: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int(((self.folder or CGROUP) / name).read_text())
        return None


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A group without a limit yet, removed with the block; its children must have ended by then."""
    for parent, files in _candidates():
        try:
            folder = Path(tempfile.mkdtemp(prefix="eesd-", dir=parent))
        except OSError:
            continue
        try:
            if os.access(folder / files.limit, os.W_OK):
                yield MemoryGroup(folder, files)
                return
        finally:
            _remove(folder)
    yield MemoryGroup()


def _candidates() -> Iterator[tuple[Path, _Files]]:
    if (CGROUP / "memory").is_dir():
        yield CGROUP / "memory", _V1
    with contextlib.suppress(OSError, StopIteration):
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        # A group with processes may have no controllers below it: beside this one, or at the root of a container.
        here = CGROUP / own[3:].lstrip("/")
        for parent in (here, here.parent, CGROUP):
            with contextlib.suppress(OSError):
                if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                    yield parent, _V2


def _remove(folder: Path) -> None:
    for _ in range(50):  # the last process may still be on its way out
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
