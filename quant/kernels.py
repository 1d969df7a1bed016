"""Interchangeable ways to multiply by one stored matrix, all row-invariant.

A kernel is a stateless value: `refuses` says why it cannot take a matrix (None if it can), `pack` turns the exact
matrix into the tensors that are stored, `matmul` multiplies by them. `Int4CpuKernel` and `Int4CudaKernel` are torch's
own int4 products; `DenseKernel` stores the dequantized matrix: for 16-bit modules and odd shapes, and as the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quant.matrix import QuantizedMatrix

KERNEL_GROUPS = (256, 128, 64, 32)  # group sizes of torch's int4 products
PACK_ROWS = 1024  # weight rows that are widened at a time; a multiple of every block (16 to 64) that torch interleaves
CUDA_ROWS = 8  # CUDA products always see this many rows, so that one shape of launch serves any number of them

Stored = Mapping[str, Tensor]
DenseProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # (x, weight, bias) -> x @ weight.T + bias


class Product(Protocol):
    """How stored tensors are multiplied. `x` is [rows, in_features] in the compute dtype, contiguous."""

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> str:
        """Names everything that decides the bytes that `pack` makes: stored bytes of another layout are of no use."""
        ...

    def matmul(self, x: Tensor, stored: Stored) -> Tensor:
        """[rows, out_features] in the compute dtype; a row's bits do not depend on how many rows share the call."""
        ...


class Kernel(Product, Protocol):
    """A `Product` that is made from a GPTQ matrix."""

    def refuses(self, matrix: QuantizedMatrix) -> str | None:
        """Why this kernel cannot take `matrix`; None if it can."""
        ...

    def pack(self, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        """The tensors to store."""
        ...


def kernel_order(matrix: QuantizedMatrix) -> tuple[Tensor | None, int] | str:
    """(permutation of the input features or None, kernel group size), or the reason why there is none.

    Act-order becomes a permutation that makes groups contiguous; a group longer than any kernel group (such as -1, one
    group for all) becomes several kernel groups with repeated scales.
    """
    g_idx, in_features = matrix.g_idx, matrix.in_features
    natural = bool((g_idx[1:] >= g_idx[:-1]).all())
    order = None if natural else torch.argsort(g_idx, stable=True)
    counts = torch.bincount(g_idx, minlength=matrix.scales.shape[0])
    size = int(counts[0])
    if not bool((counts == size).all()):
        return f"groups of unequal length ({int(counts.min())} to {int(counts.max())})"
    for group in KERNEL_GROUPS:
        if size % group == 0 and in_features % group == 0:
            return order, group
    return f"group size {size} has no kernel group (32, 64, 128 or 256) that divides it"


def scales_and_zeros(matrix: QuantizedMatrix, group: int, dtype: torch.dtype) -> Tensor:
    """[in_features / group, out_features, 2]: torch computes (code - 8) * scale + zero, so zero = (8 - z) * scale."""
    repeat = matrix.in_features // matrix.scales.shape[0] // group
    scales = matrix.scales.to(dtype).to(torch.float32)
    zeros = (8 - matrix.zeros).to(torch.float32) * scales
    both = torch.stack((scales, zeros), dim=-1).to(dtype)
    return both.repeat_interleave(repeat, dim=0).contiguous()


def _int4_reason(matrix: QuantizedMatrix, multiple: int) -> str | None:
    if matrix.bits != 4:
        return f"{matrix.bits} bits, not 4"
    if matrix.out_features % multiple:
        return f"out_features {matrix.out_features} is not a multiple of {multiple}"
    order = kernel_order(matrix)
    return order if isinstance(order, str) else None


def _pack_common(matrix: QuantizedMatrix, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes in kernel order, and everything but the packed weight itself."""
    found = kernel_order(matrix)
    assert not isinstance(found, str), found
    order, group = found
    stored = {"scales_and_zeros": scales_and_zeros(matrix, group, dtype)}
    codes = matrix.codes
    if order is not None:
        codes = codes[:, order]
        stored["perm"] = order.to(torch.int32)
    if matrix.bias is not None:
        stored["bias"] = matrix.bias.to(dtype)
    return codes, stored


def _int4_input(x: Tensor, stored: Stored) -> Tensor:
    return x if "perm" not in stored else x.index_select(1, stored["perm"])


@dataclass(frozen=True)
class Int4CpuKernel:
    """`_weight_int4pack_mm_for_cpu`; bfloat16 is its fast type. Row-invariant as it is (see the tests)."""

    dtype: torch.dtype = torch.bfloat16
    name: str = "int4-cpu"

    @property
    def layout(self) -> str:
        # torch interleaves differently for AVX2, AVX-512 and neither: a cache folder may outlive a processor.
        return f"{self.name}-{torch.backends.cpu.get_cpu_capability()}-torch-{torch.__version__}"

    def refuses(self, matrix: QuantizedMatrix) -> str | None:
        return _int4_reason(matrix, 16)

    def pack(self, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        codes, stored = _pack_common(matrix, self.dtype)
        packed = [
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.to(torch.int32).contiguous(), 1)
            for rows in codes.split(PACK_ROWS)
        ]
        return {"packed": torch.cat(packed), **stored}

    def matmul(self, x: Tensor, stored: Stored) -> Tensor:
        scales = stored["scales_and_zeros"]
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(
            _int4_input(x, stored), stored["packed"], x.shape[1] // scales.shape[0], scales
        )
        return out if "bias" not in stored else out + stored["bias"]


@dataclass(frozen=True)
class Int4CudaKernel:
    """`_weight_int4pack_mm`, compute capability 8.0 and later; rows are padded to a fixed number for row-invariance."""

    dtype: torch.dtype = torch.bfloat16
    name: str = "int4-cuda"
    inner_k_tiles: int = 8

    @property
    def layout(self) -> str:
        return f"{self.name}-{self.inner_k_tiles}-torch-{torch.__version__}"

    def refuses(self, matrix: QuantizedMatrix) -> str | None:
        if matrix.in_features % (16 * self.inner_k_tiles):
            return f"in_features {matrix.in_features} is not a multiple of {16 * self.inner_k_tiles}"
        return _int4_reason(matrix, 8)

    def pack(self, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        codes, stored = _pack_common(matrix, self.dtype)
        pairs = codes.cuda()
        bytes_ = (pairs[:, ::2] << 4 | pairs[:, 1::2]).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack(bytes_, self.inner_k_tiles)
        return {"packed": packed, **{name: tensor.cuda() for name, tensor in stored.items()}}

    def matmul(self, x: Tensor, stored: Stored) -> Tensor:
        scales = stored["scales_and_zeros"]
        inputs = _int4_input(x, stored)
        rows = inputs.shape[0]
        padded = torch.nn.functional.pad(inputs, (0, 0, 0, -rows % CUDA_ROWS))
        group = x.shape[1] // scales.shape[0]
        parts = [
            torch.ops.aten._weight_int4pack_mm(block.contiguous(), stored["packed"], group, scales)
            for block in padded.split(CUDA_ROWS)
        ]
        out = (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows].contiguous()
        return out if "bias" not in stored else out + stored["bias"]


@dataclass(frozen=True)
class DenseKernel:
    """The dequantized matrix in `dtype`, multiplied by a row-invariant `product` that the engine supplies."""

    product: DenseProduct
    dtype: torch.dtype = torch.float32
    name: str = "dense"

    @property
    def layout(self) -> str:
        return f"{self.name}-{self.dtype}"

    def refuses(self, matrix: QuantizedMatrix) -> str | None:
        return None

    def pack(self, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        return self.pack_dense(matrix.dequantize(), matrix.bias)

    def pack_dense(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """The same for a module that was never quantized; `weight` [out, in]."""
        stored = {"weight": weight.to(self.dtype).contiguous()}
        return stored if bias is None else {**stored, "bias": bias.to(self.dtype)}

    def matmul(self, x: Tensor, stored: Stored) -> Tensor:
        return self.product(x, stored["weight"], stored.get("bias"))
