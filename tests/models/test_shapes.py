"""Named shapes against what their publishers say: the exact number of parameters of every model."""

from __future__ import annotations

import json

import pytest

from models.recipe import RecipeError
from models.shapes import SHAPES, Shape, find_shape

# As the model cards and the index files of the published weights state them.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
}


def parameters(shape: Shape) -> int:
    hidden, inner, size = shape.hidden_size, shape.intermediate_size, shape.head_dim
    query, kv = shape.num_attention_heads * size, shape.num_key_value_heads * size
    layer = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner + 2 * hidden
    layer += (query + 2 * kv) if shape.attention_bias else 0
    tables = 1 if shape.tie_word_embeddings else 2
    return shape.num_hidden_layers * layer + tables * shape.vocab_size * hidden + hidden


def test_every_shape_has_the_parameters_that_are_published() -> None:
    assert {name: parameters(shape) for name, shape in SHAPES.items()} == PARAMETERS


def test_a_shape_divides_by_its_group_size() -> None:
    for shape in SHAPES.values():
        assert shape.hidden_size % shape.group_size == shape.intermediate_size % shape.group_size == 0, shape.name


def test_a_shape_writes_the_config_of_its_family() -> None:
    llama = json.loads(json.dumps(find_shape("llama-3.1-70b").config_json()))
    assert llama["architectures"] == ["LlamaForCausalLM"] and llama["rope_scaling"]["rope_type"] == "llama3"
    assert (llama["num_hidden_layers"], llama["rope_theta"]) == (80, 500000.0)
    qwen = find_shape("qwen2.5-7b").config_json()
    assert qwen["model_type"] == "qwen2" and qwen["architectures"] == ["Qwen2ForCausalLM"]


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match="no shape named 'llama-4'; known: smollm2-135m, llama-2-7b"):
        find_shape("llama-4")
