"""The words that CPU kernels are written in: memory by address, bfloat16, and sums of a fixed order.

Sums are written out in 16 lanes instead of left to the optimiser: the order of every sum is then a property of this
file, the same for any number of rows, threads and register blocking, and fast on any CPU that LLVM knows. Functions
under `_native` write LLVM instructions and are called by compiled code only. Used by cpu_kernels.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
PAIRS = 2 * LANES  # bfloat16 is widened 32 values at a time, even ones by a shift and odd ones by a mask: "split" order
KEY_BLOCK = 16  # keys whose scores are summed together

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VF32, _VI32, _VI16 = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16))
_i64, _f32 = types.int64, types.float32
_none = types.void


def _native(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turns `emit(builder, *values)`, which writes LLVM instructions, into a function for compiled code."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        def typed(typing: Any, *arguments: Any) -> Any:
            return signature, codegen

        # numba matches arguments by name, and cannot by a star
        names = ["typing", *(f"a{i}" for i in range(len(signature.args)))]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return decorate


# ---- instruction writers: they take and give LLVM values --------------------------------------------------------


def _at(builder: Any, address: Any, index: Any, bits: int, kind: Any) -> Any:
    """Pointer to `kind` at address + index * bits / 8."""
    base = builder.inttoptr(address, ir.IntType(bits).as_pointer())
    return builder.bitcast(builder.gep(base, [index]), kind.as_pointer())


def _vload(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_at(builder, address, index, 32, _VF32), align=4)


def _vstore(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, _at(builder, address, index, 32, _VF32), align=4)


def _vwiden(builder: Any, address: Any, index: Any) -> tuple[Any, Any]:
    """32 bfloat16 values as two vectors: the even ones, the odd ones."""
    pairs = builder.load(_at(builder, address, index, 16, _VI32), align=2)
    even = builder.shl(pairs, ir.Constant(_VI32, [16] * LANES))
    odd = builder.and_(pairs, ir.Constant(_VI32, [0xFFFF0000] * LANES))
    return builder.bitcast(even, _VF32), builder.bitcast(odd, _VF32)


def _prefetch(builder: Any, address: Any, index: Any) -> None:
    """Asks for a bfloat16 value's cache line in the second level cache; an address out of range does no harm."""
    pointer = _at(builder, address, index, 16, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
    builder.call(prefetch, [pointer, _I32(0), _I32(2), _I32(1)])  # for reading, second level, data


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = f"llvm.fmuladd.{'f32' if a.type == _F32 else f'v{LANES}f32'}"
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


def _shuffle(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(places)), places))


def _vsums(builder: Any, rows: list[Any]) -> Any:
    """Lane i is the sum of the 16 lanes of rows[i]; each sum is the same tree of halves, whatever its place."""
    width, order = LANES, [[i] for i in range(LANES)]  # lanes left of each sum; which sums a vector holds
    while width > 1:
        width //= 2
        low = [start + i for start in range(0, 2 * LANES, 2 * width) for i in range(width)]
        high = [place + width for place in low]
        pairs = list(zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True))
        rows = [builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high)) for a, b in pairs]
        order = [a + b for a, b in zip(order[: len(order) // 2], order[len(order) // 2 :], strict=True)]
    return _shuffle(builder, rows[0], rows[0], [order[0].index(i) for i in range(LANES)])


def _round(builder: Any, value: Any, kind: Any) -> Any:
    """float32 as bits whose upper half is the nearest bfloat16, ties to even; NaN stays NaN."""
    constant = (lambda n: ir.Constant(kind, [n] * LANES)) if kind is _VI32 else (lambda n: ir.Constant(kind, n))
    bits = builder.bitcast(value, kind)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    nearest = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC00000), nearest)


# ---- the words that kernels are written in ----------------------------------------------------------------------


@_native(_i64(_i64, _i64))
def load_int(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_at(builder, address, index, 64, _I64))


@_native(_i64(_i64, _i64))
def take_ticket(builder: Any, address: Any, index: Any) -> Any:
    """Takes the number at address[index] and leaves the next one: how threads share out the work."""
    return builder.atomic_rmw("add", _at(builder, address, index, 64, _I64), _I64(1), "monotonic")


@_native(_f32(_i64, _i64))
def load(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(_at(builder, address, index, 32, _F32))


@_native(_none(_i64, _i64, _f32))
def store(builder: Any, address: Any, index: Any, value: Any) -> None:
    builder.store(value, _at(builder, address, index, 32, _F32))


@_native(_f32(_i64, _i64))
def load_half(builder: Any, address: Any, index: Any) -> Any:
    half = builder.load(_at(builder, address, index, 16, _I16))
    return builder.bitcast(builder.shl(builder.zext(half, _I32), _I32(16)), _F32)


@_native(_none(_i64, _i64, _f32))
def store_half(builder: Any, address: Any, index: Any, value: Any) -> None:
    half = builder.trunc(builder.lshr(_round(builder, value, _I32), _I32(16)), _I16)
    builder.store(half, _at(builder, address, index, 16, _I16))


@_native(_f32(_f32, _f32, _f32))
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _multiply_add(builder, a, b, c)


@_native(_f32(_f32))
def power_of_two(builder: Any, biased: Any) -> Any:
    """2^n of the float 1.5 * 2^23 + 127 + n: its low bits become the exponent."""
    return builder.bitcast(builder.shl(builder.bitcast(biased, _I32), _I32(23)), _F32)


@_native(_none(_i64, _i64, _i64))
def split_pairs(builder: Any, halves: Any, index: Any, floats: Any) -> None:
    """floats[index..index+31] = 32 values of `halves`, in split order."""
    even, odd = _vwiden(builder, halves, index)
    _vstore(builder, floats, index, even)
    _vstore(builder, floats, builder.add(index, _I64(LANES)), odd)


@_native(_none(_i64, _i64, _i64))
def widen(builder: Any, halves: Any, index: Any, floats: Any) -> None:
    """floats[index..index+15] = 16 values of `halves`."""
    values = builder.zext(builder.load(_at(builder, halves, index, 16, _VI16), align=2), _VI32)
    _vstore(builder, floats, index, builder.bitcast(builder.shl(values, ir.Constant(_VI32, [16] * LANES)), _VF32))


def _reduction(add: Callable[..., Any], merge: Callable[..., Any]) -> Any:
    """reduce(floats, width, start): `add` each value to one of 64 partial results, then `merge` them by halves."""

    @_native(_f32(_i64, _i64, _f32))
    def reduce(builder: Any, floats: Any, width: Any, start: Any) -> Any:
        first = builder.insert_element(ir.Constant(_VF32, ir.Undefined), start, _I32(0))
        first = _shuffle(builder, first, first, [0] * LANES)
        totals = [cgutils.alloca_once_value(builder, first) for _ in range(4)]
        with cgutils.for_range_slice(builder, _I64(0), width, _I64(4 * LANES), _I64) as (index, _):
            for i, total in enumerate(totals):
                value = _vload(builder, floats, builder.add(index, _I64(i * LANES)))
                builder.store(add(builder, builder.load(total), value), total)
        parts = [builder.load(total) for total in totals]
        result = merge(builder, merge(builder, parts[0], parts[1]), merge(builder, parts[2], parts[3]))
        count = LANES
        while count > 1:
            count //= 2
            low, high = list(range(count)), list(range(count, 2 * count))
            result = merge(builder, _shuffle(builder, result, result, low), _shuffle(builder, result, result, high))
        return builder.extract_element(result, _I32(0))

    return reduce


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


sum_lanes = _reduction(
    lambda builder, total, value: builder.fadd(total, value), lambda builder, a, b: builder.fadd(a, b)
)
sum_squares = _reduction(
    lambda builder, total, value: _multiply_add(builder, value, value, total), lambda builder, a, b: builder.fadd(a, b)
)
max_lanes = _reduction(_larger, _larger)


@_native(_none(_i64, _i64, _i64, _i64))
def score_block(builder: Any, query: Any, keys: Any, width: Any, scores: Any) -> None:
    """scores[i] = query . keys[i] for KEY_BLOCK widened keys."""
    totals = [cgutils.alloca_once_value(builder, ir.Constant(_VF32, None)) for _ in range(KEY_BLOCK)]
    with cgutils.for_range_slice(builder, _I64(0), width, _I64(LANES), _I64) as (column, _):
        part = _vload(builder, query, column)
        for i, total in enumerate(totals):
            key = _vload(builder, keys, builder.add(column, builder.mul(width, _I64(i))))
            builder.store(_multiply_add(builder, part, key, builder.load(total)), total)
    _vstore(builder, scores, _I64(0), _vsums(builder, [builder.load(total) for total in totals]))


@_native(_none(_i64, _i64, _i64, _i64))
def mix_block(builder: Any, weights: Any, values: Any, width: Any, mixed: Any) -> None:
    """mixed += weights[i] * values[i] for KEY_BLOCK widened values, in order."""
    whole = builder.and_(width, _I64(-4 * LANES))
    for start, stop, count in ((_I64(0), whole, 4), (whole, width, 1)):
        with cgutils.for_range_slice(builder, start, stop, _I64(count * LANES), _I64) as (column, _):
            places = [builder.add(column, _I64(i * LANES)) for i in range(count)]
            totals = [_vload(builder, mixed, place) for place in places]
            for i in range(KEY_BLOCK):
                scalar = builder.load(_at(builder, weights, _I64(i), 32, _F32))
                weight = builder.insert_element(ir.Constant(_VF32, ir.Undefined), scalar, _I32(0))
                weight = _shuffle(builder, weight, weight, [0] * LANES)
                for n, place in enumerate(places):
                    value = _vload(builder, values, builder.add(place, builder.mul(width, _I64(i))))
                    totals[n] = _multiply_add(builder, weight, value, totals[n])
            for place, total in zip(places, totals, strict=True):
                _vstore(builder, mixed, place, total)


def _dot_tile(rows: int, columns: int) -> Any:
    """sums[i * columns + j] = x[i] . weight[j] over whole pairs. Every blocking adds in the same order; rows and
    columns beyond those left repeat the last one, and are not for use. The next weight rows are asked for while these
    are in use: otherwise memory idles while several rows of x keep the processor busy."""

    @_native(_none(_i64, _i64, _i64, _i64, _i64, _i64))
    def tile(builder: Any, x: Any, x_left: Any, weight: Any, weight_left: Any, width: Any, sums: Any) -> None:
        def starts(count: int, left: Any) -> list[Any]:
            last = builder.sub(left, _I64(1))
            chosen = [builder.select(builder.icmp_signed("<", _I64(i), left), _I64(i), last) for i in range(count)]
            return [builder.mul(i, width) for i in chosen]

        x_starts, weight_starts = starts(rows, x_left), starts(columns, weight_left)
        totals = [cgutils.alloca_once_value(builder, ir.Constant(_VF32, None)) for _ in range(LANES)]
        whole = builder.and_(width, _I64(-PAIRS))
        with cgutils.for_range_slice(builder, _I64(0), whole, _I64(PAIRS), _I64) as (start, _):
            places = [builder.add(start, x_start) for x_start in x_starts]
            evens = [_vload(builder, x, place) for place in places]
            odds = [_vload(builder, x, builder.add(place, _I64(LANES))) for place in places]
            for j, weight_start in enumerate(weight_starts):
                place = builder.add(start, weight_start)
                _prefetch(builder, weight, builder.add(place, builder.mul(width, _I64(columns))))
                even, odd = _vwiden(builder, weight, place)
                for i in range(rows):
                    total = totals[i * columns + j]
                    half = _multiply_add(builder, evens[i], even, builder.load(total))
                    builder.store(_multiply_add(builder, odds[i], odd, half), total)
        _vstore(builder, sums, _I64(0), _vsums(builder, [builder.load(total) for total in totals]))

    return tile


tile_1x16 = _dot_tile(1, 16)
tile_4x4 = _dot_tile(4, 4)


word = njit(error_model="numpy")  # for kernels and what they call
_LOG2_E, _BIAS = np.float32(1.4426950408889634), np.float32(12583039.0)  # 1.5 * 2^23 + 127
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP = tuple(np.float32(c) for c in (1.9875691e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1))
_ONE, _HALF = np.float32(1), np.float32(0.5)


@word
def exp(x):  # type: ignore[no-untyped-def]
    """e^x to 2 units in the last place (Cephes' polynomial); 0 below -87.3, capped at e^88.3; NaN stays NaN."""
    capped = np.float32(88.3) if x > np.float32(88.3) else x
    biased = fma(capped, _LOG2_E, _BIAS)
    n = biased - _BIAS
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, capped))
    p = fma(fma(fma(fma(fma(_EXP[0], r, _EXP[1]), r, _EXP[2]), r, _EXP[3]), r, _EXP[4]), r, _HALF)
    value = fma(p * r, r, r + _ONE) * power_of_two(biased)
    return np.float32(0) if x < np.float32(-87.3) else value
