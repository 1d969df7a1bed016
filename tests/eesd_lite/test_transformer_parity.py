"""Our float32 forward against transformers on the exact weights, for every family: the oracle of everything else.

Two implementations in float32 differ by rounding alone, here by some 1e-6 of the logits; 1e-5 is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from eesd_lite.engine import Engine
from tests.families import LENGTH, SPECS, prefill, reference_logits, relative_errors, step_by_step, text
from tests.tiny import Tiny, TinySpec

TinyOf = Callable[[TinySpec], Tiny]
EngineOf = Callable[..., Engine]

FORMATS = {  # of the checkpoint, not of the family
    "one key-value head, act-order": TinySpec(seed=21, kv_heads=1, desc_act=True, sym=False, positions=640, layers=2),
    "biases, one group, version 2": TinySpec(
        seed=23, bias="real", group=-1, version=2, sym=False, positions=640, layers=2
    ),
    "zero biases everywhere": TinySpec(seed=24, bias="zero", positions=640, layers=2),
}
STEPS = 16  # at the end: test_invariants and test_exactness show for all positions that steps equal a prefill


@pytest.mark.parametrize("name", [*SPECS, *FORMATS])
def test_float32_logits_are_those_of_transformers_at_positions_0_to_600(
    tiny_of: TinyOf, engine_of: EngineOf, name: str
) -> None:
    spec, ids = (SPECS | FORMATS)[name], text()
    engine = engine_of(spec, dtype="float32", context=LENGTH + 7)
    expected = reference_logits(tiny_of(spec), ids)
    found = prefill(engine, ids)
    assert relative_errors(found, expected).max() <= 1e-5
    steps = step_by_step(engine, ids[-STEPS:], start=LENGTH - STEPS)
    assert torch.equal(steps, found[-STEPS:]), "a step gives other bits than the prefill"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Llama 3: llama3 rope", {"rope_scaling": None}),
        ("Llama: linear rope", {"rope_scaling": None}),
        ("Mistral: window of 48", {"sliding_window": None}),
        ("Qwen2: window of 40 from layer 1 on", {"max_window_layers": 2}),
        ("SmolLM3: layer 1 not rotated", {"no_rope_layers": [1, 1, 1]}),
    ],
)
def test_what_sets_a_family_apart_matters_at_position_600(
    tiny_of: TinyOf, engine_of: EngineOf, name: str, change: dict[str, object]
) -> None:
    """Negative controls: without the setting, the comparison above would fail by orders of magnitude."""
    spec = SPECS[name]
    without = replace(spec, config={**spec.config, **change})
    with_it, other = (prefill(engine_of(s, dtype="float32", context=LENGTH + 7), text())[-1:] for s in (spec, without))
    assert relative_errors(other, with_it).item() > 1e-3


@pytest.mark.parametrize(
    "name", ["Llama 2: grouped queries", "Llama: attention_bias and mlp_bias, act-order", "Qwen3: head_dim apart",
             "Mistral: window of 48", "Qwen2: untied"]
)  # fmt: skip
def test_bfloat16_logits_are_near_float32(engine_of: EngineOf, name: str) -> None:
    ids = text(100)
    exact = prefill(engine_of(SPECS[name], dtype="float32", context=LENGTH + 7), ids)
    fast = prefill(engine_of(SPECS[name], context=LENGTH + 7), ids)
    # 8 bits of mantissa in weights, activations and caches; 2 % is typical, random models amplify single positions.
    assert relative_errors(fast, exact).median() < 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [
    "Llama: attention_bias and mlp_bias, act-order", "Mistral: window of 48", "Qwen2: window of 40 from layer 1 on",
    "Qwen3: attention_bias, a window in layer 1", "SmolLM3: no_rope_layer_interval, window",
])  # fmt: skip
def test_k_rows_of_a_verification_equal_k_single_rows_bit_for_bit(engine_of: EngineOf, name: str, dtype: str) -> None:
    engine, ids = engine_of(SPECS[name], dtype=dtype, context=LENGTH + 7), text(90)
    prefill(engine, ids[:70])
    single = step_by_step(engine, ids[70:], start=70)
    for count in (2, 3, 5, 8, 20):
        assert torch.equal(prefill(engine, ids[70 : 70 + count], start=70), single[:count]), f"{count} rows"
