"""torch's int8 product on the CPU: one scale for each output feature, weights as signed bytes.

For matrices that may be rounded freely, such as those that only drafts read; a GPTQ file's 8 bits have a scale for each
group, and stay with the reference path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.kernels import Stored
from quant.matrix import QuantizedMatrix

INT8_COLUMNS = 16  # torch's vector code reads so many weights of a row at a time, and beyond the end of other rows
_MIDDLE = 128  # the zero point of symmetric 8-bit codes


@dataclass(frozen=True)
class Int8CpuKernel:
    """`_weight_int8pack_mm` in bfloat16. Row-invariant as it is (see the tests)."""

    dtype: torch.dtype = torch.bfloat16
    name: str = "int8-cpu"

    @property
    def layout(self) -> str:
        return self.name

    def refuses(self, matrix: QuantizedMatrix) -> str | None:
        """See `quant.kernels.Kernel`."""
        if matrix.bits != 8:
            return f"{matrix.bits} bits, not 8"
        if matrix.scales.shape[0] != 1:
            return f"{matrix.scales.shape[0]} groups, not one"
        if bool((matrix.zeros != _MIDDLE).any()):
            return f"zero points other than {_MIDDLE}"
        if matrix.in_features % INT8_COLUMNS:
            return f"in_features {matrix.in_features} is not a multiple of {INT8_COLUMNS}"
        return None

    def pack(self, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        """See `quant.kernels.Kernel`."""
        signed = matrix.codes.bitwise_xor(_MIDDLE).view(torch.int8)  # code - 128, in 8 bits
        stored = {"signed": signed, "scales": matrix.scales[0].to(self.dtype)}
        return stored if matrix.bias is None else {**stored, "bias": matrix.bias.to(self.dtype)}

    def matmul(self, x: Tensor, stored: Stored) -> Tensor:
        """See `quant.kernels.Product`."""
        out = torch.ops.aten._weight_int8pack_mm(x, stored["signed"], stored["scales"])
        return out if "bias" not in stored else out + stored["bias"]
