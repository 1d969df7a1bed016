"""Reader of a model folder: plain tensors, and quantized matrices in exact form, by name.

Tensors are read one at a time and files are closed again, so that memory holds what the caller keeps and nothing else.
What a module is (quantized or 16 bit, bits, group size, act-order) is decided from its tensors; settings only confirm.
Used by `eesd_lite.loader` and `eesd_lite.quantize`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quant.block_module import KINDS, STATE
from quant.blocks import BlockMatrix, quantize_blocks, read_blocks
from quant.errors import CheckpointError, shown
from quant.folder_index import PICKLES
from quant.gptq_module import GPTQModule
from quant.matrix import QuantizedMatrix
from quant.model_folder import ModelFolder
from quant.packing import add_one_to_words, unpack_qweight, unpack_qzeros
from quant.zero_points import decide_version, detected_version


class Checkpoint(ModelFolder):
    """An open folder whose tensors can be read. CheckpointError for a tensor that cannot.

    With `quantize` (nf4 or fp4) the 16-bit matrices of the decoder layers are quantized as they are read.
    """

    def __init__(
        self, folder: Path, weights: str | None = None, *, tolerant: bool = False, quantize: str | None = None
    ) -> None:
        super().__init__(folder, weights, tolerant=tolerant)
        self.quantize = quantize
        if quantize is not None and quantize not in KINDS:
            raise CheckpointError(f"quantize must be {' or '.join(KINDS)}, not '{quantize}'")
        quantized = self.quant_config is not None or any(
            name.endswith(".qweight") or f".{STATE}" in name for name in self.tensors
        )
        if quantize is not None and quantized:
            raise CheckpointError(
                f"{self.folder}: quantized already; leave out --quantize, it is for 16-bit checkpoints"
            )

    def tensor(self, name: str) -> Tensor:
        """One tensor, as stored."""
        info = self.info(name)
        if info.file.suffix in PICKLES:
            from quant.pickle_file import read_pickled

            return read_pickled(info.file, name)
        try:
            with safe_open(info.file, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: tensor '{shown(name)}' cannot be read ({shown(error)})") from None

    def has_blocks(self, module: str) -> bool:
        """Whether `module` is a matrix in bitsandbytes' 4-bit form, stored so or to be quantized as it is read."""
        if self.quantize is None:
            return self.stored_blocks(module) is not None
        weight = self.tensors.get(f"{module}.weight")
        return weight is not None and ".layers." in module and len(weight.shape) == 2

    @property
    def any_blocks(self) -> bool:
        """Whether some module is."""
        return self.quantize is not None or any(f".{STATE}" in name for name in self.tensors)

    def blocks(self, module: str) -> BlockMatrix:
        """The matrix of a module that `has_blocks`; CheckpointError when its tensors contradict each other."""
        if self.quantize is not None:
            return quantize_blocks(self.tensor(f"{module}.weight"), self.quantize, self.bias(module))
        prefix = f"{module}.weight."
        stored = {name.removeprefix(prefix): self.tensor(name) for name in self.tensors if name.startswith(prefix)}
        stored["weight"] = self.tensor(f"{module}.weight")
        try:
            return read_blocks(module, stored, self.bias(module))
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {error}") from None

    def bias(self, module: str) -> Tensor | None:
        """The bias of a module in float32, or None where there is none or it is all zero (as AutoGPTQ writes it)."""
        if f"{module}.bias" not in self.tensors:
            return None
        bias = self.tensor(f"{module}.bias").to(torch.float32)
        return bias if bool(bias.any()) else None

    def matrix(self, module: str) -> QuantizedMatrix:
        """The quantized matrix of `module`; CheckpointError when its tensors contradict each other."""
        header = self.module(module)
        zeros, _ = self.zero_points(header)
        return QuantizedMatrix(
            codes=unpack_qweight(self.tensor(f"{module}.qweight"), header.bits, header.in_features),
            scales=self.tensor(f"{module}.scales").to(torch.float32),
            zeros=zeros,
            g_idx=self._group_index(header),
            bits=header.bits,
            bias=self.bias(module),
        )

    def zero_points(self, header: GPTQModule) -> tuple[Tensor, str | None]:
        """(int32 [groups, out], what to say where the claim about them is wrong). See `quant.zero_points`."""
        assert self.quant_config is not None
        stored = self.stored_zeros(header)
        version, note = decide_version(stored, header.bits, self.quant_config)
        if version == 1 and self.quant_config.whole_words:
            words = add_one_to_words(self.tensor(f"{header.name}.qzeros"), header.bits)
            return unpack_qzeros(words, header.bits, header.out_features, version=2), note
        return stored + 1 if version == 1 else stored, note

    def stored_zeros(self, header: GPTQModule) -> Tensor:
        """The fields of `qzeros` as they are stored, int32 [groups, out]: version 2's reading."""
        return unpack_qzeros(self.tensor(f"{header.name}.qzeros"), header.bits, header.out_features, version=2)

    def _group_index(self, header: GPTQModule) -> Tensor:
        """`g_idx` as stored, or the natural order where it is absent."""
        name = f"{header.name}.g_idx"
        size = header.in_features if header.group_size == -1 else header.group_size
        natural = torch.arange(header.in_features) // size
        if not header.has_g_idx:
            return natural
        g_idx = self.tensor(name).to(torch.int64)
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= header.groups:
            raise CheckpointError(
                f"{self.folder}: '{shown(name)}' points at group {int(g_idx.max())} of {header.groups} "
                f"(lowest {int(g_idx.min())})"
            )
        if header.groups == 1 or bool(g_idx.any()):
            return g_idx
        # All zeros beside scales of several groups: some early files without act-order left g_idx empty.
        if self.quant_config is not None and self.quant_config.desc_act:
            raise CheckpointError(
                f"{self.folder}: desc_act is true but '{shown(name)}' is empty; the file is incomplete"
            )
        return natural

    def dequantized(self, module: str) -> Tensor:
        """The weight of `module` in float32 [out, in], whether it is stored quantized or in 16 bit."""
        if self.has_blocks(module):
            return self.blocks(module).dequantize()
        if self.is_quantized(module):
            return self.matrix(module).dequantize()
        return self.tensor(f"{module}.weight").to(torch.float32)

    def zero_version(self) -> tuple[int | None, str | None]:
        """(version of the zero points that the data show, what to say where the settings claim another).

        From the first quantized module, of which one small tensor is read; None where there is none or its data prove
        nothing (asymmetric grids).
        """
        name = next((name.removesuffix(".qweight") for name in self.tensors if name.endswith(".qweight")), None)
        if name is None:
            return None, None
        header = self.module(name)
        assert self.quant_config is not None
        stored = self.stored_zeros(header)
        return detected_version(stored, header.bits), decide_version(stored, header.bits, self.quant_config)[1]
