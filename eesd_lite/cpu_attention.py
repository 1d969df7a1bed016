"""Attention kernels: store a call's keys and values, then attend, in blocks of query rows and keys.

A row's keys are taken in sequence order, wherever their slots are, and every sum runs in that order; so a row of a
token tree, of a chain and of a long prompt get the same bits. Compiled by cpu_kernels.py, called by cpu_ops.py.
"""

from __future__ import annotations

import math

import numpy as np

from eesd_lite.cpu_simd import (
    KEY_BLOCK,
    LANES,
    exp,
    fma,
    load,
    load_half,
    load_int,
    max_lanes,
    mix_block,
    score_block,
    store,
    store_half,
    sum_lanes,
    take_ticket,
    widen,
    word,
)

LIMIT_STEP = 64  # score rows are padded to a multiple of this

_ONE = np.float32(1)


@word
def _length(a, row):  # type: ignore[no-untyped-def]
    """How many keys the row attends."""
    depth = load_int(a, 9)
    length = load_int(load_int(a, 7), row)
    for i in range(depth):
        if load_int(load_int(a, 8), row * depth + i) >= 0:
            length += 1
    return length


@word
def _first(a, length):  # type: ignore[no-untyped-def]
    """The first of that many keys, in sequence order, that the window reaches."""
    return max(0, length - load_int(a, 25))


@word
def _head_scale(a, source, weight):  # type: ignore[no-untyped-def]
    """What the RMSNorm of a head multiplies it by, before its weight; 1 where there is no norm (weight 0)."""
    if weight == 0:
        return _ONE
    head_dim, even, odd = load_int(a, 15), np.float32(0), np.float32(0)
    for i in range(0, head_dim, 2):
        even = fma(load_half(source, i), load_half(source, i), even)
        odd = fma(load_half(source, i + 1), load_half(source, i + 1), odd)
    return _ONE / np.float32(math.sqrt((even + odd) / np.float32(head_dim) + load(a, 48)))


@word
def _rotate(source, scale, weight, cosines, sines, i, half):  # type: ignore[no-untyped-def]
    """The pair (i, i + half) of a head of bfloat16 values, normalized if there is a weight, and rotated."""
    first, second = load_half(source, i), load_half(source, i + half)
    if weight != 0:
        first = first * scale * load_half(weight, i)
        second = second * scale * load_half(weight, i + half)
    cos, sin = load(cosines, i), load(sines, i)
    return first * cos - second * sin, second * cos + first * sin


@word
def write_keys(a):  # type: ignore[no-untyped-def]
    """Normalizes, rotates and stores the keys of all rows, stores the values; gives the longest row's number of keys.

    Arguments, as for `attend`: 0, 0, qkv, k cache, v cache, positions, slots, prefix, paths, depth, cos, sin, rows,
    heads, key-value heads, head_dim, capacity, out, rows in a block, key limit, scratch, length of the tables,
    weights of the query norm and of the key norm (or 0), their eps (float32 bits), window.
    A position or slot out of range gives -1, and nothing is stored.
    """
    heads, kv_heads, head_dim, capacity = load_int(a, 13), load_int(a, 14), load_int(a, 15), load_int(a, 16)
    for row in range(load_int(a, 12)):
        position, slot, prefix = (
            load_int(load_int(a, 5), row),
            load_int(load_int(a, 6), row),
            load_int(load_int(a, 7), row),
        )
        if not (0 <= position < load_int(a, 21) and 0 <= slot < capacity and 0 <= prefix <= capacity):
            return -1
        for i in range(load_int(a, 9)):
            if load_int(load_int(a, 8), row * load_int(a, 9) + i) >= capacity:
                return -1
    half, longest = head_dim // 2, 0
    for row in range(load_int(a, 12)):
        table = 4 * half * load_int(load_int(a, 5), row)
        for head in range(kv_heads):
            key = load_int(a, 2) + 2 * head_dim * (row * (heads + 2 * kv_heads) + heads + head)
            value = key + 2 * head_dim * kv_heads
            entry = 2 * head_dim * (head * capacity + load_int(load_int(a, 6), row))
            weight = load_int(a, 23)
            scale = _head_scale(a, key, weight)
            for i in range(half):
                first, second = _rotate(key, scale, weight, load_int(a, 10) + table, load_int(a, 11) + table, i, half)
                store_half(load_int(a, 3) + entry, i, first)
                store_half(load_int(a, 3) + entry, i + half, second)
            for i in range(head_dim):
                store_half(load_int(a, 4) + entry, i, load_half(value, i))
        longest = max(longest, _length(a, row))
    return longest


@word
def attend(a):  # type: ignore[no-untyped-def]
    """Attention of all rows, after write_keys; threads may run this together on one block of arguments."""
    kv_heads, block = load_int(a, 14), load_int(a, 18)
    group = load_int(a, 13) // kv_heads
    width = (load_int(a, 15) + LANES - 1) & -LANES
    heads = block * group
    scratch = load_int(a, 20) + 4 * take_ticket(a, 1) * (heads * (2 * width + load_int(a, 19)) + 2 * KEY_BLOCK * width)
    blocks = (load_int(a, 12) + block - 1) // block
    while True:
        item = take_ticket(a, 0)
        if item >= blocks * kv_heads:
            return 0
        first = item // kv_heads * block
        _attend_block(a, first, min(block, load_int(a, 12) - first), item % kv_heads, group, width, scratch)


@word
def _attend_block(a, first, rows, head, group, width, scratch):  # type: ignore[no-untyped-def]
    """Query rows first..first+rows-1 of one key-value head: scores, softmax, and the mix of values."""
    heads, head_dim, limit = load_int(a, 13), load_int(a, 15), load_int(a, 19)
    mixed = scratch + 4 * rows * group * width
    buffer = mixed + 4 * rows * group * width
    scores = buffer + 4 * 2 * KEY_BLOCK * width
    for row in range(rows):
        for member in range(group):
            at = 4 * (row * group + member) * width
            _load_query(a, first + row, head * group + member, width, scratch + at)
            for i in range(width):
                store(mixed + at, i, np.float32(0))
    _walk(a, first, rows, head, group, width, scratch, buffer, scores, False)
    for row in range(rows):
        for member in range(group):
            length = _length(a, first + row)
            _softmax(scores + 4 * (row * group + member) * limit, _first(a, length), length)
    _walk(a, first, rows, head, group, width, mixed, buffer, scores, True)
    for row in range(rows):
        for member in range(group):
            out = load_int(a, 17) + 2 * head_dim * ((first + row) * heads + head * group + member)
            for i in range(head_dim):
                store_half(out, i, load(mixed + 4 * (row * group + member) * width, i))


@word
def _load_query(a, row, head, width, query):  # type: ignore[no-untyped-def]
    """The query, normalized and rotated, times head_dim^-0.5, float32, followed by zeros up to width."""
    heads, kv_heads, head_dim = load_int(a, 13), load_int(a, 14), load_int(a, 15)
    half, scale = head_dim // 2, np.float32(1 / math.sqrt(head_dim))
    source = load_int(a, 2) + 2 * head_dim * (row * (heads + 2 * kv_heads) + head)
    table, weight = 4 * half * load_int(load_int(a, 5), row), load_int(a, 22)
    norm = _head_scale(a, source, weight)
    for i in range(half):
        first, second = _rotate(source, norm, weight, load_int(a, 10) + table, load_int(a, 11) + table, i, half)
        store(query, i, first * scale)
        store(query, i + half, second * scale)
    for i in range(head_dim, width):
        store(query, i, np.float32(0))


@word
def _walk(a, first, rows, head, group, width, data, buffer, scores, mixing):  # type: ignore[no-untyped-def]
    """Takes the keys (or values) in order, KEY_BLOCK at a time, to scores (or from scores into a mix).

    A block that lies in the common prefix is widened once for all rows; what differs is widened for each: the end of
    a path, and a block that the row's window cuts.
    """
    cache = load_int(a, 4 if mixing else 3) + 2 * head * load_int(a, 16) * load_int(a, 15)
    limit, longest = load_int(a, 19), 0
    earliest = load_int(a, 16)
    for row in range(rows):
        longest = max(longest, _length(a, first + row))
        earliest = min(earliest, _first(a, _length(a, first + row)))
    for start in range(earliest & -KEY_BLOCK, longest, KEY_BLOCK):
        shared = False
        for row in range(rows):
            length = _length(a, first + row)
            opening = _first(a, length)
            if start >= length or start + KEY_BLOCK <= opening:
                continue
            block = buffer
            if start + KEY_BLOCK > load_int(load_int(a, 7), first + row) or start < opening:
                block = buffer + 4 * KEY_BLOCK * width
                _widen_block(a, first + row, cache, start, length, width, block)
            elif not shared:
                _widen_block(a, first + row, cache, start, length, width, block)
                shared = True
            for member in range(row * group, row * group + group):
                place = scores + 4 * (member * limit + start)
                if mixing:
                    mix_block(place, block, width, data + 4 * member * width)
                else:
                    score_block(data + 4 * member * width, block, width, place)


@word
def _widen_block(a, row, cache, start, length, width, block):  # type: ignore[no-untyped-def]
    """block [KEY_BLOCK, width] float32 = the row's keys from start on; the first and the last that it sees stand in for
    those before and beyond them."""
    opening = _first(a, length)
    prefix, depth, head_dim = load_int(load_int(a, 7), row), load_int(a, 9), load_int(a, 15)
    whole = head_dim & -LANES
    for key in range(KEY_BLOCK):
        slot = max(opening, min(start + key, length - 1))
        if slot >= prefix:
            slot = load_int(load_int(a, 8), row * depth + slot - prefix)
        source, target = cache + 2 * slot * head_dim, block + 4 * key * width
        for i in range(0, whole, LANES):
            widen(source, i, target)
        for i in range(whole, width):
            store(target, i, load_half(source, i) if i < head_dim else np.float32(0))


@word
def _softmax(scores, first, length):  # type: ignore[no-untyped-def]
    """In place over first..length-1; scores around them, to the next multiples of LIMIT_STEP, become 0."""
    before, padded = first & -LIMIT_STEP, (length + LIMIT_STEP - 1) & -LIMIT_STEP
    for i in range(before, first):
        store(scores, i, np.float32(-np.inf))
    for i in range(length, padded):
        store(scores, i, np.float32(-np.inf))
    count = padded - before
    scores += 4 * before
    largest = max_lanes(scores, count, np.float32(-np.inf))
    for i in range(count):
        store(scores, i, exp(load(scores, i) - largest))
    inverse = _ONE / sum_lanes(scores, count, np.float32(0))
    for i in range(count):
        store(scores, i, load(scores, i) * inverse)


def attend_scratch(row_block: int, group: int, head_dim: int, limit: int) -> int:
    """Floats that one thread of `attend` needs."""
    width = (head_dim + LANES - 1) & -LANES
    return row_block * group * (2 * width + limit) + 2 * KEY_BLOCK * width
