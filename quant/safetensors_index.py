"""The headers of safetensors files and small JSON files, read without trusting a byte of them.

Sizes, offsets, names and shapes are other people's: each is verified here, once, so that a damaged download is named
in a second and not after minutes, and so that no header makes us read, allocate or compute without bound. What passes
is what the safetensors library accepts. `quant.folder_index` puts the files of a folder together. Standard library.
"""

from __future__ import annotations

import json
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.errors import CheckpointError, remedy, shown

MAX_HEADER_BYTES = 24 * 2**20  # 200,000 tensors; parsed, the worst of it takes thirty times that
MAX_JSON_BYTES = 24 * 2**20
MAX_DIMENSIONS, MAX_EXTENT = 8, 2**48
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it is; `begin` and `end` are byte offsets in the file (pickled: 0, size)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class FileScan:
    """One weight file: its sound tensors, what is wrong with it, and the tensors that are known only by name. Where
    even the names are unknown, `complete` is False."""

    tensors: dict[str, TensorInfo]
    problems: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()
    complete: bool = True


def check_regular(path: Path, limit: int | None = None) -> int:
    """The size of a regular file; CheckpointError for a device, a pipe, a folder, or more bytes than `limit`."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {getattr(error, 'strerror', None) or error}; {remedy(error)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file; fetch the file again")
    if limit is not None and status.st_size > limit:
        raise CheckpointError(f"{path}: {status.st_size} bytes where at most {limit} make sense; fetch the file again")
    return status.st_size


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`, or CheckpointError naming the file."""
    check_regular(path, MAX_JSON_BYTES)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; {remedy(error)}") from None
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({shown(error)}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__} where an object belongs")
    return value


def scan_safetensors(path: Path) -> FileScan:
    """All tensors of one safetensors file from its header, and everything that is wrong with them."""
    if not _is_text(str(path)):
        problem = f"{path.parent}: the file name {shown(ascii(path.name))} is not UTF-8; rename the file"
        return FileScan({}, (problem,), complete=False)
    try:
        size = check_regular(path)
        header, data_start, twice = _read_header(path, size)
    except CheckpointError as error:
        return FileScan({}, (str(error),), complete=False)
    problems = [f"{path}: tensor '{shown(name)}' stands twice in the header; fetch the file again" for name in twice]
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append(f"{path}: the safetensors header has damaged metadata; fetch the file again")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        try:
            tensors[name] = _tensor_info(path, name, entry, data_start)
        except CheckpointError as error:
            problems.append(str(error))
    lost = frozenset(header) - frozenset(tensors)
    if not lost:  # gaps are only sure where every tensor is known
        problems += _placement_problems(path, tensors, data_start, size)
    return FileScan(tensors, tuple(problems), lost)


def _is_text(name: str) -> bool:
    """Whether a file name can be handed to libraries that take nothing but UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int, list[str]]:
    """(header, where the data begins, names that stand twice)."""
    twice: list[str] = []

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            seen: set[str] = set()
            twice.extend(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        return found

    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start.startswith(b"version "):
                raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; fetch the real file (git lfs pull)")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= size - 8:
                raise CheckpointError(f"{path}: not a safetensors file or an incomplete download ({size} bytes)")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: a header of {length} bytes, at most {MAX_HEADER_BYTES} make sense; fetch the file again"
                )
            text = file.read(length).decode("utf-8")
            if text[:1].isspace():  # the library takes none in front, and json no byte order mark
                raise ValueError
            header = json.loads(text, object_pairs_hook=no_repeats)
    except PermissionError as error:
        raise CheckpointError(f"{path}: {error.strerror}; {remedy(error)}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the download is incomplete") from None
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise CheckpointError(f"{path}: the safetensors header is damaged; fetch the file again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object; fetch the file again")
    return header, 8 + length, twice


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if len(shape) > MAX_DIMENSIONS or not all(_is_extent(n) for n in (*shape, begin, end)):
            raise ValueError
        expected = DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: tensor '{shown(name)}' has a damaged header entry; fetch the file again"
        ) from None
    for extent in shape:
        expected *= extent
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor '{shown(name)}' takes {end - begin} bytes where its shape {list(shape)} needs {expected}"
        )
    return TensorInfo(name, path, dtype, shape, data_start + begin, data_start + end)


def _is_extent(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_EXTENT


def _placement_problems(path: Path, tensors: dict[str, TensorInfo], data_start: int, size: int) -> list[str]:
    """Tensors that overlap, lie beyond the end of the file, or leave bytes between or behind them."""
    problems, position = [], data_start
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != position:
            fault = "overlaps the tensor before it" if info.begin < position else "lies behind a gap"
            problems.append(f"{path}: tensor '{shown(info.name)}' {fault}; fetch the file again")
        position = max(position, info.end)
    if position > size:
        cut = [name for name, info in tensors.items() if info.end > size]
        problems.append(
            f"{path}: incomplete download, {position - size} bytes are missing ({len(cut)} tensors are cut off, such "
            f"as '{shown(cut[0])}'); fetch the file again"
        )
    elif position < size:
        problems.append(f"{path}: {size - position} bytes behind the last tensor; fetch the file again")
    return problems
