"""The int8 product: the exact matrix, the same bits for a row in any company, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quant.gptq import GridSettings, round_to_nearest
from quant.kernels_int8 import Int8CpuKernel
from quant.matrix import QuantizedMatrix

KERNEL = Int8CpuKernel()
SHAPES = [(48, 32), (17, 64), (192, 576), (80, 1536)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def matrix(out: int = 48, inner: int = 64, bias: bool = False) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(out)
    weight = torch.randn(out, inner, generator=generator)
    found = round_to_nearest(weight, GridSettings(bits=8, group_size=-1, sym=True))
    return replace(found, bias=torch.randn(out, generator=generator)) if bias else found


def inputs(rows: int, inner: int) -> Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_int8_product_is_that_of_the_exact_matrix(shape: tuple[int, int], bias: bool) -> None:
    exact, x = matrix(*shape, bias), inputs(5, shape[1])
    assert KERNEL.refuses(exact) is None
    found = KERNEL.matmul(x, KERNEL.pack(exact)).double()
    expected = x.double() @ exact.dequantize().double().t()
    if exact.bias is not None:
        expected += exact.bias.to(torch.bfloat16).double()
    # Scales are bfloat16 in the matrix already; the result is rounded to its 8 bits once, with a bias twice.
    assert float((found - expected).norm() / expected.norm()) < 4e-3
    assert float((found - expected).norm() / expected.norm()) > 0, "bfloat16 cannot be exact: compared with itself?"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_however_many_rows_share_the_call(threads: int, shape: tuple[int, int]) -> None:
    stored, x = KERNEL.pack(matrix(*shape, bias=True)), inputs(17, shape[1])
    alone = torch.cat([KERNEL.matmul(x[row : row + 1], stored) for row in range(17)])
    for rows in range(1, 18):
        assert torch.equal(KERNEL.matmul(x[:rows].contiguous(), stored), alone[:rows]), f"{rows} rows"
        assert torch.equal(KERNEL.matmul(x[17 - rows :].contiguous(), stored), alone[17 - rows :]), f"last {rows} rows"
    assert torch.equal(KERNEL.matmul(x.repeat(9, 1), stored), alone.repeat(9, 1))


def test_codes_are_kept_whole_at_both_ends_of_their_range() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    exact = QuantizedMatrix(codes, torch.ones(1, 2), torch.full((1, 2), 128), torch.zeros(256, dtype=torch.int64), 8)
    assert KERNEL.pack(exact)["signed"].tolist() == [list(range(-128, 128))] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 4}, "4 bits, not 8"),
        ({"scales": torch.ones(2, 48), "zeros": torch.full((2, 48), 128)}, "2 groups, not one"),
        ({"zeros": torch.full((1, 48), 127)}, "zero points other than 128"),
        ({"codes": torch.zeros(48, 72, dtype=torch.uint8)}, "in_features 72 is not a multiple of 16"),
    ],
)
def test_what_it_cannot_take_it_refuses_with_a_reason(change: dict[str, object], reason: str) -> None:
    assert KERNEL.refuses(replace(matrix(), **change)) == reason  # type: ignore[arg-type]
