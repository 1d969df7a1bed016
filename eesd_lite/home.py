"""The cache folder EESD_HOME and the rules for writing into it: whole or not at all, one process at a time.

A folder is written under a temporary name and renamed when it is complete, so a crash, a kill, Ctrl-C or a full disk
never leaves a half-written one. `models/` holds prepared models, `work/` what preparing them needs, `packed/` weights
in kernel layout; each direct child is one cache entry. Called by everything that keeps files between runs.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eesd_lite.errors import PrepareError
from eesd_lite.progress import Progress, no_progress
from eesd_lite.units import format_size

_PARTIAL = ".partial"
_LOCKS = "locks"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FAILED = (errno.EFBIG, errno.EIO, errno.EROFS, errno.ENXIO, errno.ESTALE)


@dataclass(frozen=True)
class CacheEntry:
    name: str
    kind: str  # the folder it lies in: models, work, packed; or "partial": left by a killed process, or being written
    path: Path
    bytes: int


def home() -> Path:
    """The cache folder: EESD_HOME, or ~/.cache/eesd-lite. Not created here."""
    set_by_user = os.environ.get("EESD_HOME")
    return Path(set_by_user).expanduser().absolute() if set_by_user else Path.home() / ".cache" / "eesd-lite"


@contextmanager
def locked(path: Path, progress: Progress = no_progress) -> Iterator[None]:
    """Hold the one lock that belongs to `path` (which need not exist); says so while another process holds it.

    The lock dies with its process. Lock files stay, all in one place: deleting one that somebody waits for would let
    two processes in.
    """
    from filelock import FileLock, Timeout

    key = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]
    lock_file = home() / _LOCKS / f"{path.name}-{key}.lock"
    _make_folder(lock_file.parent)
    # No singleton: a second lock on the same path in this process would be a deadlock, and should show as one.
    lock = FileLock(lock_file)
    started = time.monotonic()
    while True:
        try:
            lock.acquire(timeout=0.5, poll_interval=0.05)
            break
        except Timeout:
            progress(f"waiting for another process that is working on {path.name}", int(time.monotonic() - started), 0)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def atomic_dir(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a new folder beside `target` that becomes `target` on success and is removed on any failure.

    With `replace` an existing target is swapped out at the end; without it, an existing target is an error at once.
    A full disk inside the block is reported as a PrepareError.
    """
    if target.exists() and not replace:
        raise PrepareError(f"{target} exists already; remove it or choose another name")
    _make_folder(target.parent)
    remove_stale(target.parent)
    partial = _partial_beside(target)
    try:
        with disk_errors(target):
            partial.mkdir()
            yield partial
            publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish(folder: Path, target: Path) -> None:
    """Give a finished folder its final name, on the same disk; an older folder of that name is swapped out."""
    _sync(folder)
    if not target.exists():
        os.rename(folder, target)
        return
    old = _partial_beside(target)
    os.rename(target, old)
    os.rename(folder, target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn 'no space left', and a write that fails, into one line that says what helps.

    Errors that name a file (opening, renaming) have their line already and pass through.
    """
    try:
        yield
    except Exception as error:
        # The Rust writers of safetensors and tokenizers report a full disk as text in an exception of their own.
        if getattr(error, "errno", None) in _FULL or os.strerror(errno.ENOSPC) in str(error):
            free = format_size(shutil.disk_usage(_existing_parent(target)).free)
            raise PrepareError(
                f"disk full while writing {target} ({free} free); free some space or set EESD_HOME to another disk"
            ) from error
        if isinstance(error, OSError) and error.errno in _FAILED and error.filename is None:
            raise PrepareError(
                f"writing {target} failed ({error.strerror}); set EESD_HOME to another disk, or lift ulimit -f"
            ) from error
        raise


def require_free(path: Path, needed: int, what: str) -> None:
    """Raise PrepareError unless the disk of `path` (which need not exist yet) has that many bytes free."""
    place = _existing_parent(path)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise PrepareError(
            f"{what} needs {format_size(needed)} free in {place}, only {format_size(free)} are; "
            "free some space or set EESD_HOME to another disk"
        )


def entries() -> list[CacheEntry]:
    """What the cache holds, models first; folders that a killed process left are listed as `partial`."""
    found = []
    for folder in _kinds():
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") and not path.name.endswith(_PARTIAL):
                continue
            kind = "partial" if path.name.endswith(_PARTIAL) else folder.name
            found.append(CacheEntry(name=path.name, kind=kind, path=path, bytes=size_of(path)))
    return found


def remove(name: str, progress: Progress = no_progress) -> int:
    """Delete every cache entry of that name ("name" or "kind/name"); the bytes that were freed.

    The entry is renamed first, so that a deletion cut short never leaves something that looks complete.
    """
    chosen = [entry for entry in entries() if name in (entry.name, f"{entry.kind}/{entry.name}")]
    if not chosen:
        known = ", ".join(entry.name for entry in entries()) or "it is empty"
        raise PrepareError(f"nothing named {name!r} is in the cache {home()}; it holds: {known}")
    for entry in chosen:
        if entry.kind == "partial":
            if not _is_stale(entry.path):
                raise PrepareError(f"{entry.path} is being written by a running process; stop that first")
            shutil.rmtree(entry.path, ignore_errors=True)
            continue
        with locked(entry.path, progress):
            doomed = _partial_beside(entry.path)
            if entry.path.exists():
                os.rename(entry.path, doomed)
            shutil.rmtree(doomed, ignore_errors=True) if doomed.is_dir() else doomed.unlink(missing_ok=True)
    return sum(entry.bytes for entry in chosen)


def remove_stale(folder: Path) -> None:
    """Delete the temporary folders in `folder` whose process no longer runs."""
    for path in folder.glob(f".*{_PARTIAL}"):
        if _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; files that vanish meanwhile count nothing."""
    total = 0
    for file in [path] if path.is_file() else path.rglob("*"):
        try:
            total += file.lstat().st_size if not file.is_dir() else 0
        except OSError:
            continue
    return total


def _kinds() -> list[Path]:
    if not home().is_dir():
        return []
    folders = [path for path in home().iterdir() if path.is_dir() and path.name != _LOCKS]
    return sorted(folders, key=lambda path: (path.name != "models", path.name))


def _make_folder(path: Path) -> None:
    try:
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrepareError(
            f"cannot create {path} ({error.strerror}); set EESD_HOME to a folder you can write"
        ) from error
    if not os.access(path, os.W_OK):
        raise PrepareError(f"cannot write into {path}; set EESD_HOME to a folder you can write")


def _existing_parent(path: Path) -> Path:
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _partial_beside(target: Path) -> Path:
    """A new name that tells whose it is: host, process id, start of that process (ids are reused), a random part."""
    import psutil

    started = int(psutil.Process().create_time())
    owner = f"{_host()}-{os.getpid()}-{started}-{os.urandom(4).hex()}"
    return target.parent / f".{target.name}.{owner}{_PARTIAL}"


def _is_stale(partial: Path) -> bool:
    """Whether the process that a temporary folder is named after is gone; never true for another host's."""
    import psutil

    parts = partial.name.removesuffix(_PARTIAL).rsplit(".", 1)[-1].split("-")
    if len(parts) != 4 or parts[0] != _host() or not (parts[1].isdigit() and parts[2].isdigit()):
        return False
    try:
        process = psutil.Process(int(parts[1]))
        # psutil derives the start from the boot time, which moves a little when the clock is set.
        return process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - int(parts[2])) > 5
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _sync(folder: Path) -> None:
    """Flush files to the disk before the rename, so that a power cut cannot leave a complete name on empty files.

    safetensors creates files that only their owner can read; they get what the folder got from the umask.
    """
    mode = folder.stat().st_mode & 0o666
    for path in [*folder.rglob("*"), folder]:
        if path.is_file():
            path.chmod(mode)
        if path.is_file() or (path.is_dir() and os.name == "posix"):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
