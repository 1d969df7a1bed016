"""Matrices in bitsandbytes' 4-bit form as far as headers tell, and the small description that each of them carries.

transformers stores a matrix as `<module>.weight` (bytes of codes) with `<module>.weight.absmax`, `.quant_map`,
`.quant_state.bitsandbytes__nf4` and, for doubly quantized scales, `.nested_absmax` and `.nested_quant_map`. The shape
is in a JSON text inside `quant_state`. Used by `quant.blocks`, the pre-flight check and `quant.survey`; standard
library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quant.errors import CheckpointError, shown
from quant.safetensors_index import TensorInfo

KINDS = ("nf4", "fp4")
STATE = "quant_state.bitsandbytes__"
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_BYTES = 1 << 16  # of a description; real ones have some 150
_INSTEAD = "take a 4-bit one, or the 16-bit model with --quantize nf4"


@dataclass(frozen=True)
class BlockState:
    """What a description says. `nested`: scales are doubly quantized, and the other two are theirs."""

    kind: str
    shape: tuple[int, int]  # (out_features, in_features)
    blocksize: int
    nested: bool = False
    nested_blocksize: int = 256
    nested_offset: float = 0.0


def stored_kind(tensors: Mapping[str, Any], module: str) -> str | None:
    """nf4 or fp4 where `module` is stored in this form, else None."""
    return next((kind for kind in KINDS if f"{module}.weight.{STATE}{kind}" in tensors), None)


def owner(tensors: Mapping[str, Any], name: str) -> str | None:
    """The module in this form whose `weight` the tensor `name` describes, else None."""
    module, inner, _ = name.partition(".weight.")
    return module if inner and stored_kind(tensors, module) is not None else None


def refuse_eight_bit(folder: object, settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """CheckpointError for a folder whose settings or tensors are those of bitsandbytes' 8-bit form."""
    claimed = settings.get("load_in_8bit") is True or settings.get("_load_in_8bit") is True
    scales = next((name for name in tensors if name.endswith(".SCB")), None)
    if claimed or scales is not None:
        sign = f" ('{shown(scales)}')" if scales is not None else ""
        raise CheckpointError(f"{folder}: an 8-bit bitsandbytes checkpoint{sign} is not supported; {_INSTEAD}")


def parse_state(module: str, text: bytes) -> BlockState:
    """The description of `module`; CheckpointError for what bitsandbytes does not write."""
    try:
        raw = json.loads(text)
        out_features, in_features = raw["shape"]
        state = BlockState(
            kind=raw["quant_type"],
            shape=(out_features, in_features),
            blocksize=raw["blocksize"],
            nested="nested_blocksize" in raw,
            nested_blocksize=raw.get("nested_blocksize", 256),
            nested_offset=float(raw.get("nested_offset", 0.0)),
        )
        whole = (*state.shape, state.blocksize, state.nested_blocksize)
        if not all(type(number) is int and 0 < number < 1 << 31 for number in whole):
            raise ValueError("a size that is not a positive whole number")
        if state.blocksize not in BLOCKSIZES or state.kind not in KINDS:
            raise ValueError("a block size or type that bitsandbytes does not write")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"'{shown(module)}.weight.{STATE}*' is damaged ({shown(error)}); fetch the file again"
        ) from None
    return state


def block_state(tensors: Mapping[str, TensorInfo], module: str) -> BlockState:
    """The description of `module`, read from its file without any other tensor."""
    info = tensors[f"{module}.weight.{STATE}{stored_kind(tensors, module)}"]
    if info.file.suffix != ".safetensors" or info.nbytes > _MOST_BYTES:
        raise CheckpointError(f"'{shown(module)}' has no readable {STATE}*; 4-bit files are read from .safetensors")
    try:
        with info.file.open("rb") as file:
            file.seek(info.begin)
            return parse_state(module, file.read(info.nbytes))
    except OSError as error:
        raise CheckpointError(f"{info.file}: {error.strerror or error}") from None
