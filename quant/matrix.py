"""One quantized matrix in exact form: integer codes, scales, zero points and the group of every input feature.

This is the meeting point of the package: files are read into it (`quant.checkpoint`), the quantizers produce it
(`quant.gptq`), kernels are fed from it (`quant.linear`), and `dequantize` in float32 is the oracle of every fast path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuantizedMatrix:
    """value[o, i] = (codes[o, i] - zeros[g, o]) * scales[g, o] with g = g_idx[i].

    codes: uint8 [out_features, in_features]; scales: float32 [groups, out_features]; zeros: int32 [groups,
    out_features]; g_idx: int64 [in_features]; bias: float32 [out_features] or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    bits: int
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """The exact matrix in float32, [out_features, in_features]."""
        scales = self.scales[self.g_idx].t()
        zeros = self.zeros[self.g_idx].t()
        return (self.codes.to(torch.int32) - zeros).to(torch.float32) * scales


def stack_rows(matrices: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Stack matrices that share `g_idx` along the output features (q/k/v, gate/up)."""
    first = matrices[0]
    assert all(torch.equal(m.g_idx, first.g_idx) and m.bits == first.bits for m in matrices)
    bias = None
    if any(m.bias is not None for m in matrices):
        bias = torch.cat([m.bias if m.bias is not None else torch.zeros(m.out_features) for m in matrices])
    return QuantizedMatrix(
        codes=torch.cat([m.codes for m in matrices]),
        scales=torch.cat([m.scales for m in matrices], dim=1),
        zeros=torch.cat([m.zeros for m in matrices], dim=1),
        g_idx=first.g_idx,
        bits=first.bits,
        bias=bias,
    )
