"""Synthetic targets as packed layers alone: what the engine reads, without the checkpoint that it was packed from.

A 70B takes 36 GB so, and not twice that. The folder holds the packed layers for one set of kernels beside embedding,
norms and lm_head; `packed_store.open_store` finds them there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eesd_lite.errors import EesdError
from eesd_lite.home import atomic_dir, require_free
from eesd_lite.layer_blob import BlobLayout, lay_out, page_buffer
from eesd_lite.packed_beside import PACKED_FOLDER
from eesd_lite.packed_store import StoreWriter
from eesd_lite.packing import KernelSet
from eesd_lite.planning import shape_config
from eesd_lite.progress import Progress, no_progress
from eesd_lite.sizing import module_shapes
from eesd_lite.synth import Pieces, SynthSettings, counting, outer_tensors, random_bytes, weight_scale, write_settings
from quant.kernels import KERNEL_GROUPS, DenseKernel, Int4CpuKernel, Int4CudaKernel, Kernel
from quant.tensor_stream import write_folder

_FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


def write_packed(target: Path, settings: SynthSettings, kernels: KernelSet, progress: Progress = no_progress) -> None:
    """A folder that loads without packing; `target` appears whole or not at all. One layer is in memory at a time."""
    outer = outer_tensors(settings.shape)
    layout = packed_layout(settings, kernels)
    layers = settings.shape.num_hidden_layers
    total = sum(tensor.nbytes for tensor in outer) + layers * layout.nbytes
    require_free(target, total, f"the synthetic {settings.shape.name}, packed")
    with atomic_dir(target) as partial:
        written = counting(progress, total)
        write_folder(partial, outer, Pieces(settings, outer).of, written)
        writer = StoreWriter(partial / PACKED_FOLDER, kernels)
        buffer = page_buffer(layout.nbytes)
        views = layout.views(buffer)
        _fill_once(views, settings)
        for index in range(layers):
            random = np.random.Generator(np.random.SFC64([settings.seed, 1 << 20, index]))
            for name, view in views.items():
                if name.endswith(".packed"):
                    view.view(torch.uint8).flatten().numpy()[:] = random_bytes(random, view.nbytes)
            writer.add(layout, buffer)
            written(layout.nbytes)
        writer.finish()
        write_settings(partial, settings, packed_for=kernels.key)


def kernels_of(device: str) -> KernelSet:
    """The kernels that an engine in bfloat16 on `device` would choose; no such device need be there."""
    int4: Kernel = Int4CudaKernel() if device == "cuda" else Int4CpuKernel()
    return KernelSet(int4, DenseKernel(_no_product, torch.bfloat16))


def _no_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise AssertionError("these kernels name a layout, they compute nothing")


def packed_layout(settings: SynthSettings, kernels: KernelSet) -> BlobLayout:
    """What `packing.layer_tensors` would make of a layer of this shape; nothing is allocated."""
    kernel, shape = kernels.int4, settings.shape
    if kernel is None:
        raise EesdError("packed layers are made for an int4 kernel, which this device and dtype do not have")
    sizes, dtype = module_shapes(shape_config(shape)), kernels.dense.dtype
    tensors: dict[str, Tensor] = {}
    for module, names in _FUSED.items():
        out_features, in_features = sum(sizes[name][0] for name in names), sizes[names[0]][1]
        size = in_features if settings.group_size == -1 else settings.group_size
        group = next(group for group in KERNEL_GROUPS if size % group == 0)
        tensors[f"{module}.0.packed"] = _packed(kernel.name, out_features, in_features)
        pairs = (in_features // group, out_features, 2)
        tensors[f"{module}.0.scales_and_zeros"] = torch.empty(pairs, dtype=torch.bfloat16, device="meta")
        if shape.attention_bias and module == "qkv":
            tensors[f"{module}.0.bias"] = torch.empty(out_features, dtype=torch.bfloat16, device="meta")
    for norm in ("input_norm", "post_attention_norm"):
        tensors[f"{norm}.weight"] = torch.empty(shape.hidden_size, dtype=dtype, device="meta")
    return lay_out(tensors, {f"{module}.0": kernel.name for module in _FUSED})


def _packed(kernel: str, out_features: int, in_features: int) -> Tensor:
    """The tensor of codes that torch's conversion for this kernel would return: any bytes are codes."""
    if kernel == "int4-cuda":
        return torch.empty(out_features // 8, in_features // 128, 32, 4, dtype=torch.int32, device="meta")
    return torch.empty(out_features, in_features // 2, dtype=torch.uint8, device="meta")


def _fill_once(views: dict[str, Tensor], settings: SynthSettings) -> None:
    """Scales, biases and norms, the same in every layer; the zero of every pair is 0, a zero point of 8."""
    generator = torch.Generator().manual_seed(settings.seed)
    for name, view in views.items():
        module, _, kind = name.partition(".")
        if kind == "0.scales_and_zeros":
            scale = weight_scale(settings.shape, _FUSED[module][0])
            view[..., 0] = scale * (0.7 + 0.6 * torch.rand(view.shape[:-1], generator=generator))
            view[..., 1] = 0
        elif kind == "0.bias":
            view.copy_(0.1 * torch.randn(view.shape, generator=generator))
        elif kind == "weight":
            view.fill_(1)
