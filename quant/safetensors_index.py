"""Which tensor lies in which file of a folder, from safetensors headers alone, checked before anything is loaded.

Headers, indexes and file names are other people's: sizes, offsets and paths are verified here, once, so that a damaged
download is named in a second and not after minutes. `quant.checkpoint` reads tensors through the result.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.errors import CheckpointError

MAX_HEADER_BYTES = 100 * 2**20
INDEX_NAME = "model.safetensors.index.json"
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it is; `begin` and `end` are byte offsets in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`, or CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__} where an object belongs")
    return value


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of one safetensors file, or CheckpointError: missing, an LFS pointer, truncated, or inconsistent."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start.startswith(b"version "):
                raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; fetch the real file (git lfs pull)")
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path}: not a safetensors file or an incomplete download ({size} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the download is incomplete") from None
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise CheckpointError(f"{path}: the safetensors header is damaged; fetch the file again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not an object; fetch the file again")
    header.pop("__metadata__", None)
    found = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in header.items()}
    missing = max((info.end for info in found.values()), default=0) - size
    if missing > 0:
        raise CheckpointError(f"{path}: incomplete download, {missing} bytes are missing; fetch the file again")
    return found


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        numbers = (*shape, begin, end)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise ValueError
        expected = DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: tensor '{name}' has a damaged header entry; fetch the file again") from None
    for extent in shape:
        expected *= extent
    if end - begin != expected:
        raise CheckpointError(f"{path}: tensor '{name}' takes {end - begin} bytes where its shape needs {expected}")
    return TensorInfo(name, path, dtype, shape, data_start + begin, data_start + end)


def index_folder(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint in `folder`: through the index where there is one, else the single file."""
    index_path = folder / INDEX_NAME
    if index_path.exists():
        return _through_index(folder, index_path)
    candidates = sorted(folder.glob("*.safetensors"))
    if not candidates:
        pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
        hint = f"; {pickles[0].name} is a pickle: convert it to safetensors first" if pickles else ""
        raise CheckpointError(f"{folder}: no .safetensors file{hint}")
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates[:4])
        raise CheckpointError(f"{folder}: {len(candidates)} weight files and no {INDEX_NAME} ({names}); keep one")
    return read_header(candidates[0])


def _through_index(folder: Path, index_path: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: no weight_map; fetch the file again")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or file_name in ("", ".", ".."):
            raise CheckpointError(f"{index_path}: '{file_name}' is not a file name inside the folder")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for file_name in sorted(set(weight_map.values())):
        if not (folder / file_name).exists():
            present = len(list(folder.glob("*.safetensors")))
            raise CheckpointError(
                f"{folder / file_name}: named by {INDEX_NAME} but missing ({present} .safetensors files are there); "
                "finish the download, or remove a stale index"
            )
        headers[file_name] = read_header(folder / file_name)
    result: dict[str, TensorInfo] = {}
    for name, file_name in weight_map.items():
        if name not in headers[file_name]:
            raise CheckpointError(f"{folder / file_name}: lacks tensor '{name}' that {INDEX_NAME} places there")
        result[name] = headers[file_name][name]
    return result
