"""Rotary tables equal transformers' own to the last bit, and unknown kinds of scaling are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eesd_lite.config import ModelConfig, RopeScaling
from eesd_lite.errors import ModelError
from eesd_lite.rope import layer_reaches, rope_tables

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def config(head_dim: int, theta: float, scaling: RopeScaling | None) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=10,
        hidden_size=2 * head_dim,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=512,
    )


def transformers_tables(head_dim: int, theta: float, scaling: dict[str, Any], length: int) -> tuple[torch.Tensor, ...]:
    theirs = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    module = LlamaRotaryEmbedding(theirs)
    tables = module(torch.empty(0, dtype=torch.float32), torch.arange(length)[None])
    return tuple(table[0, :, : head_dim // 2] for table in tables)


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 10000.0), (64, 100000.0), (96, 10000.0), (128, 500000.0)])
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **LLAMA3}])
def test_tables_equal_those_of_transformers(head_dim: int, theta: float, scaling: dict[str, Any]) -> None:
    theirs = transformers_tables(head_dim, theta, {"rope_type": "default", **scaling}, 300)
    ours = rope_tables(config(head_dim, theta, RopeScaling(**scaling) if scaling else None), 300)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32 and mine.is_contiguous() and mine.shape == (300, head_dim // 2)
        # Equal operations in an equal order; a vectorised cosine may differ in the last bit where the layout does.
        torch.testing.assert_close(mine, other, rtol=0, atol=1.2e-7)


def test_a_longer_table_starts_with_the_shorter_one() -> None:
    shape = config(64, 10000.0, None)
    for short, long in zip(rope_tables(shape, 100), rope_tables(shape, 333), strict=True):
        torch.testing.assert_close(short, long[:100], rtol=0, atol=1.2e-7)


def test_llama3_falls_back_to_the_models_own_context() -> None:
    named = {**LLAMA3, "original_max_position_embeddings": 512}
    unnamed = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    first, second = (
        rope_tables(config(64, 10000.0, RopeScaling(rope_type="llama3", **values)), 50)  # type: ignore[arg-type]
        for values in (named, unnamed)
    )
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_scaling_that_depends_on_the_length_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=f"'{kind}' is not supported"):
        rope_tables(config(64, 10000.0, RopeScaling(rope_type=kind, factor=2.0)), 10)


def test_llama3_with_crossed_frequencies_is_refused() -> None:
    scaling = RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0)
    with pytest.raises(ModelError, match="low_freq_factor 4.0"):
        rope_tables(config(64, 10000.0, scaling), 10)


def test_llama3_scales_three_bands_as_computed_by_hand() -> None:
    """head_dim 8, theta 10000: waves of 2 pi, 20 pi, 200 pi and 2000 pi positions; 64 original ones, factor 8."""
    scaling = RopeScaling(rope_type="llama3", **LLAMA3)  # type: ignore[arg-type]
    cos, sin = rope_tables(config(8, 10000.0, scaling), 601)
    smooth = (64 / (20 * math.pi) - 1) / (4 - 1)  # the wave of 62.8 lies between 64 / 4 and 64 / 1
    frequencies = [1.0, 0.1 * ((1 - smooth) / 8 + smooth), 0.01 / 8, 0.001 / 8]  # short kept, long ones stretched
    for place, frequency in enumerate(frequencies):
        # Angles up to 600 in float32: half a unit in the last place is 3e-5.
        assert cos[600, place].item() == pytest.approx(math.cos(600 * frequency), abs=1e-4)
        assert sin[600, place].item() == pytest.approx(math.sin(600 * frequency), abs=1e-4)


def test_dynamic_is_no_scaling_within_the_original_context_and_refused_beyond_it() -> None:
    scaled = config(64, 10000.0, RopeScaling(rope_type="dynamic", factor=4.0, original_max_position_embeddings=512))
    plain = layer_reaches(config(64, 10000.0, None), 512)
    theirs = transformers_tables(64, 10000.0, {"rope_type": "dynamic", "factor": 4.0}, 512)
    for mine, other, third in zip(layer_reaches(scaled, 512)[0].rope, plain[0].rope, theirs, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, third, rtol=0, atol=1.2e-7)
    assert len(layer_reaches(scaled, 512, slack=16)[0].rope[0]) == 528  # slots of drafts, whose positions stay below
    with pytest.raises(ModelError, match="513 positions: rope scaling 'dynamic' is supported up to .* of 512"):
        layer_reaches(scaled, 513)


def test_transformers_own_dynamic_scaling_changes_earlier_keys_as_a_text_grows() -> None:
    """Why it is refused: the table of one position depends on how long the text is when it is asked for."""
    short = transformers_tables(64, 10000.0, {"rope_type": "dynamic", "factor": 4.0}, 600)
    long = transformers_tables(64, 10000.0, {"rope_type": "dynamic", "factor": 4.0}, 700)
    assert not torch.allclose(short[0], long[0][:600], atol=1e-2)
