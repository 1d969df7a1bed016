"""Two questions that headers leave open, answered from one small tensor each, without torch.

Whether g_idx is a real act-order, and in which version zero points are stored (see `quant.zero_points`, which decides
when a model is loaded). Used by `eesd inspect`. Standard library only.
"""

from __future__ import annotations

import sys
from array import array

from quant.model_folder import ModelFolder
from quant.safetensors_index import TensorInfo

_LARGEST = 16 * 2**20  # nothing small is larger than this


def read_bytes(info: TensorInfo) -> bytes | None:
    """The bytes of a small tensor in a safetensors file; None for a large one, a pickle, or a file that fails."""
    if info.nbytes > _LARGEST or info.file.suffix != ".safetensors":
        return None
    try:
        with info.file.open("rb") as file:
            file.seek(info.begin)
            data = file.read(info.nbytes)
    except OSError:
        return None
    return data if len(data) == info.nbytes else None


def order_of(folder: ModelFolder, module: str) -> bool | None:
    """Whether the stored g_idx of a module is out of natural order; None where that cannot be read."""
    info = folder.tensors.get(f"{module}.g_idx")
    data = read_bytes(info) if info is not None else None
    if info is None or data is None or info.dtype not in ("I32", "I64"):
        return None
    numbers = array("i" if info.dtype == "I32" else "q", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return any(later < earlier for earlier, later in zip(numbers, numbers[1:], strict=False))


def zero_version_of(folder: ModelFolder, module: str) -> int | None:
    """1 or 2 where every stored zero point of a module is the middle of the grid in that version; else None."""
    header = folder.module(module)
    info = folder.tensors[f"{module}.qzeros"]
    data = read_bytes(info)
    used_bits = header.out_features * header.bits
    if data is None or used_bits % 8:
        return None
    stride = info.shape[1] * 4
    rows = [data[start : start + used_bits // 8] for start in range(0, len(data), stride)]  # behind that is padding
    for version in (1, 2):
        middle = (1 << (header.bits - 1)) - (1 if version == 1 else 0)
        pattern = _repeated(middle, header.bits)
        expected = (pattern * (used_bits // 8 // len(pattern) + 1))[: used_bits // 8]
        if rows and all(row == expected for row in rows):
            return version
    return None


def _repeated(value: int, bits: int) -> bytes:
    """The shortest whole bytes that hold nothing but `value` in fields of `bits`, low bits first."""
    count = 8 if bits == 3 else 8 // bits
    return sum(value << (bits * place) for place in range(count)).to_bytes(bits * count // 8, "little")
