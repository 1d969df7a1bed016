"""CPU kernels compiled by numba: everything of a layer that is not an int4 product, in bfloat16 with float32 sums.

A kernel is a C function of one int64, the address of its int64 arguments: tensors come as addresses, since unpacking
arrays costs more than the work. Kernels allocate nothing, never take the GIL and never raise; cpu_ops.py checks shapes,
and owns memory and threads. What a row gives depends on that row alone: items of work are whole (row, head) or (row,
weight row) results, so neither threads nor blocking can change a sum.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, int64

from eesd_lite import cpu_attention, cpu_simd
from eesd_lite.cpu_attention import attend, write_keys
from eesd_lite.cpu_simd import (
    LANES,
    PAIRS,
    exp,
    fma,
    load,
    load_half,
    load_int,
    split_pairs,
    store,
    store_half,
    sum_squares,
    take_ticket,
    tile_1x16,
    tile_4x4,
    word,
)

_ONE = np.float32(1)


@word
def rms_norm(a):  # type: ignore[no-untyped-def]
    """x, delta or 0, weight, out, rows, width, eps (float32 bits). Adds delta to x in place first."""
    x, delta, weight, out, rows, width = (
        load_int(a, 0),
        load_int(a, 1),
        load_int(a, 2),
        load_int(a, 3),
        load_int(a, 4),
        load_int(a, 5),
    )
    eps = load(a, 12)
    whole = width & -64
    for row in range(rows):
        start = row * width
        x_row, out_row = x + 4 * start, out + 2 * start
        if delta != 0:
            for i in range(width):
                store(x_row, i, load(x_row, i) + load_half(delta + 2 * start, i))
        total = sum_squares(x_row, whole, np.float32(0))
        for i in range(whole, width):
            total = fma(load(x_row, i), load(x_row, i), total)
        scale = _ONE / np.float32(math.sqrt(total / np.float32(width) + eps))
        for i in range(width):
            store_half(out_row, i, load(x_row, i) * scale * load_half(weight, i))
    return 0


@word
def silu_mul(a):  # type: ignore[no-untyped-def]
    """gate_up, out, rows, width."""
    gate_up, out, rows, width = load_int(a, 0), load_int(a, 1), load_int(a, 2), load_int(a, 3)
    for row in range(rows):
        gate, up, out_row = gate_up + 4 * row * width, gate_up + (4 * row + 2) * width, out + 2 * row * width
        for i in range(width):
            g = load_half(gate, i)
            store_half(out_row, i, g / (_ONE + exp(-g)) * load_half(up, i))
    return 0


@word
def split_rows(a):  # type: ignore[no-untyped-def]
    """x (bfloat16), out (float32), rows, width: each row in split order, what is left of it in its own."""
    x, out, rows, width = load_int(a, 0), load_int(a, 1), load_int(a, 2), load_int(a, 3)
    whole = width & -PAIRS
    for row in range(rows):
        x_row, out_row = x + 2 * row * width, out + 4 * row * width
        for i in range(0, whole, PAIRS):
            split_pairs(x_row, i, out_row)
        for i in range(whole, width):
            store(out_row, i, load_half(x_row, i))
    return 0


@word
def linear(a):  # type: ignore[no-untyped-def]
    """0, 0, x (from split_rows), rows, weight, weight rows, width, bias or 0, out, 1 for a bfloat16 out, scratch,
    weight rows that a thread takes at a time (a multiple of 16).

    Scratch: 16 floats for each thread. Threads may run this together on one block of arguments.
    """
    x, rows, weight, weight_rows, width = load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5), load_int(a, 6)
    block = load_int(a, 11)
    sums = load_int(a, 10) + 4 * LANES * take_ticket(a, 1)
    while True:
        first = take_ticket(a, 0) * block
        if first >= weight_rows:
            return 0
        last = min(first + block, weight_rows)
        if rows == 1:
            for j in range(first, last, 16):
                tile_1x16(x, 1, weight + 2 * j * width, last - j, width, sums)
                _finish(a, 0, 1, j, min(16, last - j), sums, 16)
        else:
            for i in range(0, rows, 4):
                for j in range(first, last, 4):
                    tile_4x4(x + 4 * i * width, rows - i, weight + 2 * j * width, last - j, width, sums)
                    _finish(a, i, min(4, rows - i), j, min(4, last - j), sums, 4)


@word
def _finish(a, i, rows, j, columns, sums, stride):  # type: ignore[no-untyped-def]
    """Adds what is left of each row, and the bias; stores rows x columns results at [i, j]."""
    x, weight, weight_rows, width = load_int(a, 2), load_int(a, 4), load_int(a, 5), load_int(a, 6)
    bias, out, narrow = load_int(a, 7), load_int(a, 8), load_int(a, 9)
    for row in range(rows):
        for column in range(columns):
            total = load(sums, row * stride + column)
            for t in range(width & -PAIRS, width):
                total = fma(load(x, (i + row) * width + t), load_half(weight, (j + column) * width + t), total)
            if bias != 0:
                total += load_half(bias, j + column)
            if narrow != 0:
                store_half(out, (i + row) * weight_rows + j + column, total)
            else:
                store(out, (i + row) * weight_rows + j + column, total)


@dataclass(frozen=True)
class Kernels:
    """Addresses of the compiled C functions."""

    rms_norm: int
    silu_mul: int
    split_rows: int
    linear: int
    write_keys: int
    attend: int


def _entry_points(source: int) -> dict[str, Callable[[Any], Any]]:
    """The kernels behind a closure over `source`: numba's disk cache looks at the closure, and at no file but this."""

    def norm(a):  # type: ignore[no-untyped-def]
        return rms_norm(a) if source >= 0 else 0

    def silu(a):  # type: ignore[no-untyped-def]
        return silu_mul(a) if source >= 0 else 0

    def split(a):  # type: ignore[no-untyped-def]
        return split_rows(a) if source >= 0 else 0

    def product(a):  # type: ignore[no-untyped-def]
        return linear(a) if source >= 0 else 0

    def keys(a):  # type: ignore[no-untyped-def]
        return write_keys(a) if source >= 0 else 0

    def attention(a):  # type: ignore[no-untyped-def]
        return attend(a) if source >= 0 else 0

    return {
        "rms_norm": norm,
        "silu_mul": silu,
        "split_rows": split,
        "linear": product,
        "write_keys": keys,
        "attend": attention,
    }


@functools.cache
def compile_kernels() -> Kernels:
    """Compiles all kernels, or loads them from numba's disk cache."""
    source = zlib.crc32(b"".join(Path(str(part.__file__)).read_bytes() for part in (cpu_simd, cpu_attention)))
    compiled = {name: _compile(entry) for name, entry in _entry_points(source).items()}
    return Kernels(**{name: function.address for name, function in compiled.items()})


@functools.cache  # keeps the machine code alive
def _compile(entry: Callable[[Any], Any]) -> Any:
    return cfunc(int64(int64), cache=True, error_model="numpy")(entry)
