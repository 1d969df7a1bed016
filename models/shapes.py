"""Shapes of well-known targets, without weights: what `eesd plan --shape` computes with and `eesd synth` imitates.

Values are those of each model's published config.json, under Hugging Face's names; they are the Instruct or chat
variant's where variants differ. `config_json` gives such a file back. Plain data, standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.recipe import RecipeError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that decides the bytes of a model, and what its forward pass needs to know beside the weights."""

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v, as Qwen2 has it
    group_size: int = 128  # of the 4-bit versions that people use

    def config_json(self) -> dict[str, Any]:
        """The entries of config.json that describe this shape."""
        architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[self.model_type]
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "tie_word_embeddings": self.tie_word_embeddings,
        }


def _llama2(name: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Shape:
    return Shape(
        name=name, model_type="llama", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=32000, max_position_embeddings=4096,
    )  # fmt: skip


def _llama3(name: str, hidden: int, inner: int, layers: int, heads: int, *, scaled: bool) -> Shape:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return Shape(
        name=name, model_type="llama", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0,
        max_position_embeddings=131072 if scaled else 8192, rope_scaling=scaling if scaled else None,
    )  # fmt: skip


def _qwen25(name: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Shape:
    return Shape(
        name=name, model_type="qwen2", hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=152064, max_position_embeddings=32768,
        rms_norm_eps=1e-6, rope_theta=1000000.0, attention_bias=True,
    )  # fmt: skip


_SMOLLM2 = Shape(
    name="smollm2-135m", model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=49152, max_position_embeddings=8192,
    rope_theta=100000.0, tie_word_embeddings=True, group_size=64,
)  # fmt: skip

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _SMOLLM2,
        _llama2("llama-2-7b", 4096, 11008, 32, 32, 32),
        _llama2("llama-2-13b", 5120, 13824, 40, 40, 40),
        _llama2("llama-2-70b", 8192, 28672, 80, 64, 8),
        _llama3("llama-3-8b", 4096, 14336, 32, 32, scaled=False),
        _llama3("llama-3-70b", 8192, 28672, 80, 64, scaled=False),
        _llama3("llama-3.1-8b", 4096, 14336, 32, 32, scaled=True),
        _llama3("llama-3.1-70b", 8192, 28672, 80, 64, scaled=True),
        _qwen25("qwen2.5-7b", 3584, 18944, 28, 28, 4),
        _qwen25("qwen2.5-14b", 5120, 13824, 48, 40, 8),
        _qwen25("qwen2.5-32b", 5120, 27648, 64, 40, 8),
        _qwen25("qwen2.5-72b", 8192, 29568, 80, 64, 8),
    )
}


def find_shape(name: str) -> Shape:
    """The shape of that name, or a RecipeError that lists the known ones."""
    if name not in SHAPES:
        raise RecipeError(f"no shape named {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]
