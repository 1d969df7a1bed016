"""Products by a matrix in bitsandbytes' 4-bit form (`quant.blocks`), all row-invariant; see docs/quantization.md.

`BnbCpuKernel` is bitsandbytes' AVX512-BF16 product, as it is: rows do not depend on each other (see the tests).
`BnbCudaKernel` pads to a fixed number of rows. `WideningKernel` serves every other processor and shape: a few rows of
the weight at a time are dequantized and go through the engine's own row-invariant product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quant.blocks import PIECE, TABLES, BlockMatrix, bitsandbytes_functional
from quant.kernels import DenseProduct, Product, Stored

CPU_ROWS = 32  # weight rows that bitsandbytes interleaves on the CPU
CUDA_ROWS = 4  # up to so many rows bitsandbytes always takes its own kernel, never a library's choice
WIDENED = 1 << 21  # weights that a WideningKernel holds dequantized: 4 MiB in bfloat16


class BlockKernel(Product, Protocol):
    """A `Product` that is made from a BlockMatrix."""

    def refuses(self, matrix: BlockMatrix) -> str | None:
        """Why this kernel cannot take `matrix`; None if it can."""
        ...

    def pack(self, matrix: BlockMatrix) -> dict[str, Tensor]:
        """The tensors to store."""
        ...


def block_kernels(device: torch.device, dtype: torch.dtype, product: DenseProduct) -> tuple[BlockKernel, ...]:
    """The kernels of one plan in order of preference, for both kinds of table. None in float32: dense is the oracle."""
    if dtype != torch.bfloat16:
        return ()
    found: list[BlockKernel] = []
    for kind in TABLES:
        if device.type == "cuda":
            found.append(BnbCudaKernel(kind))
        elif cpu_product_missing() is None:
            found.append(BnbCpuKernel(kind))
        found.append(WideningKernel(kind, product))
    return tuple(found)


def cpu_product_missing() -> str | None:
    """Why bitsandbytes' own 4-bit product is not available on this CPU; None if it is."""
    functional = bitsandbytes_functional()
    if not getattr(functional, "has_avx512bf16", lambda: False)():
        return "this processor has no AVX512-BF16"
    if not hasattr(functional, "_convert_weight_packed_for_cpu"):
        return "this version of bitsandbytes packs no weights for the CPU"
    from bitsandbytes.backends.cpu import ops

    # With the package `kernels` installed, bitsandbytes downloads another product that nobody has measured here.
    if getattr(ops, "gemm_4bit_forward_kernel", None) is not None:
        return "bitsandbytes took its CPU product from the Hub instead of its own"
    return None


def _version() -> str:
    import bitsandbytes

    return str(bitsandbytes.__version__)


def _reason(matrix: BlockMatrix, kind: str) -> str | None:
    if matrix.kind != kind:
        return f"a {matrix.kind} matrix, not {kind}"
    if not matrix.whole_rows:
        return f"in_features {matrix.in_features} is not a multiple of the block size {matrix.blocksize}"
    # Its dequantization falls back to something slow and less exact there.
    return f"block size {matrix.blocksize} is above 1024" if matrix.blocksize > 1024 else None


def _with_bias(stored: dict[str, Tensor], matrix: BlockMatrix) -> dict[str, Tensor]:
    return stored if matrix.bias is None else {**stored, "bias": matrix.bias.to(torch.bfloat16)}


def _rows_and_scales(matrix: BlockMatrix) -> dict[str, Tensor]:
    """As the checkpoint has them, the codes by rows."""
    shape = (matrix.out_features, matrix.in_features // 2)
    return _with_bias({"packed": matrix.packed.view(shape), "absmax": matrix.absmax}, matrix)


@dataclass(frozen=True)
class BnbCpuKernel:
    """bitsandbytes' bfloat16 product on CPUs with AVX512-BF16; scales are rounded to bfloat16 by its layout."""

    kind: str

    @property
    def name(self) -> str:
        return f"{self.kind}-cpu"

    @property
    def layout(self) -> str:
        return f"{self.name}-bitsandbytes-{_version()}"

    def refuses(self, matrix: BlockMatrix) -> str | None:
        if matrix.out_features % CPU_ROWS:
            return f"out_features {matrix.out_features} is not a multiple of {CPU_ROWS}"
        return _reason(matrix, self.kind)

    def pack(self, matrix: BlockMatrix) -> dict[str, Tensor]:
        functional = bitsandbytes_functional()
        inner = matrix.in_features
        step = max(PIECE // inner // CPU_ROWS, 1) * CPU_ROWS
        packed, scales = [], []
        for first in range(0, matrix.out_features, step):
            rows = min(step, matrix.out_features - first)
            state = functional.QuantState(
                absmax=matrix.absmax[first * inner // matrix.blocksize :][: rows * inner // matrix.blocksize],
                shape=torch.Size((rows, inner)), blocksize=matrix.blocksize, quant_type=matrix.kind,
                dtype=torch.bfloat16,
            )  # fmt: skip
            codes = matrix.packed[first * inner // 2 :][: rows * inner // 2]
            weight, state = functional._convert_weight_packed_for_cpu(codes, state, block_n=CPU_ROWS)
            packed.append(weight)
            scales.append(state.absmax)
        stored = {"packed": torch.cat(packed), "scales": torch.cat(scales, dim=1)}
        return _with_bias({**stored, "table": torch.tensor(TABLES[self.kind])}, matrix)

    def matmul(self, x: Tensor, stored: Stored) -> Tensor:
        packed, scales, inner = stored["packed"], stored["scales"], x.shape[1]
        out = torch.ops.bitsandbytes.gemv_4bit.default(
            x, packed, (packed.shape[0], inner), scales, stored["table"], inner // scales.shape[0]
        )
        return out if "bias" not in stored else out + stored["bias"]


@dataclass(frozen=True)
class WideningKernel:
    """Dequantize to bfloat16, then the engine's `product`, for so many rows of the weight that memory stays small."""

    kind: str
    product: DenseProduct

    @property
    def name(self) -> str:
        return f"{self.kind}-widening"

    @property
    def layout(self) -> str:
        return self.name

    def refuses(self, matrix: BlockMatrix) -> str | None:
        return _reason(matrix, self.kind)

    def pack(self, matrix: BlockMatrix) -> dict[str, Tensor]:
        return _rows_and_scales(matrix)

    def matmul(self, x: Tensor, stored: Stored) -> Tensor:
        packed, absmax, bias = stored["packed"], stored["absmax"], stored.get("bias")
        outer, inner = packed.shape[0], x.shape[1]
        blocks = absmax.numel() // outer
        step = max(WIDENED // inner // 16, 1) * 16
        parts = []
        for first in range(0, outer, step):
            rows = packed[first : first + step]
            weight = torch.ops.bitsandbytes.dequantize_4bit.default(
                rows, absmax[first * blocks :][: len(rows) * blocks], inner // blocks, self.kind,
                (len(rows), inner), torch.bfloat16,
            )  # fmt: skip
            parts.append(self.product(x, weight, None if bias is None else bias[first : first + step]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True)
class BnbCudaKernel:
    """bitsandbytes' product on CUDA; rows are padded to a fixed number, so that one kernel serves any number."""

    kind: str

    @property
    def name(self) -> str:
        return f"{self.kind}-cuda"

    @property
    def layout(self) -> str:
        return self.name

    def refuses(self, matrix: BlockMatrix) -> str | None:
        return _reason(matrix, self.kind)

    def pack(self, matrix: BlockMatrix) -> dict[str, Tensor]:
        return _rows_and_scales(matrix)

    def matmul(self, x: Tensor, stored: Stored) -> Tensor:
        packed, absmax = stored["packed"], stored["absmax"]
        shape = (packed.shape[0], x.shape[1])
        blocksize = math.prod(shape) // absmax.numel()
        rows = x.shape[0]
        padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % CUDA_ROWS))
        parts = [
            torch.ops.bitsandbytes.gemm_4bit.default(
                block.contiguous(), packed.view(-1, 1), shape, absmax, blocksize, self.kind
            )
            for block in padded.split(CUDA_ROWS)
        ]
        out = (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows].contiguous()
        return out if "bias" not in stored else out + stored["bias"]
