"""Rotary tables equal transformers' own to the last bit, and unknown kinds of scaling are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eesd_lite.config import ModelConfig, RopeScaling
from eesd_lite.errors import ModelError
from eesd_lite.rope import rope_tables

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
