"""The int4 product against the exact matrix, its row-invariance, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from quant import kernels
from quant.kernels import DenseKernel, Int4CpuKernel, kernel_order, scales_and_zeros
from quant.linear import GPTQLinear
from quant.matrix import QuantizedMatrix, stack_rows
from tests.numpy_gptq import draw

KERNEL = Int4CpuKernel()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def matrix(
    seed: int = 0, out: int = 48, inner: int = 256, *, bias: bool = False, version: int = 2, **options: object
) -> QuantizedMatrix:
    """A random matrix whose scales are exact in bfloat16, so that only the product itself rounds."""
    rng = np.random.default_rng(seed)
    drawn = draw(rng, out, inner, version=version, **options)  # type: ignore[arg-type]
    return QuantizedMatrix(
        codes=torch.from_numpy(drawn.codes.astype(np.uint8)),
        scales=torch.from_numpy(drawn.tensors["scales"]).to(torch.bfloat16).float(),
        zeros=torch.from_numpy(drawn.zeros.astype(np.int32)),
        g_idx=torch.from_numpy(drawn.tensors["g_idx"].astype(np.int64)),
        bits=4,
        bias=torch.from_numpy(rng.standard_normal(out).astype(np.float32)) if bias else None,
    )


def inputs(rows: int, inner: int = 256) -> Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


def relative_error(found: Tensor, exact: QuantizedMatrix, x: Tensor) -> float:
    expected = x.double() @ exact.dequantize().double().t()
    if exact.bias is not None:
        expected += exact.bias.double()
    return float((found.double() - expected).norm() / expected.norm())


OPTIONS = [
    {"group": 32},
    {"group": 64, "sym": False},
    {"group": 128, "desc_act": True},
    {"group": 64, "desc_act": True, "sym": False, "bias": True},
    {"group": -1},
    {"group": -1, "desc_act": True, "sym": False},
    {"group": 32, "sym": False, "version": 1, "bias": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_int4_product_is_that_of_the_exact_matrix(options: dict[str, object]) -> None:
    exact = matrix(**options)  # type: ignore[arg-type]
    assert KERNEL.refuses(exact) is None
    x = inputs(5)
    found = GPTQLinear(KERNEL, KERNEL.pack(exact))(x)
    # bfloat16 keeps 8 bits: results, and offsets of asymmetric groups, are rounded by up to 2**-9 of themselves.
    assert relative_error(found, exact, x) < 6e-3


@pytest.mark.parametrize(
    "options", [{"group": 32}, {"group": 128, "desc_act": True, "sym": False, "bias": True}], ids=str
)
@pytest.mark.parametrize("shape", [(16, 128), (48, 256), (192, 512), (80, 384)])
def test_a_row_has_the_same_bits_however_many_rows_share_the_call(
    threads: int, shape: tuple[int, int], options: dict[str, object]
) -> None:
    stored = KERNEL.pack(matrix(1, *shape, **options))  # type: ignore[arg-type]
    x = inputs(17, shape[1])
    alone = torch.cat([KERNEL.matmul(x[row : row + 1], stored) for row in range(17)])
    for rows in range(1, 18):
        assert torch.equal(KERNEL.matmul(x[:rows].contiguous(), stored), alone[:rows]), f"{rows} rows"
        last = x[17 - rows :].contiguous()
        assert torch.equal(KERNEL.matmul(last, stored), alone[17 - rows :]), f"the last {rows} rows"
    many = x.repeat(9, 1)  # a chunk of a prompt
    assert torch.equal(KERNEL.matmul(many, stored), alone.repeat(9, 1))


def test_the_number_of_threads_changes_no_bit() -> None:
    stored, x = KERNEL.pack(matrix(2, 192, 512)), inputs(3, 512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = KERNEL.matmul(x, stored)
        torch.set_num_threads(2)
        assert torch.equal(KERNEL.matmul(x, stored), one)
    finally:
        torch.set_num_threads(before)


def test_packing_in_pieces_gives_the_bytes_of_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory while packing stays small; torch's layout interleaves at most 64 rows, so pieces do not show."""
    exact = matrix(3, 208, 128)
    at_once = torch.ops.aten._convert_weight_to_int4pack_for_cpu(exact.codes.to(torch.int32), 1)
    monkeypatch.setattr(kernels, "PACK_ROWS", 64)
    assert torch.equal(KERNEL.pack(exact)["packed"], at_once)


def test_matrices_that_share_their_order_may_be_stacked_into_one_product() -> None:
    parts = [matrix(seed, 32, 256, group=64, bias=seed == 1) for seed in range(3)]
    fused = stack_rows(parts)
    x = inputs(4)
    apart = [KERNEL.matmul(x, KERNEL.pack(part)) for part in parts]
    together = KERNEL.matmul(x, KERNEL.pack(fused))
    assert torch.equal(together, torch.cat(apart, dim=1))
    assert torch.equal(fused.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_matrices_of_different_order_are_never_stacked() -> None:
    with pytest.raises(AssertionError):
        stack_rows([matrix(0, desc_act=True), matrix(1, desc_act=True)])


def test_act_order_is_a_permutation_and_natural_order_is_none() -> None:
    order, group = kernel_order(matrix(group=64))  # type: ignore[misc]
    assert order is None and group == 64
    shuffled = matrix(group=64, desc_act=True)
    order, group = kernel_order(shuffled)  # type: ignore[misc]
    assert group == 64 and torch.equal(shuffled.g_idx[order], torch.arange(256) // 64)


@pytest.mark.parametrize(("inner", "expected"), [(256, 256), (384, 128), (320, 64), (96, 32)])
def test_one_group_for_everything_becomes_kernel_groups_with_repeated_scales(inner: int, expected: int) -> None:
    exact = matrix(0, 16, inner, group=-1)
    _, group = kernel_order(exact)  # type: ignore[misc]
    assert group == expected
    both = scales_and_zeros(exact, group, torch.float32)
    assert both.shape == (inner // group, 16, 2)
    assert torch.equal(both, both[:1].expand_as(both))


@pytest.mark.parametrize(
    ("exact", "reason"),
    [
        (matrix(0, 20), "out_features 20 is not a multiple of 16"),
        (matrix(0, 16, 72, group=24), "group size 24 has no kernel group"),
        (matrix(0, 16, 80, group=32), "groups of unequal length"),
        (matrix(0, 16, 40, group=-1), "group size 40"),
        (QuantizedMatrix(*(getattr(matrix(), n) for n in ("codes", "scales", "zeros", "g_idx")), 8), "8 bits"),  # type: ignore[arg-type]
    ],
    ids=["odd outputs", "odd groups", "a last group that is shorter", "one odd group", "8 bits"],
)
def test_what_the_kernel_cannot_take_it_refuses_with_a_reason_and_the_dense_kernel_takes(
    exact: QuantizedMatrix, reason: str
) -> None:
    assert reason in (KERNEL.refuses(exact) or "")
    dense = DenseKernel(lambda x, weight, bias: x @ weight.t() + (0 if bias is None else bias))
    assert dense.refuses(exact) is None
    x = inputs(3, exact.in_features).float()
    # float32 against float64, a few hundred products a sum.
    assert relative_error(dense.matmul(x, dense.pack(exact)), exact, x) < 1e-5


def test_the_dense_kernel_stores_the_exact_matrix() -> None:
    exact = matrix(desc_act=True, sym=False, bias=True)
    stored = DenseKernel(lambda x, weight, bias: x).pack(exact)
    assert torch.equal(stored["weight"], exact.dequantize()) and exact.bias is not None
    assert torch.equal(stored["bias"], exact.bias)


@pytest.mark.parametrize("options", [{}, {"sym": False, "desc_act": True, "group": -1}], ids=str)
def test_dequantize_gives_the_value_that_the_packer_meant(options: dict[str, object]) -> None:
    drawn = draw(np.random.default_rng(3), 24, 64, **options)  # type: ignore[arg-type]
    exact = QuantizedMatrix(
        codes=torch.from_numpy(drawn.codes.astype(np.uint8)),
        scales=torch.from_numpy(drawn.tensors["scales"]).float(),
        zeros=torch.from_numpy(drawn.zeros.astype(np.int32)),
        g_idx=torch.from_numpy(drawn.tensors["g_idx"].astype(np.int64)),
        bits=4,
    )
    assert np.array_equal(exact.dequantize().numpy(), drawn.dequantized)
