"""Our float32 forward against transformers on the exact weights: the oracle of everything else.

Two implementations in float32 differ by rounding alone, here by about 1e-6 of the logits; 1e-5 is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from tests.tiny import Tiny, TinySpec

TinyOf = Callable[[TinySpec], Tiny]
EngineOf = Callable[..., Engine]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPECS = {
    "grouped queries": TinySpec(seed=20),
    "one key-value head, act-order": TinySpec(seed=21, kv_heads=1, desc_act=True, sym=False),
    "no grouping, tied": TinySpec(seed=22, kv_heads=4, tied=True, group=64),
    "biases, one group": TinySpec(seed=23, bias="real", group=-1, version=2, sym=False),
    "wider heads than hidden/heads": TinySpec(seed=24, head_dim=32, hidden=96, group=32),
    "llama3 rope": TinySpec(seed=25, config={"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "linear rope": TinySpec(seed=26, config={"rope_scaling": {"type": "linear", "factor": 4.0}}),
}


def reference(tiny: Tiny) -> Any:
    """transformers' model with the exact weights of `tiny`, float32, eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(tiny.folder)
    for key in ("quantization_config",):
        if hasattr(config, key):
            delattr(config, key)
    config._attn_implementation = "eager"
    config.dtype = torch.float32
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    weights = dict(tiny.weights)
    if tiny.spec.bias == "real":  # transformers' attention_bias puts one on o_proj too
        for layer in range(tiny.spec.layers):
            weights[f"model.layers.{layer}.self_attn.o_proj.bias"] = torch.zeros(tiny.spec.hidden)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tiny.spec.tied else set()), (missing, unexpected)
    return model


@torch.inference_mode()
def prefill(engine: Engine, ids: list[int]) -> Tensor:
    target, rows = engine.target, Rows.chain(0, len(ids))
    return target.logits(target.upper(target.lower(target.embed(ids), rows), rows))


@torch.inference_mode()
def step_by_step(engine: Engine, ids: list[int]) -> Tensor:
    target, found = engine.target, []
    for place, token in enumerate(ids):
        rows = Rows.chain(place, 1)
        found.append(target.logits(target.upper(target.lower(target.embed([token]), rows), rows)))
    return torch.cat(found)


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """One for each position."""
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


@pytest.mark.parametrize("name", SPECS)
def test_float32_logits_are_those_of_transformers_to_position_300(
    tiny_of: TinyOf, engine_of: EngineOf, name: str
) -> None:
    spec = SPECS[name]
    ids = [(13 * n * n + 7) % 250 for n in range(300)]
    engine = engine_of(spec, dtype="float32", context=320)
    with torch.inference_mode():
        expected = reference(tiny_of(spec))(torch.tensor([ids])).logits[0]
    assert relative_errors(prefill(engine, ids), expected).max() <= 1e-5
    assert relative_errors(step_by_step(engine, ids[:40]), expected[:40]).max() <= 1e-5


def test_the_rope_scaling_matters_where_it_should(tiny_of: TinyOf, engine_of: EngineOf) -> None:
    ids = [(13 * n * n + 7) % 250 for n in range(200)]
    scaled = SPECS["llama3 rope"]
    plain = TinySpec(seed=scaled.seed, config={"rope_theta": 500000.0})
    with_scaling = prefill(engine_of(scaled, dtype="float32", context=320), ids)
    without = prefill(engine_of(plain, dtype="float32", context=320), ids)
    assert relative_errors(with_scaling[-1:], without[-1:]).item() > 1e-2


@pytest.mark.parametrize("name", ["grouped queries", "one key-value head, act-order", "biases, one group"])
def test_bfloat16_logits_are_near_float32(engine_of: EngineOf, name: str) -> None:
    ids = [(13 * n * n + 7) % 250 for n in range(100)]
    exact = prefill(engine_of(SPECS[name], dtype="float32", context=320), ids)
    fast = prefill(engine_of(SPECS[name], context=320), ids)
    # 8 bits of mantissa in weights, activations and caches; 2 % is typical, random models amplify single positions.
    assert relative_errors(fast, exact).median() < 0.05
