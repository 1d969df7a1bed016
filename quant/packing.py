"""Packing of b-bit integers into int32 words, as AutoGPTQ, GPTQModel and transformers store them.

`qweight` packs along the input features: word r of a column holds rows r*32/b ... in ascending bits. `qzeros`
packs along the output features in the same manner; version 1 files store the zero point minus one. Codes are handled
here as uint8 [out_features, in_features]. Used by `quant.matrix` (reading) and `quant.writer` (writing).
"""

from __future__ import annotations

import torch
from torch import Tensor

SUPPORTED_BITS = (2, 4, 8)


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Pack uint8 `values` [n, m] along dim 0 into int32 [ceil(n*bits/32), m]; `bits` divides 32."""
    assert bits in SUPPORTED_BITS, bits
    per_word = 32 // bits
    rows, columns = values.shape
    words = -(-rows // per_word)
    padded = torch.zeros(words * per_word, columns, dtype=torch.int64)
    padded[:rows] = values
    shifts = torch.arange(per_word, dtype=torch.int64).view(1, per_word, 1) * bits
    packed = (padded.view(words, per_word, columns) << shifts).sum(dim=1)
    # int64 sums of 32-bit fields do not fit int32 when the top bit is set: wrap by hand.
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 `words` [w, m] along dim 0 into uint8 [count, m]; spare fields of the last word are ignored."""
    assert bits in SUPPORTED_BITS, bits
    per_word = 32 // bits
    fields = torch.empty(words.shape[0], per_word, words.shape[1], dtype=torch.uint8)
    for field in range(per_word):  # one at a time: all at once in int32 would take eight times the memory
        fields[:, field] = (words >> field * bits) & ((1 << bits) - 1)  # the mask drops the sign bits of the shift
    return fields.reshape(words.shape[0] * per_word, words.shape[1])[:count]


def pack_qweight(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [out, in] -> `qweight` int32 [in*bits/32, out]."""
    return pack_words(codes.t(), bits).contiguous()


def unpack_qweight(qweight: Tensor, bits: int, in_features: int) -> Tensor:
    """`qweight` int32 [in*bits/32, out] -> uint8 codes [out, in]."""
    return unpack_words(qweight, bits, in_features).t().contiguous()


def pack_qzeros(zeros: Tensor, bits: int, version: int) -> Tensor:
    """Zero points [groups, out] -> `qzeros` int32 [groups, out*bits/32]; version 1 stores zero - 1."""
    stored = zeros.to(torch.int64) - (1 if version == 1 else 0)
    return pack_words((stored & ((1 << bits) - 1)).t(), bits).t().contiguous()


def unpack_qzeros(qzeros: Tensor, bits: int, out_features: int, version: int) -> Tensor:
    """`qzeros` -> int32 zero points [groups, out].

    Version 1 adds one *after* masking and without wrapping around: a stored 15 means 16 (the classic reading), so a
    field never bleeds into its neighbour.
    """
    zeros = unpack_words(qzeros.t().contiguous(), bits, out_features).t().to(torch.int32)
    return (zeros + 1 if version == 1 else zeros).contiguous()
