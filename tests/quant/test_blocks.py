"""bitsandbytes' 4-bit form: our exact matrix against bitsandbytes itself, and what a damaged file is called."""

from __future__ import annotations

import json

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor

from quant import blocks
from quant.block_module import STATE
from quant.blocks import TABLES, BlockMatrix, quantize_blocks, read_blocks, stack_blocks
from quant.errors import CheckpointError


def weight(out: int = 48, inner: int = 192, seed: int = 0) -> Tensor:
    found = torch.randn(out, inner, generator=torch.Generator().manual_seed(seed))
    found[3, :64] = 0  # a block without a scale
    return found


def stored(
    kind: str = "nf4", *, nested: bool = False, out: int = 48, inner: int = 192
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors as bitsandbytes saves them, and the matrix that bitsandbytes makes of them."""
    packed, state = bnb.quantize_4bit(weight(out, inner), quant_type=kind, compress_statistics=nested)
    return {"weight": packed, **state.as_dict(packed=True)}, bnb.dequantize_4bit(packed, state)


@pytest.mark.parametrize("kind", TABLES)
def test_the_tables_are_those_of_bitsandbytes(kind: str) -> None:
    assert torch.equal(torch.tensor(TABLES[kind]), bnb.get_4bit_type(kind, device="cpu"))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", [(48, 192), (5, 74)])  # whole blocks, and blocks across rows with a short last one
def test_what_we_quantize_is_what_bitsandbytes_dequantizes(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(blocks, "PIECE", 128)  # pieces must not show
    found = quantize_blocks(torch.randn(shape, generator=torch.Generator().manual_seed(1)).half(), kind)
    original = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    expected = bnb.dequantize_4bit(*bnb.quantize_4bit(original.float(), quant_type=kind))
    assert torch.equal(found.dequantize(), expected)


def test_an_odd_number_of_weights_leaves_half_a_byte() -> None:
    odd = torch.randn(3, 7, generator=torch.Generator().manual_seed(2))
    even = torch.cat((odd.view(1, 21), torch.zeros(1, 1)), dim=1)  # bitsandbytes itself compiles code for odd shapes
    expected = bnb.dequantize_4bit(*bnb.quantize_4bit(even, quant_type="nf4"))[:, :21].view(3, 7)
    assert torch.equal(quantize_blocks(odd, "nf4").dequantize(), expected)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("nested", [False, True])
def test_a_stored_matrix_is_what_bitsandbytes_dequantizes(kind: str, nested: bool) -> None:
    tensors, expected = stored(kind, nested=nested)
    assert ("nested_absmax" in tensors) == nested
    assert torch.equal(read_blocks("m", tensors).dequantize(), expected)
    tensors["weight"] = tensors["weight"].view(-1).view(torch.bfloat16).view(-1, 1)  # quant_storage of sharded training
    assert torch.equal(read_blocks("m", tensors).dequantize(), expected)


def test_matrices_are_stacked_where_their_blocks_do_not_cross() -> None:
    parts = [quantize_blocks(weight(out, seed=out), "nf4") for out in (16, 48)]
    both = stack_blocks(parts)
    assert both is not None and both.out_features == 64
    assert torch.equal(both.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert stack_blocks([quantize_blocks(torch.ones(3, 40), "nf4"), parts[0]]) is None
    assert stack_blocks([quantize_blocks(torch.ones(3, 40), "nf4")] * 2) is None, "a block would cross"
    assert stack_blocks([parts[0], quantize_blocks(weight(), "fp4")]) is None


def state_of(tensors: dict[str, Tensor]) -> tuple[str, dict[str, object]]:
    name = next(name for name in tensors if name.startswith(STATE))
    return name, json.loads(bytes(tensors[name].tolist()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [48, 191]}, "do not make a nf4 matrix of 48 x 191"),
        ({"shape": [48]}, "damaged"),
        ({"shape": [-48, 192]}, "damaged"),
        ({"shape": [1 << 40, 192]}, "damaged"),
        ({"blocksize": 65}, "damaged"),
        ({"blocksize": 0}, "damaged"),
        ({"blocksize": 128}, "do not make"),
        ({"quant_type": "fp4"}, "is not the table of fp4"),
        ({"quant_type": "int8"}, "damaged"),
        ({"nested_offset": "far"}, "damaged"),
    ],
)
def test_a_contradiction_is_named(change: dict[str, object], message: str) -> None:
    tensors, _ = stored()
    name, state = state_of(tensors)
    tensors[name] = torch.tensor(list(json.dumps({**state, **change}).encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=message):
        read_blocks("m", tensors)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 2000])
def test_a_damaged_description_is_named(content: bytes) -> None:
    tensors, _ = stored()
    tensors[state_of(tensors)[0]] = torch.tensor(list(content), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="damaged"):
        read_blocks("m", tensors)


@pytest.mark.parametrize("missing", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
def test_a_missing_part_is_named(missing: str) -> None:
    tensors, _ = stored(nested=True)
    del tensors[missing]
    with pytest.raises(CheckpointError, match=f"m.weight.{missing}' is missing"):
        read_blocks("m", tensors)


def test_scales_of_scales_must_fit() -> None:
    tensors, _ = stored(nested=True)
    tensors["nested_absmax"] = tensors["nested_absmax"].repeat(9)
    with pytest.raises(CheckpointError, match="scales of scales"):
        read_blocks("m", tensors)


def test_a_bias_stays_with_its_matrix() -> None:
    bias = torch.arange(48.0)
    first = quantize_blocks(weight(), "nf4", bias)
    both = stack_blocks([first, quantize_blocks(weight(16), "nf4")])
    assert isinstance(both, BlockMatrix) and both.bias is not None
    assert torch.equal(both.bias, torch.cat((bias, torch.zeros(16))))
