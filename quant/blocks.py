"""One matrix in bitsandbytes' 4-bit form: codes into a table of 16 numbers, and one scale for every block of weights.

The exact form beside `quant.matrix`: 16-bit checkpoints are quantized into it (`--quantize nf4`), files of bitsandbytes
and transformers are read into it, kernels are fed from it, and `dequantize` in float32 is the oracle of their products.
NF4 is from QLoRA (Dettmers et al., arXiv 2305.14314, appendix E); FP4 is bitsandbytes' own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from quant.block_module import STATE, BlockState, parse_state
from quant.errors import CheckpointError

TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}  # fmt: skip
BLOCKSIZE = 64  # what bitsandbytes and transformers use unless told otherwise
PIECE = 1 << 22  # weights that are widened at a time; a multiple of every block size


@dataclass(frozen=True)
class BlockMatrix:
    """value[o, i] = TABLES[kind][code[o, i]] * absmax[(o * in_features + i) // blocksize].

    packed: uint8 [ceil(out_features * in_features / 2)], row by row, the first of two codes in the high half; absmax:
    float32 [blocks]; bias: float32 [out_features] or None.
    """

    kind: str
    packed: Tensor
    absmax: Tensor
    blocksize: int
    out_features: int
    in_features: int
    bias: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.out_features * self.in_features

    @property
    def whole_rows(self) -> bool:
        """Whether every row is a number of whole blocks, as kernels want."""
        return self.in_features % self.blocksize == 0

    def dequantize(self) -> Tensor:
        """The exact matrix in float32, [out_features, in_features]."""
        table = torch.tensor(TABLES[self.kind])
        out = torch.empty(self.packed.numel() * 2)
        for start in range(0, self.packed.numel(), PIECE // 2):
            bytes_ = self.packed[start : start + PIECE // 2].to(torch.int32)
            codes = torch.stack((bytes_ >> 4, bytes_ & 15), dim=1).view(-1)
            scales = self.absmax[2 * start // self.blocksize :][: -(-codes.numel() // self.blocksize)]
            repeated = scales.repeat_interleave(self.blocksize)[: codes.numel()]
            out[2 * start :][: codes.numel()] = table[codes] * repeated
        return out[: self.numel].view(self.out_features, self.in_features)


def stack_blocks(matrices: list[BlockMatrix]) -> BlockMatrix | None:
    """The matrices along the output features (q/k/v, gate/up) as one; None where their blocks do not allow it."""
    first = matrices[0]
    alike = all(
        (m.kind, m.blocksize, m.in_features) == (first.kind, first.blocksize, first.in_features) for m in matrices
    )
    if not alike or any(m.numel % m.blocksize for m in matrices):
        return None
    bias = None
    if any(m.bias is not None for m in matrices):
        bias = torch.cat([m.bias if m.bias is not None else torch.zeros(m.out_features) for m in matrices])
    return BlockMatrix(
        kind=first.kind,
        packed=torch.cat([m.packed for m in matrices]),
        absmax=torch.cat([m.absmax for m in matrices]),
        blocksize=first.blocksize,
        out_features=sum(m.out_features for m in matrices),
        in_features=first.in_features,
        bias=bias,
    )


def quantize_blocks(weight: Tensor, kind: str, bias: Tensor | None = None) -> BlockMatrix:
    """`weight` [out, in] in any float type, quantized by bitsandbytes, in pieces of whole blocks."""
    functional = bitsandbytes_functional()
    flat = weight.reshape(-1)
    packed, absmax = [], []
    for piece in flat.split(PIECE):
        codes, state = functional.quantize_4bit(piece.to(torch.float32), blocksize=BLOCKSIZE, quant_type=kind)
        packed.append(codes.view(-1))
        absmax.append(state.absmax)
    return BlockMatrix(
        kind=kind,
        packed=torch.cat(packed),
        absmax=torch.cat(absmax),
        blocksize=BLOCKSIZE,
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        bias=bias,
    )


def read_blocks(module: str, stored: Mapping[str, Tensor], bias: Tensor | None = None) -> BlockMatrix:
    """A matrix from a file of bitsandbytes: `stored` has what follows `<module>.weight.`, and `weight` itself.

    Scales that are themselves quantized (double quantization) are multiplied out. The type that the file says to
    compute in is ignored. Raises CheckpointError when the tensors contradict each other.
    """
    names = [name for name in stored if name.startswith(STATE)]
    state = parse_state(module, bytes(stored[names[0]].tolist()) if names else b"")
    kind, blocksize, (out_features, in_features) = state.kind, state.blocksize, state.shape
    packed = stored["weight"].contiguous().view(-1).view(torch.uint8)  # may be stored in words of another type
    absmax = _absmax(module, stored, state)
    codes = out_features * in_features
    if packed.numel() != -(-codes // 2) or absmax.numel() != -(-codes // blocksize):
        raise CheckpointError(
            f"'{module}' has {packed.numel()} bytes of codes and {absmax.numel()} scales, "
            f"which do not make a {kind} matrix of {out_features} x {in_features} in blocks of {blocksize}"
        )
    table = _part(module, stored, "quant_map").to(torch.float32)
    if table.shape != (16,) or not torch.allclose(table, torch.tensor(TABLES[kind]), atol=1e-4):
        raise CheckpointError(f"'{module}.weight.quant_map' is not the table of {kind}")
    return BlockMatrix(kind, packed, absmax, blocksize, out_features, in_features, bias)


def _part(module: str, stored: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in stored:
        raise CheckpointError(f"tensor '{module}.weight.{name}' is missing; the download is incomplete")
    return stored[name]


def _absmax(module: str, stored: Mapping[str, Tensor], state: BlockState) -> Tensor:
    """The scale of every block in float32."""
    absmax = _part(module, stored, "absmax").view(-1)
    if "nested_absmax" in stored and not state.nested:
        raise CheckpointError(f"'{module}.weight' has nested_absmax, but its {STATE}* knows of no scales of scales")
    if not state.nested:
        if not absmax.is_floating_point():
            raise CheckpointError(f"'{module}.weight.absmax' is {absmax.dtype}, scales are floating point")
        return absmax.to(torch.float32)
    outer, table = _part(module, stored, "nested_absmax"), _part(module, stored, "nested_quant_map")
    size = state.nested_blocksize
    if not outer.is_floating_point() or not table.is_floating_point():
        raise CheckpointError(f"'{module}.weight' has scales of scales in {outer.dtype} and {table.dtype}")
    if absmax.dtype != torch.uint8 or table.shape != (256,) or outer.numel() != -(-absmax.numel() // size):
        raise CheckpointError(f"'{module}.weight' has scales of scales that do not belong together")
    repeated = outer.to(torch.float32).view(-1).repeat_interleave(size)[: absmax.numel()]
    return table.to(torch.float32)[absmax.to(torch.int64)] * repeated + state.nested_offset


def bitsandbytes_functional() -> ModuleType:
    """`bitsandbytes.functional`; takes some two seconds, so only where a matrix needs it."""
    # It warns on stderr about an optional package whose kernel we would not take anyway (see kernels_bnb).
    quiet = logging.getLogger("bitsandbytes")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional
    except (ImportError, OSError, RuntimeError) as error:
        raise CheckpointError(f"bitsandbytes, which 4-bit nf4 needs, cannot be loaded here ({error})") from None
    finally:
        quiet.setLevel(level)
    return bitsandbytes.functional
