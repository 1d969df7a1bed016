"""A GPTQ packer of its own, in numpy, bit by bit: what our reader is checked against.

It shares no code with `quant`. A matrix is drawn as integer codes, so that its exact value is known: `dequantized`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


def pack_bits(values: Array, bits: int, *, junk: int = 0) -> Array:
    """Values [n, m] below 2**bits -> int32 [ceil(n * bits / 32), m], low bits first; spare bits come from `junk`."""
    count, columns = values.shape
    words = -(-count * bits // 32)
    out = np.zeros((words, columns), dtype=np.uint64)
    for i in range(words * 32 // bits):
        field = values[i].astype(np.uint64) if i < count else np.full(columns, junk % 2**bits, dtype=np.uint64)
        word, shift = divmod(i * bits, 32)
        out[word] |= (field << np.uint64(shift)) & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:  # three bits straddle words
            out[word + 1] |= field >> np.uint64(32 - shift)
    return out.astype(np.uint32).view(np.int32)


@dataclass(frozen=True)
class Drawn:
    """One random matrix: the tensors of a checkpoint and its exact value."""

    tensors: dict[str, Array]  # qweight, qzeros, scales, g_idx
    codes: Array  # [out, in]
    zeros: Array  # [groups, out]
    dequantized: Array  # float32 [out, in]


def draw(
    rng: np.random.Generator,
    out_features: int,
    in_features: int,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    version: int = 1,
    spread: float = 1.0,
) -> Drawn:
    """A matrix whose entries have a standard deviation of about `spread`; group -1 is one group for all inputs."""
    size = in_features if group == -1 else group
    groups = -(-in_features // size)
    half = 2 ** (bits - 1)
    codes = rng.integers(0, 2 * half, (out_features, in_features))
    if sym:
        zeros = np.full((groups, out_features), half)
    else:  # version 1 stores zero - 1, so 16 is possible and 0 is not
        low = 1 if version == 1 else 0
        high = min(half + 4, 2 * half + low)
        zeros = rng.integers(max(low, half - 3), high, (groups, out_features))
    per_step = spread / (half * 0.577)
    scales = (per_step * rng.uniform(0.7, 1.3, (groups, out_features))).astype(np.float16)
    g_idx = np.arange(in_features) // size
    if desc_act:
        g_idx = g_idx[rng.permutation(in_features)]
    exact = (codes - zeros[g_idx].T) * scales.astype(np.float32)[g_idx].T
    tensors = {
        "qweight": pack_bits(codes.T, bits),
        "qzeros": pack_bits((zeros - (version == 1)).T, bits, junk=9).T.copy(),
        "scales": scales,
        "g_idx": g_idx.astype(np.int32),
    }
    return Drawn(tensors, codes, zeros, exact.astype(np.float32))
