"""The CUDA path: int4 product, streaming into device slots, and the same exactness as on the CPU. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eesd_lite import SamplingParams
from eesd_lite.engine import Engine
from quant.kernels import Int4CudaKernel
from tests.quant.test_kernels import inputs, matrix, relative_error
from tests.tiny import TinySpec

pytestmark = pytest.mark.gpu
# Input features must be multiples of 128 for the CUDA kernel.
SPEC = TinySpec(hidden=128, inner=256, heads=4, kv_heads=2, head_dim=32)


def ids_of(engine: Engine, params: SamplingParams) -> list[int | None]:
    engine.reset()
    return [event.token_id for event in engine.generate([1, 40, 41, 42, 43], params)]


@pytest.mark.parametrize("options", [{"group": 32}, {"group": 128, "desc_act": True}, {"group": 64, "sym": False}])
def test_the_cuda_int4_product_is_that_of_the_exact_matrix(options: dict[str, object]) -> None:
    exact = matrix(out=64, **options)  # type: ignore[arg-type]
    kernel = Int4CudaKernel()
    assert kernel.refuses(exact) is None
    x = inputs(5)
    found = kernel.matmul(x.cuda(), kernel.pack(exact)).cpu()
    assert relative_error(found, exact, x) < 5e-3  # bfloat16: 8 bits, and rounding of the zero points


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 17])
def test_cuda_rows_together_equal_rows_one_by_one(rows: int) -> None:
    kernel = Int4CudaKernel()
    stored = kernel.pack(matrix(out=64, group=64))
    x = inputs(rows).cuda()
    apart = torch.cat([kernel.matmul(x[row : row + 1].contiguous(), stored) for row in range(rows)])
    assert torch.equal(kernel.matmul(x, stored), apart)


@pytest.mark.parametrize("resident", [2, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_on_cuda_emits_plain_ids(engine_of: Callable[..., Engine], resident: int, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=48, temperature=temperature, seed=3, ignore_eos=True)
    engine = engine_of(SPEC, device="cuda", resident_layers=resident, exit_layer=2, head="random")
    engine.set_controller("off")
    plain = ids_of(engine, params)
    for controller in ("fixed:1", "fixed:4", "calibrated"):
        engine.set_controller(controller)
        assert ids_of(engine, params) == plain
    assert engine.stats.draft_offloaded_bytes == 0
    assert engine.stats.balanced()
