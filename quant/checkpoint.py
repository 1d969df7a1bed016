"""Reader of a model folder: plain tensors, and quantized matrices in exact form, by name.

Tensors are read one at a time and files are closed again, so that memory holds what the caller keeps and nothing else.
What a module is (quantized or 16 bit, group size, act-order) is decided from its tensors; settings only confirm.
Used by `eesd_lite.loader` and `eesd_lite.quantize`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quant.config import read_quant_config
from quant.errors import CheckpointError
from quant.matrix import QuantizedMatrix
from quant.packing import unpack_qweight, unpack_qzeros
from quant.safetensors_index import TensorInfo, index_folder


class Checkpoint:
    """One folder, opened. Raises CheckpointError (one line, with the file) for whatever cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        self.quant_config = read_quant_config(self.folder)
        self.tensors: dict[str, TensorInfo] = index_folder(self.folder)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def is_quantized(self, module: str) -> bool:
        """Whether `module` (such as model.layers.0.mlp.up_proj) is stored as a GPTQ matrix."""
        return f"{module}.qweight" in self.tensors

    def info(self, name: str) -> TensorInfo:
        """Header entry of a tensor; CheckpointError when the folder lacks it."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: tensor '{name}' is missing")
        return self.tensors[name]

    def tensor(self, name: str) -> Tensor:
        """One tensor, as stored."""
        info = self.info(name)
        try:
            with safe_open(info.file, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: tensor '{name}' cannot be read ({error})") from None

    def bias(self, module: str) -> Tensor | None:
        """The bias of a module in float32, or None where there is none or it is all zero (as AutoGPTQ writes it)."""
        if f"{module}.bias" not in self.tensors:
            return None
        bias = self.tensor(f"{module}.bias").to(torch.float32)
        return bias if bool(bias.any()) else None

    def matrix(self, module: str) -> QuantizedMatrix:
        """The quantized matrix of `module`; CheckpointError when its tensors contradict each other."""
        if self.quant_config is None:
            raise CheckpointError(f"{self.folder}: '{module}' is quantized but the folder has no quantization settings")
        bits = self.quant_config.bits
        qweight, scales = self.tensor(f"{module}.qweight"), self.tensor(f"{module}.scales")
        qzeros = self.tensor(f"{module}.qzeros")
        if qweight.dtype != torch.int32 or qweight.dim() != 2 or scales.dim() != 2 or qzeros.dim() != 2:
            raise CheckpointError(
                f"{self.folder}: '{module}' has qweight {qweight.dtype} {tuple(qweight.shape)}, not GPTQ"
            )
        out_features, groups = qweight.shape[1], scales.shape[0]
        g_idx = self._group_index(module, in_features=qweight.shape[0] * 32 // bits, groups=groups)
        in_features = g_idx.shape[0]
        if scales.shape[1] != out_features or qzeros.shape != (groups, -(-out_features * bits // 32)):
            raise CheckpointError(
                f"{self.folder}: '{module}' has qweight {tuple(qweight.shape)}, scales {tuple(scales.shape)} and "
                f"qzeros {tuple(qzeros.shape)}, which do not belong together at {bits} bits"
            )
        return QuantizedMatrix(
            codes=unpack_qweight(qweight, bits, in_features),
            scales=scales.to(torch.float32),
            zeros=unpack_qzeros(qzeros, bits, out_features, self.quant_config.version),
            g_idx=g_idx,
            bits=bits,
            bias=self.bias(module),
        )

    def _group_index(self, module: str, *, in_features: int, groups: int) -> Tensor:
        """`g_idx` as stored, or derived where it is absent and the order is the natural one."""
        name = f"{module}.g_idx"
        if name in self.tensors:
            g_idx = self.tensor(name).to(torch.int64)
            if g_idx.dim() != 1 or not 0 <= in_features - g_idx.shape[0] < 8 or g_idx.numel() == 0:
                raise CheckpointError(
                    f"{self.folder}: '{name}' has shape {tuple(g_idx.shape)}, expected ({in_features},)"
                )
            if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
                raise CheckpointError(f"{self.folder}: '{name}' points at group {int(g_idx.max())} of {groups}")
            return g_idx
        assert self.quant_config is not None
        if self.quant_config.desc_act:
            raise CheckpointError(f"{self.folder}: desc_act is true but '{name}' is missing; the file is incomplete")
        group = self.quant_config.group_size
        if group == -1 or -(-in_features // group) != groups:
            group = -(-in_features // groups)  # the tensors win over the claim
        return torch.arange(in_features) // group

    def dequantized(self, module: str) -> Tensor:
        """The weight of `module` in float32 [out, in], whether it is stored quantized or in 16 bit."""
        if self.is_quantized(module):
            return self.matrix(module).dequantize()
        return self.tensor(f"{module}.weight").to(torch.float32)
