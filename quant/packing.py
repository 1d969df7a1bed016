"""Packing of b-bit integers into int32 words, as AutoGPTQ, GPTQModel and transformers store them.

`qweight` packs along the input features: word r of a column holds rows r*32/b ... in ascending bits. `qzeros`
packs along the output features in the same manner; version 1 files store the zero point minus one. Fields lie one after
the other from the lowest bit up, across words where the width does not divide 32. Codes are handled here as uint8
[out_features, in_features]. Used by `quant.checkpoint` (reading) and `quant.writer` (writing).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SUPPORTED_BITS = (2, 3, 4, 8)


def _cycle(bits: int) -> tuple[int, int]:
    """(words, fields) after which the pattern repeats: 3-bit fields straddle words, 32 of them fill three."""
    assert bits in SUPPORTED_BITS, bits
    shared = math.gcd(bits, 32)
    return bits // shared, 32 // shared


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Pack uint8 `values` [n, m] along dim 0 into int32 [ceil(n*bits/32), m], low bits first."""
    words, fields = _cycle(bits)
    rows, columns = values.shape
    cycles = -(-rows // fields)
    padded = torch.zeros(cycles * fields, columns, dtype=torch.int64)
    padded[:rows] = values
    padded = padded.view(cycles, fields, columns)
    packed = torch.zeros(cycles, words, columns, dtype=torch.int64)
    for field in range(fields):
        word, shift = divmod(field * bits, 32)
        packed[:, word] |= (padded[:, field] << shift) & 0xFFFFFFFF
        if shift + bits > 32:  # the rest of a field that straddles
            packed[:, word + 1] |= padded[:, field] >> (32 - shift)
    # Fields with the top bit set do not fit int32: wrap by hand.
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed.view(cycles * words, columns)[: -(-rows * bits // 32)]


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 `words` [w, m] along dim 0 into uint8 [count, m]; spare fields of the last word are ignored."""
    per_cycle, fields = _cycle(bits)
    cycles = -(-words.shape[0] // per_cycle)
    short = cycles * per_cycle - words.shape[0]
    if short:  # a last cycle that is cut: its missing words hold no field that is asked for
        words = torch.nn.functional.pad(words, (0, 0, 0, short))
    words = words.reshape(cycles, per_cycle, -1)
    mask = (1 << bits) - 1
    out = torch.empty(cycles, fields, words.shape[2], dtype=torch.uint8)
    for field in range(fields):  # one at a time: all at once in int32 would take eight times the memory
        word, shift = divmod(field * bits, 32)
        value = words[:, word] >> shift  # the shift copies the sign bit: masked away, or below a straddling rest
        if shift + bits > 32:
            low = 32 - shift
            value = (value & ((1 << low) - 1)) | (words[:, word + 1] << low)
        out[:, field] = value & mask
    return out.reshape(cycles * fields, words.shape[2])[:count]


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


def add_one_to_words(qzeros: Tensor, bits: int) -> Tensor:
    """Version 1 `qzeros` of a writer that took one off whole words, as version 2: carries undo what it borrowed.

    Three bits do not fill a word; there fields are taken one by one and wrap around.
    """
    if bits == 3:
        fields = unpack_words(qzeros.t().contiguous(), bits, qzeros.shape[1] * 32 // bits)
        return pack_words((fields + 1) & 7, bits).t().contiguous()
    return qzeros + sum(1 << shift for shift in range(0, 32, bits))  # int32 wraps, as it did for the writer
