"""Plans for models that are not loaded: recomputed by hand, and compared with what an engine then allocates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eesd_lite.allocated import allocated_bytes
from eesd_lite.config import ModelConfig
from eesd_lite.engine import Engine
from eesd_lite.errors import BudgetError, EesdError, ModelError
from eesd_lite.planning import PlanWishes, plan_model, plan_shape, shape_config
from eesd_lite.synth import SynthSettings, write_checkpoint
from models.recipe import RecipeError
from models.shapes import SHAPES, find_shape
from tests.tiny import Tiny, TinySpec

GIB = 1024**3


def test_a_70b_on_a_24_gb_card_recomputed_by_hand() -> None:
    planned = plan_shape("llama-2-70b", PlanWishes.preset("24gb"))
    plan = planned.plan
    # One layer: q, k, v, o of 8192 x 8192 and 8192 x 1024; three MLP matrices of 8192 x 28672. Half a byte per weight,
    # four bytes per group of 128; two norms of 8192 in bfloat16.
    weights = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    layer = weights // 2 + weights // 128 * 4 + 2 * 8192 * 2
    assert plan.layer_bytes == (layer,) * 80 == (454_590_464,) * 80
    table = 32000 * 8192 * 2
    tokens = 2048 + 16
    kv = 2 * 8 * 128 * 2  # bytes of one token in one layer
    head = (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 8192 * 8192 + 4 * 8192) * 2
    scratch = 128 * (2 * 28672 + 28672 + 4 * 8192) * 4 + 2048 * 8192 * 4 + 8 * 32000 * 4
    fixed = {
        "embedding": table,
        "lm_head": table,
        "norms": 8192 * 2,
        "rope tables": tokens * 2 * 64 * 4,
        "exit head": head,
        "exit head KV cache": tokens * kv,
        "exit head states": 64 * 8192 * 4,
        "KV cache": tokens * kv * 80,
        "scratch": scratch,
        "reserve": 24 * GIB // 16,
        "stream ring": 2 * layer,
    }
    assert head % 4096 == 0 and head == 1_845_559_296  # two bytes for each of 922.8 million weights
    resident = (24 * GIB - sum(fixed.values())) // layer
    assert resident == 42
    assert dict(plan.items) == {**fixed, "resident layers": 42 * layer}
    assert plan.tiers == ("device",) * 42 + ("host-stream",) * 38
    assert dict(plan.host_items) == {"layers to stream": 38 * layer, "reserve": 8 * GIB}
    assert planned.cost.seconds == 38 * layer / 25e9 == pytest.approx(0.691, abs=5e-4)
    assert planned.cost.tokens_per_second(2.3) == pytest.approx(3.33, abs=5e-3)
    assert planned.draft_capable == range(1, 43)


def test_a_13b_on_an_8_gb_card_recomputed_by_hand() -> None:
    planned = plan_shape("llama-2-13b", PlanWishes.preset("8gb"))
    plan = planned.plan
    weights = 4 * 5120 * 5120 + 3 * 5120 * 13824
    layer = weights // 2 + weights // 128 * 4 + 2 * 5120 * 2
    layer = -(-layer // 4096) * 4096
    tokens, kv = 2048 + 16, 2 * 40 * 128 * 2
    head = -(-(4 * 5120 * 5120 + 3 * 5120 * 13824 + 5120 * 5120 + 4 * 5120) * 2 // 4096) * 4096
    fixed = {
        "embedding": 32000 * 5120 * 2,
        "lm_head": 32000 * 5120 * 2,
        "norms": 5120 * 2,
        "rope tables": tokens * 2 * 64 * 4,
        "exit head": head,
        "exit head KV cache": tokens * kv,
        "exit head states": 64 * 5120 * 4,
        "KV cache": tokens * kv * 40,
        "scratch": 128 * (2 * 13824 + 13824 + 4 * 5120) * 4 + 2048 * 5120 * 4 + 8 * 32000 * 4,
        "reserve": 8 * GIB // 16,
        "stream ring": 2 * layer,
    }
    resident = (8 * GIB - sum(fixed.values())) // layer
    assert dict(plan.items) == {**fixed, "resident layers": resident * layer}
    assert plan.tiers == ("device",) * 27 + ("host-stream",) * 13 and resident == 27
    assert plan.sweep_bytes == 13 * layer == 2_190_888_960
    assert planned.cost.tokens_per_second(2.3) == pytest.approx(26.2, abs=0.05)


def test_an_exit_layer_that_was_not_asked_for_gives_way_to_the_budget() -> None:
    shallow = plan_shape("llama-2-70b", PlanWishes(device="cuda", device_memory=12 * GIB, host_memory=64 * GIB))
    assert shallow.plan.exit_layer == shallow.draft_capable[-1] < 26
    asked = plan_shape(
        "llama-2-70b", PlanWishes(device="cuda", device_memory=12 * GIB, host_memory=64 * GIB, exit_layer=26)
    )
    assert asked.plan.exit_layer is None
    assert any(f"exit layer {shallow.draft_capable[-1]} or below would fit" in note for note in asked.notes)
    plain = plan_shape("llama-2-7b", PlanWishes(exit_layer=0))
    assert plain.plan.exit_layer is None and plain.draft_capable == range(0) and plain.notes == ()


def test_doubling_the_context_costs_exactly_the_cache_and_the_prompts_states() -> None:
    one, two = (plan_shape("llama-2-7b", PlanWishes(context=context, exit_layer=8)).plan for context in (1024, 2048))
    per_token = 2 * 32 * 128 * 2 * (32 + 1) + 2 * 64 * 4 + 4096 * 4
    assert two.total_bytes - one.total_bytes == 1024 * per_token


def test_wishes_that_cannot_be_are_refused() -> None:
    with pytest.raises(RecipeError, match="no shape named"):
        plan_shape("llama-9", PlanWishes())
    with pytest.raises(EesdError, match="context must be from 8 to 4096"):
        plan_shape("llama-2-7b", PlanWishes(context=5000))
    with pytest.raises(ModelError, match="exit layer 40: this model has 32 layers"):
        plan_shape("llama-2-7b", PlanWishes(exit_layer=40))
    with pytest.raises(BudgetError, match="too small"):
        plan_shape("llama-2-70b", PlanWishes(device_memory=GIB))
    with pytest.raises(ModelError, match="neither a folder nor in the Hub's cache"):
        plan_model("nobody/nothing-of-this-name", PlanWishes())


@pytest.mark.real
@pytest.mark.parametrize("mib", [108, 115, 122, 130, 200])
def test_what_is_planned_from_headers_is_what_is_allocated(demo_model: Path, mib: int) -> None:
    planned = plan_model("smollm2-135m", PlanWishes(device_memory=mib << 20, context=512)).plan
    with Engine.from_pretrained("smollm2-135m", device_memory=mib << 20, context=512, threads=1) as engine:
        assert engine.plan == planned
        found = allocated_bytes(engine)
    lasting = {name: size for name, size in planned.items if name != "scratch"}
    assert sum(found["device"].values()) == pytest.approx(sum(lasting.values()), rel=0.01)
    assert found == {"device": lasting, "host": {}}


@pytest.mark.parametrize("mode", ["stream", "compute"])
def test_a_plan_over_all_tiers_is_the_engines_and_is_allocated(tiny_of: Callable[[TinySpec], Tiny], mode: str) -> None:
    tiny = tiny_of(TinySpec(layers=9))
    size = plan_model(tiny.folder, PlanWishes(context=128, exit_layer=0)).plan.layer_bytes[0]
    host = 4 * size + (4 * 2 * 2 * 16 * 2 * 128 if mode == "compute" else 0)
    options = {"resident_layers": 2, "host_memory": host, "host_mode": mode, "context": 128}
    planned = plan_model(tiny.folder, PlanWishes(exit_layer=0, **options)).plan
    assert planned.tiers.count("disk") == 3 and planned.tiers.count(f"host-{mode}") == 4
    with tiny.engine(**options) as engine:
        assert engine.plan == planned
        found = allocated_bytes(engine)
    assert found["host"] == dict(planned.host_items)
    assert found["device"] == {name: size for name, size in planned.items if name != "scratch"}


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_shape_is_the_config_that_its_own_file_gives(tmp_path: Path, name: str) -> None:
    shape = find_shape(name)
    (tmp_path / "config.json").write_text(json.dumps(shape.config_json()))
    assert ModelConfig.from_folder(tmp_path) == shape_config(shape)


def test_headers_of_a_synthetic_folder_and_its_shape_give_one_plan(tmp_path: Path) -> None:
    for name in ("qwen2.5-72b", "llama-3.1-8b"):
        write_checkpoint(tmp_path / name, SynthSettings.of(find_shape(name), content=False))
        wishes = PlanWishes.preset("16gb")
        assert plan_model(tmp_path / name, wishes).plan == plan_shape(name, wishes).plan
