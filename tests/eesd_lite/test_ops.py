"""Products, norms and SiLU of both kinds of ops: near float64 arithmetic, and the same bits for any company of rows.

Tolerances: one rounding to bfloat16 moves a value by at most 2^-8 of itself; float32 sums of n terms here stay within
2e-6 of the sum of the terms' sizes (64 partial sums or more, so far fewer than n roundings in a row).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from eesd_lite import cpu_simd
from eesd_lite.cpu_ops import FusedCpuOps
from eesd_lite.ops import Ops, TorchOps

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
HALF_ULP, SUM_ERROR = 2.0**-8, 2e-6
Call = Callable[[Ops, torch.Tensor], torch.Tensor]


def both() -> list[Ops]:
    return [TorchOps(BF16), FusedCpuOps(threads=2)]


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_near(found: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor | float) -> None:
    """Within one rounding to the type of `found`, beside an absolute slack."""
    rounding = HALF_ULP if found.dtype == BF16 else 2.0**-24
    error = (found.to(F64) - exact).abs()
    assert bool((error <= rounding * exact.abs() + slack).all()), f"largest error {error.max().item()}"


@pytest.mark.parametrize("width", [72, 64, 576, 100])
@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_rms_norm_is_near_float64(ops: Ops, width: int) -> None:
    x, weight = draw(1, 5, width, dtype=F32, scale=30), draw(2, width)
    exact = x.to(F64) * torch.rsqrt(x.to(F64).square().mean(dim=1, keepdim=True) + 1e-5) * weight.to(F64)
    assert_near(ops.rms_norm(x, weight, 1e-5), exact, SUM_ERROR * exact.abs())


@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_rms_norm_adds_eps_under_the_root(ops: Ops) -> None:
    x, weight = draw(1, 2, 64, dtype=F32, scale=1e-4), torch.ones(64, dtype=BF16)
    exact = x.to(F64) * torch.rsqrt(x.to(F64).square().mean(dim=1, keepdim=True) + 1e-2)
    assert_near(ops.rms_norm(x, weight, 1e-2), exact, SUM_ERROR * exact.abs())


@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_add_rms_norm_is_an_addition_in_place_and_then_the_norm(ops: Ops) -> None:
    residual, delta, weight = draw(1, 3, 200, dtype=F32), draw(2, 3, 200), draw(3, 200)
    added = residual + delta
    normed = ops.add_rms_norm(residual, delta, weight, 1e-6)
    assert torch.equal(residual, added)
    assert torch.equal(normed, ops.rms_norm(added, weight, 1e-6))


@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_silu_mul_is_near_float64(ops: Ops) -> None:
    gate_up = torch.cat([torch.linspace(-100, 100, 1501), torch.linspace(-3, 3, 1501)])[None].to(BF16)
    gate, up = gate_up.to(F64).chunk(2, dim=1)
    exact = gate * torch.sigmoid(gate) * up
    # Below -88 the true value is under the smallest float32 of full precision; ours is cut off there.
    assert_near(ops.silu_mul(gate_up), exact, 1e-6 * exact.abs() + 1e-35)


@pytest.mark.parametrize(("width", "outputs"), [(576, 1000), (72, 37), (33, 5), (31, 16), (1536, 64), (1, 3)])
@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_products_are_near_float64_at_odd_shapes(ops: Ops, width: int, outputs: int) -> None:
    x, weight, bias = draw(1, 6, width), draw(2, outputs, width), draw(3, outputs)
    exact = x.to(F64) @ weight.to(F64).T
    slack = SUM_ERROR * (x.to(F64).abs() @ weight.to(F64).abs().T)
    logits = ops.logits(x, weight)
    assert logits.dtype == F32 and logits.shape == (6, outputs)
    assert_near(logits, exact, slack)
    assert_near(ops.dense(x, weight), exact, slack)
    assert_near(ops.dense(x, weight, bias), exact + bias.to(F64), slack + SUM_ERROR)


@pytest.mark.parametrize("weight_type", [F32, BF16])
def test_float32_products_keep_float32_precision(weight_type: torch.dtype) -> None:
    x, weight = draw(1, 3, 300, dtype=F32), draw(2, 50, 300, dtype=weight_type)
    found = TorchOps(F32).dense(x, weight)
    assert found.dtype == F32
    assert_near(found, x.to(F64) @ weight.to(F64).T, SUM_ERROR * (x.to(F64).abs() @ weight.to(F64).abs().T))


def shared_calls() -> dict[str, tuple[int, torch.dtype, Call]]:
    """By name: width of a row, its type, and the operation over rows."""
    norm, lm_head, square = draw(11, 200), draw(12, 999, 200), draw(13, 200, 200)
    bias = draw(14, 200)
    return {
        "rms_norm": (200, F32, lambda ops, x: ops.rms_norm(x, norm, 1e-5)),
        "silu_mul": (406, BF16, lambda ops, x: ops.silu_mul(x)),
        "dense": (200, BF16, lambda ops, x: ops.dense(x, square, bias)),
        "logits": (200, BF16, lambda ops, x: ops.logits(x, lm_head)),
    }


@pytest.mark.parametrize("name", list(shared_calls()))
@pytest.mark.parametrize("kind", ["torch", "fused-cpu"])
def test_rows_at_once_equal_rows_one_by_one(kind: str, name: str) -> None:
    width, dtype, call = shared_calls()[name]
    ops: list[Ops] = [TorchOps(BF16)] if kind == "torch" else [FusedCpuOps(threads=n) for n in (1, 2, 3)]
    x = draw(5, 17, width, dtype=dtype)
    single = torch.cat([call(ops[0], x[row : row + 1]) for row in range(17)])
    for some in ops:
        for count in range(1, 18):
            assert torch.equal(call(some, x[:count]), single[:count]), f"{count} rows"


def test_a_long_prompt_gets_the_bits_of_single_rows() -> None:
    x, weight = draw(1, 300, 136), draw(2, 500, 136)
    together = FusedCpuOps(threads=2).logits(x, weight)
    one = FusedCpuOps(threads=1)
    assert torch.equal(together, torch.cat([one.logits(row, weight) for row in x.split(1)]))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 150), outputs=st.integers(1, 150), seed=st.integers(0, 99))
def test_any_shape_of_product_is_row_invariant_and_right(rows: int, width: int, outputs: int, seed: int) -> None:
    x, weight = draw(seed, rows, width), draw(seed + 1, outputs, width)
    fused = FusedCpuOps(threads=2)
    found = fused.logits(x, weight)
    assert torch.equal(found, torch.cat([fused.logits(row, weight) for row in x.split(1)]))
    assert_near(found, x.to(F64) @ weight.to(F64).T, SUM_ERROR * (x.to(F64).abs() @ weight.to(F64).abs().T))


def test_stores_round_to_the_nearest_bfloat16_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**16, 20_000, dtype=np.uint16)  # infinities, NaN and denormals too
    weight = torch.from_numpy(bits.view(np.int16)).view(BF16)[:, None]
    for factor in (1.0, 1.0078125, 1.9921875, -1.3984375, 1e-30, float("inf"), float("nan")):
        x = torch.tensor([[factor]], dtype=BF16)
        expected = (x.float() * weight.float().T).to(BF16)
        found = FusedCpuOps(threads=1).dense(x, weight)
        same = found.view(torch.int16) == expected.view(torch.int16)
        assert bool((same | (found.isnan() & expected.isnan()) | ((found == 0) & (expected == 0))).all()), factor


@njit
def _exp_all(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = cpu_simd.exp(values[i])


def fused_exp(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float32)
    out = np.empty_like(values)
    _exp_all(values, out)
    return out


def test_exp_is_within_two_units_in_the_last_place() -> None:
    values = np.concatenate([np.linspace(-87.2, 88.2, 200_001), np.linspace(-1, 1, 100_001)]).astype(np.float32)
    exact = np.exp(values.astype(np.float64))
    assert np.max(np.abs(fused_exp(values) - exact) / np.spacing(exact.astype(np.float32))) <= 2


def test_exp_is_zero_far_below_and_finite_far_above_and_keeps_nan() -> None:
    found = fused_exp(np.array([-np.inf, -1000, -87.5, 0, 89, 1000, np.inf, np.nan]))
    assert found[:4].tolist() == [0, 0, 0, 1]
    assert np.isfinite(found[4:7]).all() and (found[4:7] > 1e38).all()
    assert np.isnan(found[7])


def test_a_result_is_not_overwritten_by_a_later_call() -> None:
    fused = FusedCpuOps(threads=2)
    for _, (width, dtype, call) in shared_calls().items():
        first = call(fused, draw(1, 2, width, dtype=dtype))
        kept = first.clone()
        call(fused, draw(2, 2, width, dtype=dtype))
        assert torch.equal(first, kept)


def test_engines_in_several_threads_do_not_disturb_each_other() -> None:
    fused = FusedCpuOps(threads=2)
    weight, inputs = draw(1, 4000, 200), [draw(seed, 3, 200) for seed in range(4)]
    expected = [fused.logits(x, weight) for x in inputs]
    right = [0] * len(inputs)

    def run(index: int) -> None:
        right[index] = sum(torch.equal(fused.logits(inputs[index], weight), expected[index]) for _ in range(20))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [20] * len(inputs)


def test_what_the_kernels_cannot_read_is_refused() -> None:
    fused, weight = FusedCpuOps(threads=1), draw(1, 8, 64)
    with pytest.raises(AssertionError, match="not contiguous"):
        fused.logits(draw(1, 64, 2).T, weight)
    with pytest.raises(AssertionError, match="expected"):
        fused.logits(draw(1, 2, 32), weight)
    with pytest.raises(AssertionError, match="float32"):
        fused.logits(draw(1, 2, 64, dtype=F32), weight)
    with pytest.raises(AssertionError, match="float32"):
        fused.silu_mul(draw(1, 2, 64, dtype=F32))
    with pytest.raises(AssertionError, match="bfloat16"):
        fused.rms_norm(draw(1, 2, 64), weight[0].contiguous(), 1e-5)


def test_fused_operations_say_why_they_cannot_run() -> None:
    assert FusedCpuOps.supported("cpu", BF16) is None
    assert "not in torch.float32" in str(FusedCpuOps.supported("cpu", F32))
    assert "not on cuda" in str(FusedCpuOps.supported("cuda", BF16))


def test_without_numba_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert "need numba" in str(FusedCpuOps.supported("cpu", BF16))
