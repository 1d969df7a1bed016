"""Packing of integers into words against an independent packer, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quant.packing import pack_qweight, pack_qzeros, pack_words, unpack_qweight, unpack_qzeros, unpack_words
from tests.numpy_gptq import pack_bits


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 16, 31, 64])
def test_words_are_those_of_an_independent_packer_and_come_back(bits: int, count: int) -> None:
    values = np.random.default_rng(bits * 100 + count).integers(0, 2**bits, (count, 5)).astype(np.uint8)
    expected = pack_bits(values, bits)
    packed = pack_words(torch.from_numpy(values), bits)
    assert packed.dtype == torch.int32 and np.array_equal(packed.numpy(), expected)
    assert np.array_equal(unpack_words(torch.from_numpy(expected), bits, count).numpy(), values)


def test_three_bits_straddle_words() -> None:
    values = torch.zeros(64, 1, dtype=torch.uint8)
    values[10], values[21] = 5, 6  # bits 30 to 32, and 63 to 65
    packed = pack_words(values, 3)
    assert packed.shape == (6, 1)  # 64 values of 3 bits
    assert packed.flatten().tolist() == [0x40000000, 0x00000001, 0x00000003, 0, 0, 0]
    assert torch.equal(unpack_words(packed, 3, 64), values)


def test_a_field_in_the_sign_bit_is_a_field_like_any_other() -> None:
    codes = torch.full((1, 8), 15, dtype=torch.uint8)
    assert pack_qweight(codes, 4).tolist() == [[-1]]
    assert torch.equal(unpack_qweight(pack_qweight(codes, 4), 4, 8), codes)
    codes[0, 7] = 8
    assert pack_qweight(codes, 4).item() == int(np.uint32(0x8FFFFFFF).view(np.int32))


def test_qweight_packs_along_the_inputs_and_qzeros_along_the_outputs() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (24, 40)).astype(np.uint8)  # [out, in]
    assert np.array_equal(pack_qweight(torch.from_numpy(codes), 4).numpy(), pack_bits(codes.T, 4))
    zeros = rng.integers(0, 16, (3, 24))
    assert np.array_equal(pack_qzeros(torch.from_numpy(zeros), 4, 2).numpy(), pack_bits(zeros.T, 4).T)


@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_come_back_in_both_versions(version: int) -> None:
    zeros = torch.arange(16).reshape(1, 16) + (1 if version == 1 else 0)  # version 1 holds 1 to 16, version 2 0 to 15
    assert torch.equal(unpack_qzeros(pack_qzeros(zeros, 4, version), 4, 16, version), zeros.to(torch.int32))


def test_a_stored_15_means_16_in_version_1_and_never_bleeds_into_its_neighbour() -> None:
    stored = pack_bits(np.array([[15], [0], [15], [7], [15], [15], [1], [15]]), 4).T
    words = torch.from_numpy(stored.copy())
    assert unpack_qzeros(words, 4, 8, 1).tolist() == [[16, 1, 16, 8, 16, 16, 2, 16]]
    assert unpack_qzeros(words, 4, 8, 2).tolist() == [[15, 0, 15, 7, 15, 15, 1, 15]]


def test_three_bit_zero_points_of_an_odd_width_come_back() -> None:
    zeros = torch.randint(0, 8, (3, 20))
    packed = pack_qzeros(zeros, 3, 2)
    assert packed.shape == (3, 2) and np.array_equal(packed.numpy(), pack_bits(zeros.numpy().T, 3).T)
    assert torch.equal(unpack_qzeros(packed, 3, 20, 2), zeros.to(torch.int32))


@pytest.mark.parametrize("junk", [0, 5, 15])
def test_spare_fields_of_the_last_word_are_ignored(junk: int) -> None:
    values = np.arange(20).reshape(20, 1) % 16
    words = torch.from_numpy(pack_bits(values, 4, junk=junk))
    assert words.shape == (3, 1)
    assert unpack_words(words, 4, 20).flatten().tolist() == values.flatten().tolist()
