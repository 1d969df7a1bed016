"""From checkpoint to blob: choose a kernel for every module of a layer, fuse what may be fused, pack it.

q/k/v and gate/up become one product each when they share the input order (act-order permutations must agree) and the
kernel; otherwise their parts stay apart and their outputs are joined. Used by `eesd_lite.packed_store`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_lite.layer_shapes import layer_prefix
from quant.blocks import BlockMatrix, stack_blocks
from quant.checkpoint import Checkpoint
from quant.errors import CheckpointError
from quant.kernels import DenseKernel, Kernel, Product
from quant.kernels_bnb import BlockKernel
from quant.matrix import QuantizedMatrix, stack_rows

# Module of the blob -> (block in the checkpoint, projections whose outputs are joined in this order).
MODULES = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "o": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}
NORMS = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}  # only some families have them


@dataclass(frozen=True)
class KernelSet:
    """The kernels of one plan: `int4` where it applies (None: nowhere), `dense` for everything else.

    `blocks` are for matrices in bitsandbytes' form, in order of preference; `quantize` is the kind of table that 16-bit
    matrices are quantized to as they are packed.
    """

    int4: Kernel | None
    dense: DenseKernel
    blocks: tuple[BlockKernel, ...] = ()
    quantize: str | None = None

    def by_name(self, name: str) -> Product:
        """The kernel that a stored layout names."""
        for kernel in (self.int4, self.dense, *self.blocks):
            if kernel is not None and kernel.name == name:
                return kernel
        raise CheckpointError(f"a packed layer needs kernel '{name}', which this run does not have")

    @property
    def key(self) -> str:
        """Names everything that decides the packed bytes."""
        int4 = self.int4.layout if self.int4 else "none"
        quantized = [f"quantized-{self.quantize}"] if self.quantize else []
        return "+".join([int4, self.dense.layout, *(kernel.layout for kernel in self.blocks), *quantized])


def layer_tensors(checkpoint: Checkpoint, index: int, kernels: KernelSet) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of decoder layer `index` as they are stored, `module.part.tensor`, and the kernel of every part."""
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for module, (block, projections) in MODULES.items():
        prefix = f"{layer_prefix(index)}.{block}"
        parts = _parts(checkpoint, [f"{prefix}.{projection}" for projection in projections], kernels)
        for number, (kernel, stored) in enumerate(parts):
            names[f"{module}.{number}"] = kernel.name
            tensors.update({f"{module}.{number}.{name}": tensor for name, tensor in stored.items()})
    for name, stored_name in (NORMS | HEAD_NORMS).items():
        place = f"{layer_prefix(index)}.{stored_name}.weight"
        if name in NORMS or place in checkpoint:
            tensors[f"{name}.weight"] = checkpoint.tensor(place).to(kernels.dense.dtype)
    return tensors, names


def _parts(checkpoint: Checkpoint, modules: list[str], kernels: KernelSet) -> list[tuple[Product, dict[str, Tensor]]]:
    """One fused part where possible, else one part for each module."""
    if all(checkpoint.has_blocks(module) for module in modules):
        blocks = [checkpoint.blocks(module) for module in modules]
        stacked = stack_blocks(blocks) if len(blocks) > 1 else blocks[0]
        return [_pack_blocks(matrix, kernels) for matrix in ([stacked] if stacked is not None else blocks)]
    if not all(checkpoint.is_quantized(module) for module in modules):
        return [_pack_any(checkpoint, module, kernels) for module in modules]
    matrices = [checkpoint.matrix(module) for module in modules]
    first = matrices[0]
    fusable = all(m.bits == first.bits and torch.equal(m.g_idx, first.g_idx) for m in matrices)
    if len(matrices) > 1 and not fusable:
        return [_pack_matrix(matrix, kernels) for matrix in matrices]
    return [_pack_matrix(stack_rows(matrices), kernels)]


def _pack_any(checkpoint: Checkpoint, module: str, kernels: KernelSet) -> tuple[Product, dict[str, Tensor]]:
    if checkpoint.is_quantized(module):
        return _pack_matrix(checkpoint.matrix(module), kernels)
    if checkpoint.has_blocks(module):
        return _pack_blocks(checkpoint.blocks(module), kernels)
    weight = checkpoint.tensor(f"{module}.weight")
    return kernels.dense, kernels.dense.pack_dense(weight, checkpoint.bias(module))


def _pack_matrix(matrix: QuantizedMatrix, kernels: KernelSet) -> tuple[Product, dict[str, Tensor]]:
    kernel: Kernel = kernels.dense
    if kernels.int4 is not None and kernels.int4.refuses(matrix) is None:
        kernel = kernels.int4
    return kernel, kernel.pack(matrix)


def _pack_blocks(matrix: BlockMatrix, kernels: KernelSet) -> tuple[Product, dict[str, Tensor]]:
    for kernel in kernels.blocks:
        if kernel.refuses(matrix) is None:
            return kernel, kernel.pack(matrix)
    return kernels.dense, kernels.dense.pack_dense(matrix.dequantize(), matrix.bias)
