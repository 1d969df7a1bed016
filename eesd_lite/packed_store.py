"""The packed per-layer blobs of a model on disk: written once, atomically, then read whole by loader and streamer.

EESD_HOME/packed/<name>-<key>/ holds layer-NNN.bin and manifest.json (layouts, sizes, checksums). The key covers the
checkpoint's files (name, size, time), the format and the kernels, so a changed model or kernel never meets stale blobs.
Writing holds one layer in memory at a time, checks free space first and is guarded by a lock against a second process.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from eesd_lite.config import ModelConfig
from eesd_lite.errors import PrepareError, StreamError
from eesd_lite.home import atomic_dir, home, locked, require_free
from eesd_lite.layer_blob import BlobLayout, fill, lay_out, page_buffer
from eesd_lite.packed_beside import MANIFEST, made_for, packed_beside
from eesd_lite.packing import KernelSet, layer_tensors
from eesd_lite.progress import Progress, no_progress
from quant.checkpoint import Checkpoint

FORMAT = 3  # raise it whenever the bytes of a blob change their meaning


@dataclass(frozen=True)
class PackedStore:
    """A complete packed folder: the layout of every layer, the file that holds it, and its content's CRC-32."""

    folder: Path
    layouts: tuple[BlobLayout, ...]
    checksums: tuple[int, ...]

    def path(self, index: int) -> Path:
        """The blob of layer `index`."""
        return self.folder / f"layer-{index:03d}.bin"

    def check(self, index: int, buffer: Tensor) -> None:
        """StreamError if `buffer` (uint8, the blob of layer `index` as it was read) is not what was written."""
        if checksum(buffer, self.layouts[index].nbytes) != self.checksums[index]:
            raise StreamError(
                f"{self.path(index)}: the content does not match its checksum, the packed file is damaged; "
                f"remove it with: eesd cache rm {self.folder.name}"
            )


def checksum(buffer: Tensor, nbytes: int) -> int:
    """CRC-32 of the first `nbytes` of a uint8 buffer: against bit rot and cut files, not against an adversary."""
    return zlib.crc32(buffer.numpy().data[:nbytes])


def packed_folder(checkpoint: Checkpoint, kernels: KernelSet) -> Path:
    """Where the blobs of this checkpoint and these kernels live."""
    digest = hashlib.sha256(f"{FORMAT}|{kernels.key}".encode())
    settings = [checkpoint.folder / name for name in ("config.json", "quantize_config.json")]
    for path in [*sorted(checkpoint.index.files), *(path for path in settings if path.exists())]:
        status = path.stat()
        digest.update(f"|{path.name}|{status.st_size}|{status.st_mtime_ns}".encode())
    return home() / "packed" / f"{checkpoint.folder.resolve().name}-{digest.hexdigest()[:16]}"


def open_store(
    checkpoint: Checkpoint, config: ModelConfig, kernels: KernelSet, progress: Progress = no_progress
) -> PackedStore:
    """The packed blobs of `checkpoint`, written now if they are not there yet.

    A folder may bring its packed layers along (PACKED_FOLDER); those are read where they were made for these kernels.
    Raises PrepareError when the disk is full or a blob is damaged, CheckpointError for an unreadable checkpoint.
    """
    if (beside := packed_beside(checkpoint.folder)) is not None:
        wanted = made_for(FORMAT, kernels.key)
        if beside.made_for == wanted:
            return _read(beside.folder, config, "write the model's folder anew")
        if not any(name.startswith("model.layers.") for name in checkpoint.tensors):
            raise PrepareError(f"{beside.folder}: packed for {beside.made_for}, this run needs {wanted}; write it anew")
    folder = packed_folder(checkpoint, kernels)
    if not _is_there(folder / MANIFEST):
        with locked(folder, progress):
            if not (folder / MANIFEST).exists():
                _write(folder, checkpoint, config, kernels, progress)
    return _read(folder, config, f"remove it with: eesd cache rm {folder.name}")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # taking the lock says what helps
        return False


def _write(folder: Path, checkpoint: Checkpoint, config: ModelConfig, kernels: KernelSet, progress: Progress) -> None:
    require_free(folder, _packed_bytes(checkpoint, kernels), "the packed copy of the layers")
    with atomic_dir(folder) as partial:
        writer = StoreWriter(partial, kernels)
        for index in range(config.num_hidden_layers):
            progress("packing layers for the kernel, layer", index, config.num_hidden_layers)
            tensors, names = layer_tensors(checkpoint, index, kernels)
            layout = lay_out(tensors, names)
            buffer = page_buffer(layout.nbytes)
            fill(layout, buffer, tensors)
            writer.add(layout, buffer)
        writer.finish()


class StoreWriter:
    """Writes layers one by one, and the manifest at the end, into a folder that is published afterwards."""

    def __init__(self, folder: Path, kernels: KernelSet) -> None:
        self._folder, self._kernels = folder, kernels
        self._layouts: list[BlobLayout] = []
        self._checksums: list[int] = []
        folder.mkdir(exist_ok=True)

    def add(self, layout: BlobLayout, buffer: Tensor) -> None:
        """The next layer: `buffer` (uint8) holds it as `layout` says."""
        path = self._folder / f"layer-{len(self._layouts):03d}.bin"
        path.write_bytes(buffer.numpy().data[: layout.nbytes])
        self._layouts.append(layout)
        self._checksums.append(checksum(buffer, layout.nbytes))

    def finish(self) -> None:
        """The manifest: without it the folder does not count."""
        layers = [layout.as_dict() for layout in self._layouts]
        manifest = {"format": FORMAT, "kernels": self._kernels.key, "layers": layers, "crc32": self._checksums}
        (self._folder / MANIFEST).write_text(json.dumps(manifest))


def _packed_bytes(checkpoint: Checkpoint, kernels: KernelSet) -> int:
    """About how many bytes the blobs will take, from the headers alone."""
    total = 0
    itemsize = kernels.dense.dtype.itemsize
    for name, info in checkpoint.tensors.items():
        if ".layers." in name:
            if checkpoint.quantize and checkpoint.has_blocks(name.removesuffix(".weight")):
                # 4 bits, and 32 for every block of 64; without a kernel for them as wide as the dense type
                total += math.prod(info.shape) * (9 if kernels.blocks else 16 * itemsize) // 16
                continue
            total += info.nbytes
            if info.dtype == "U8" and not kernels.blocks:
                total += info.nbytes * (2 * itemsize - 1)
            if name.endswith(".qweight"):
                module = checkpoint.module(name.removesuffix(".qweight"))
                if kernels.int4 is None or module.bits != 4:  # every code becomes a number of the dense type
                    total += module.in_features * module.out_features * kernels.dense.dtype.itemsize - info.nbytes
    return total + total // 4  # the second number of every scale pair, and alignment


def _read(folder: Path, config: ModelConfig, hint: str) -> PackedStore:
    try:
        raw = json.loads((folder / MANIFEST).read_text())
        layouts = tuple(BlobLayout.from_dict(layer) for layer in raw["layers"])
        store = PackedStore(folder, layouts, tuple(int(value) for value in raw["crc32"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrepareError(f"{folder / MANIFEST}: damaged ({error}); {hint}") from None
    if not len(store.layouts) == len(store.checksums) == config.num_hidden_layers:
        raise PrepareError(
            f"{folder}: {len(store.layouts)} packed layers, the model has {config.num_hidden_layers}; {hint}"
        )
    for index, layout in enumerate(store.layouts):
        path = store.path(index)
        if not path.exists():
            raise PrepareError(f"{path}: missing; {hint}")
        size = path.stat().st_size
        if size != layout.nbytes:
            raise PrepareError(f"{path}: {size} bytes, {layout.nbytes} expected; {hint}")
    return store
