"""Products in bitsandbytes' 4-bit form: right, and row-invariant bit for bit, as docs/quantization.md states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eesd_lite.cpu_ops import FusedCpuOps
from eesd_lite.ops import TorchOps
from quant import kernels_bnb
from quant.blocks import TABLES, BlockMatrix, quantize_blocks
from quant.kernels_bnb import (
    BlockKernel,
    BnbCpuKernel,
    BnbCudaKernel,
    WideningKernel,
    block_kernels,
    cpu_product_missing,
)
from quant.linear import GPTQLinear

SHAPES = [(32, 64), (96, 128), (960, 576), (1536, 576), (576, 1536)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def matrix(out: int, inner: int, kind: str = "nf4", *, bias: bool = False) -> BlockMatrix:
    generator = torch.Generator().manual_seed(out + inner)
    offset = torch.randn(out, generator=generator) if bias else None
    return quantize_blocks(torch.randn(out, inner, generator=generator) / inner**0.5, kind, offset)


def inputs(rows: int, inner: int) -> Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


def kernels(kind: str, threads: int) -> list[BlockKernel]:
    """All that can run on this CPU."""
    FusedCpuOps.warm_up()
    found: list[BlockKernel] = [
        WideningKernel(kind, FusedCpuOps(threads=threads).dense),
        WideningKernel(kind, TorchOps(torch.bfloat16).dense),
    ]
    return found if cpu_product_missing() is not None else [BnbCpuKernel(kind), *found]


def relative_error(found: Tensor, exact: BlockMatrix, x: Tensor) -> float:
    expected = x.double() @ exact.dequantize().double().t()
    if exact.bias is not None:
        expected += exact.bias.double()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", TABLES)
def test_the_product_is_that_of_the_exact_matrix(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(kernels_bnb, "WIDENED", 64 * 576)  # several pieces
    monkeypatch.setattr(kernels_bnb, "PIECE", 128 * 576)
    exact, x = matrix(224, 576, kind, bias=True), inputs(5, 576)
    for kernel in kernels(kind, 1):
        assert kernel.refuses(exact) is None
        found = GPTQLinear(kernel, kernel.pack(exact))(x)
        # bfloat16 keeps 8 bits: scales, weights and results are each rounded by up to 2**-9 of themselves.
        assert relative_error(found, exact, x) < 6e-3, kernel.name


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_however_many_rows_share_the_call(threads: int, shape: tuple[int, int]) -> None:
    exact, x = matrix(*shape, bias=True), inputs(17, shape[1])
    for kernel in kernels("nf4", threads)[:2]:
        stored = kernel.pack(exact)
        alone = torch.cat([kernel.matmul(x[row : row + 1].contiguous(), stored) for row in range(17)])
        for rows in range(1, 18):
            assert torch.equal(kernel.matmul(x[:rows].contiguous(), stored), alone[:rows]), f"{kernel.name}, {rows}"
            last = x[17 - rows :].contiguous()
            assert torch.equal(kernel.matmul(last, stored), alone[17 - rows :]), f"{kernel.name}, the last {rows}"
        assert torch.equal(kernel.matmul(x.repeat(8, 1)[:128].contiguous(), stored), alone.repeat(8, 1)[:128])


def test_the_number_of_threads_changes_no_bit() -> None:
    exact, x = matrix(960, 576), inputs(3, 576)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append([kernel.matmul(x, kernel.pack(exact)) for kernel in kernels("nf4", count)[:2]])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("exact", "reason"),
    [
        (matrix(48, 64), "out_features 48 is not a multiple of 32"),
        (matrix(32, 96), "in_features 96 is not a multiple of the block size 64"),
        (matrix(32, 64, "fp4"), "a fp4 matrix, not nf4"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_with_the_reason(exact: BlockMatrix, reason: str) -> None:
    assert BnbCpuKernel("nf4").refuses(exact) == reason


def test_a_processor_without_the_fast_product_gets_the_widening_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device, product = torch.device("cpu"), TorchOps(torch.bfloat16).dense
    monkeypatch.setattr(kernels_bnb, "cpu_product_missing", lambda: "an older processor")
    assert [kernel.name for kernel in block_kernels(device, torch.bfloat16, product)] == [
        "nf4-widening",
        "fp4-widening",
    ]
    assert block_kernels(device, torch.float32, product) == (), "float32 is the oracle: the exact matrix"


def test_a_product_from_the_hub_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.backends.cpu import ops

    monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: True)
    monkeypatch.setattr(ops, "gemm_4bit_forward_kernel", object(), raising=False)
    assert "from the Hub" in str(cpu_product_missing())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("shape", [(96, 128), (1536, 576)])
def test_cuda_rows_together_equal_rows_one_by_one_and_the_exact_matrix(kind: str, shape: tuple[int, int]) -> None:
    exact, x = matrix(*shape, kind, bias=True), inputs(17, shape[1])
    for kernel in (BnbCudaKernel(kind), WideningKernel(kind, TorchOps(torch.bfloat16).dense)):
        stored = {name: tensor.cuda() for name, tensor in kernel.pack(exact).items()}
        alone = torch.cat([kernel.matmul(x[row : row + 1].cuda(), stored) for row in range(17)])
        for rows in range(1, 18):
            assert torch.equal(kernel.matmul(x[:rows].cuda(), stored), alone[:rows]), f"{kernel.name}, {rows} rows"
        assert relative_error(alone.cpu(), exact, x) < 6e-3
