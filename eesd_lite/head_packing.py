"""An exit head's weights as one blob in memory: in 16 bits, or rounded to 8 or 4 for a kernel that reads less.

Rounding is to nearest, per group in 4 bits and per output in 8, with the clipping of least squared error. Called when
an engine opens; files of heads stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eesd_lite.draft_weights import DraftWeights
from eesd_lite.layer_blob import BlobLayout, lay_out, page_buffer
from eesd_lite.packing import HEAD_NORMS, MODULES, NORMS, KernelSet
from quant.gptq import GridSettings, round_to_nearest
from quant.kernels import Int4CpuKernel, Kernel
from quant.kernels_int8 import Int8CpuKernel
from quant.matrix import QuantizedMatrix, stack_rows

AFFINE = "affine"
PRODUCTS = (*MODULES, AFFINE)
_ROUND_ROWS = 1024  # rows that are rounded at a time: what is worked on stays in the processor's cache


def rounded_kernels(kernels: KernelSet, bits: int) -> KernelSet:
    """The kernels for weights in so many bits: the first of the set takes rounded matrices (None: dequantized)."""
    if bits == 8:
        return replace(kernels, int4=Int8CpuKernel() if isinstance(kernels.int4, Int4CpuKernel) else None)
    return kernels


def notices(kernels: KernelSet, bits: int) -> tuple[str, ...]:
    """What a user should know of the bits that were asked for."""
    if bits == 16 or rounded_kernels(kernels, bits).int4 is not None:
        return ()
    kind = str(kernels.dense.dtype).removeprefix("torch.")
    return (f"head_bits {bits}: no kernel for that here, so the rounded weights are kept in {kind} and save nothing",)


def rounded(parts: Sequence[Tensor], bits: int, groups: int, bias: Tensor | None = None) -> QuantizedMatrix:
    """Parts [out, in] of one matrix, below each other, rounded to nearest."""
    size = parts[0].shape[1] // groups if groups > 1 else -1
    settings = GridSettings(bits=bits, group_size=size, sym=bits == 8, shrink_steps=8)
    rows = [rows for part in parts for rows in part.split(_ROUND_ROWS)]
    return replace(stack_rows([round_to_nearest(some, settings) for some in rows]), bias=bias)


def pack_rounded(
    parts: Sequence[Tensor], draft: DraftWeights, kernels: KernelSet, bias: Tensor | None = None
) -> tuple[Kernel, dict[str, Tensor]]:
    """The kernel that takes the parts of one matrix in the bits of `draft`, and its tensors.

    `kernels` are from `rounded_kernels`. What none takes is stored dequantized; what cannot be rounded, as it is.
    """
    groups = draft.groups(parts[0].shape[1])
    if draft.bits == 16 or groups is None:
        return kernels.dense, kernels.dense.pack_dense(torch.cat(list(parts)), bias)
    matrix = rounded(parts, draft.bits, groups, bias)
    kernel: Kernel = kernels.dense
    if kernels.int4 is not None and kernels.int4.refuses(matrix) is None:
        kernel = kernels.int4
    return kernel, kernel.pack(matrix)


def head_blob(tensors: Mapping[str, Tensor], draft: DraftWeights, kernels: KernelSet) -> tuple[BlobLayout, Tensor]:
    """The head as one blob, `kernels` from `rounded_kernels`.

    Every tensor is copied to its place and then let go: a head is large, and there is room for one.
    """
    pieces, names = _pieces(tensors, kernels.dense.dtype), {f"{module}.0": kernels.dense.name for module in PRODUCTS}
    if draft.bits != 16:
        pieces, names = _rounded_pieces(pieces, draft, kernels)
    without_bytes = {
        name: torch.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), dtype=dtype, device="meta")
        for name, (parts, dtype) in pieces.items()
    }
    layout = lay_out(without_bytes, names)
    buffer = page_buffer(layout.nbytes)
    for name, view in layout.views(buffer).items():
        parts, _ = pieces.pop(name)
        for part, place in zip(parts, view.split([len(part) for part in parts]), strict=True):
            place.copy_(part)
    return layout, buffer


_Pieces = dict[str, tuple[list[Tensor], torch.dtype]]  # tensors that lie below each other, and their type in the blob


def _pieces(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> _Pieces:
    """The head's tensors under the names that a layer's blob uses; those of fused products lie below each other."""
    pieces: _Pieces = {}
    for module, (block, projections) in MODULES.items():
        names = [f"layer.{block}.{projection}" for projection in projections]
        pieces[f"{module}.0.weight"] = [tensors[f"{name}.weight"] for name in names], dtype
        if any(f"{name}.bias" in tensors for name in names):
            rows = [tensors[f"{name}.weight"].shape[0] for name in names]
            biases = [tensors.get(f"{name}.bias", torch.zeros(n)) for name, n in zip(names, rows, strict=True)]
            pieces[f"{module}.0.bias"] = biases, dtype
    for name in ("weight", "bias"):
        pieces[f"{AFFINE}.0.{name}"] = [tensors[f"{AFFINE}.{name}"]], dtype
    for name, stored_name in (NORMS | HEAD_NORMS).items():
        if f"layer.{stored_name}.weight" in tensors:
            pieces[f"{name}.weight"] = [tensors[f"layer.{stored_name}.weight"]], dtype
    return pieces | {"norm.weight": ([tensors["norm.weight"]], dtype)}


def _rounded_pieces(pieces: _Pieces, draft: DraftWeights, kernels: KernelSet) -> tuple[_Pieces, dict[str, str]]:
    """The same with rounded products, and the kernel of every product."""
    found: _Pieces = {}
    names: dict[str, str] = {}
    for module in PRODUCTS:
        weights, _ = pieces.pop(f"{module}.0.weight")
        biases, _ = pieces.pop(f"{module}.0.bias", ([], None))
        bias = torch.cat([bias.float() for bias in biases]) if biases else None
        kernel, stored = pack_rounded(weights, draft, kernels, bias)
        names[f"{module}.0"] = kernel.name
        found |= {f"{module}.0.{name}": ([tensor], tensor.dtype) for name, tensor in stored.items()}
    return found | pieces, names
