"""Old weight files (.bin, .pt): state dicts pickled by torch, read without running anything that is in them.

A pickle is a program. Its opcodes are looked at first, without executing them: names of functions other than those
that rebuild tensors are refused. Then torch loads it with `weights_only=True`, mapped into memory, so that only tensors
that are asked for are read. Used by `quant.folder_index` and `quant.checkpoint`.
"""

from __future__ import annotations

import io
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.errors import CheckpointError, shown
from quant.safetensors_index import MAX_DIMENSIONS, FileScan, TensorInfo, check_regular

MAX_PROGRAM_BYTES = 8 * 2**20  # the pickle itself, without the tensors: some 50,000 of them
_LARGEST_READ = 64 * 2**20
_REBUILDERS = {
    ("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"),
}  # fmt: skip
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.int64: "I64", torch.float64: "F64",
}  # fmt: skip


class _BoundedFile(io.FileIO):
    """A zip directory states its own length; nobody needs one of gigabytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _LARGEST_READ:
            raise zipfile.BadZipFile(f"a directory of {size} bytes")
        return super().read(size)


def scan_pickle(path: Path) -> FileScan:
    """The tensors of one pickled state dict; whatever is wrong becomes a problem."""
    try:
        state = _load(path)
    except CheckpointError as error:
        return FileScan({}, (str(error),), complete=False)
    tensors: dict[str, TensorInfo] = {}
    problems, lost = [], set()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue  # a trainer's counters; what is needed and not there will be missed by name
        fault = _fault(value)
        if fault is None:
            tensors[name] = TensorInfo(name, path, _DTYPES[value.dtype], tuple(value.shape), 0, _nbytes(value))
        else:
            lost.add(name)
            problems.append(f"{path}: tensor '{shown(name)}' {fault}; fetch the file again")
    return FileScan(tensors, tuple(problems), frozenset(lost))


def read_pickled(path: Path, name: str) -> Tensor:
    """One tensor of a file that `scan_pickle` found sound, as a copy in memory of its own."""
    return _load(path, looked_at=True)[name].detach().clone()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _fault(tensor: Tensor) -> str | None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in _DTYPES:
        return f"is of a kind that is not read ({tensor.dtype}, {tensor.layout})"
    if tensor.dim() > MAX_DIMENSIONS or _nbytes(tensor) > tensor.untyped_storage().nbytes():
        return f"of shape {tuple(tensor.shape)[:MAX_DIMENSIONS]} is larger than what is stored of it"
    return None


def _load(path: Path, *, looked_at: bool = False) -> dict[str, Any]:
    """The state dict, mapped; CheckpointError for a pickle with code, a damaged file, or something else altogether.

    `looked_at`: the program has been checked before, and there are a thousand tensors to read.
    """
    size = check_regular(path)
    if not looked_at:
        _check_program(path, size)
    try:
        with warnings.catch_warnings():  # of torch, about what damaged files make it do
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises a dozen classes for damaged files; their texts span many lines
        reason = shown(str(error).split("\n", 1)[0]) or type(error).__name__
        raise CheckpointError(f"{path}: cannot be loaded as weights ({reason}); fetch the file again") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path}: holds no tensors by name; fetch the file again")
    return state


def _check_program(path: Path, size: int) -> None:
    """Refuse, without running it, a pickle that names any function but those that rebuild tensors."""
    try:
        with _BoundedFile(path) as file:
            start = file.read(8)
            if start.startswith(b"version "):
                raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; fetch the real file (git lfs pull)")
            if not start.startswith(b"PK"):
                raise CheckpointError(
                    f"{path}: not a file of torch 1.6 or later, or an incomplete download ({size} bytes); "
                    "fetch it again, or convert the model to safetensors where it came from"
                )
            file.seek(0)
            program = _program(zipfile.ZipFile(file), size)
        functions = _functions(program)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile and pickletools raise whatever damaged bytes lead to
        raise CheckpointError(f"{path}: damaged or an incomplete download ({shown(error)}); fetch it again") from None
    foreign = sorted(name for name in functions if not _harmless(name))
    if foreign:
        raise CheckpointError(
            f"{path}: a pickle that would run '{shown(foreign[0])}' when loaded; not loaded. "
            "Take the safetensors version of the model"
        )


def _program(archive: zipfile.ZipFile, size: int) -> bytes:
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size for entry in entries):
        raise zipfile.BadZipFile("compressed entries")
    programs = [entry for entry in entries if entry.filename.endswith("data.pkl")]
    if len(programs) != 1 or programs[0].file_size > MAX_PROGRAM_BYTES:
        raise zipfile.BadZipFile(f"{len(programs)} pickles")
    return archive.read(programs[0])


def _functions(program: bytes) -> set[str]:
    """Every name of the form "module name" that the pickle would look up."""
    found: set[str] = set()
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in ("GLOBAL", "INST"):
            found.add(str(argument))
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            found.add(opcode.name)  # names made at run time: torch never writes these
    return found


def _harmless(name: str) -> bool:
    module, _, attribute = name.partition(" ")
    if (module, attribute) in _REBUILDERS:
        return True
    return module in ("torch", "torch.storage") and (
        attribute.endswith("Storage")
        or hasattr(torch, attribute)
        and isinstance(getattr(torch, attribute), torch.dtype)
    )
