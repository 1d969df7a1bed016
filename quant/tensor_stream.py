"""Writing safetensors files of any size in bounded memory: the header first, then every tensor in pieces.

The library's own writer wants all tensors of a file in memory at once. A file may also be written without content: a
header and a hole of the right size, for whoever looks at headers only. Used by `eesd_lite.synth`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quant.folder_index import INDEX_NAME
from quant.safetensors_index import DTYPE_BYTES

SHARD_BYTES = 2 * 2**30


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written; `dtype` in the names of safetensors, such as F16."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Content = Callable[[TensorSpec], Iterable[memoryview]]  # the bytes of a tensor, in pieces and in order


def shards(tensors: Sequence[TensorSpec], limit: int = SHARD_BYTES) -> list[list[TensorSpec]]:
    """Tensors in order, cut into files of about `limit` bytes."""
    found: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in tensors:
        if found[-1] and size + tensor.nbytes > limit:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.nbytes
    return found


def write_folder(
    folder: Path, tensors: Sequence[TensorSpec], content: Content | None, written: Callable[[int], None]
) -> None:
    """`model.safetensors`, or shards and their index, in an existing folder. `content` None: holes in place of data.

    `written` is told the bytes of every piece.
    """
    parts = shards(tensors)
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write_file(folder / name, part, content, written)
        weight_map.update({tensor.name: name for tensor in part})
    if len(parts) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_file(
    path: Path, tensors: Sequence[TensorSpec], content: Content | None, written: Callable[[int], None]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data begins at a multiple of eight, as the format asks for
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        if content is None:
            file.truncate(8 + len(encoded) + offset)
            return
        for tensor in tensors:
            before = file.tell()
            for piece in content(tensor):
                file.write(piece)
                written(piece.nbytes)
            size = file.tell() - before
            assert size == tensor.nbytes, f"{tensor.name}: {size} bytes were written, {tensor.nbytes} belong there"
