"""Tiny 16-bit-style models that the peers quantize: random, seeded, float32, in Hugging Face's layout.

Plain numpy, so that every environment can write them and a seed means the same model everywhere. Queries and keys are
larger than the rest, so that attention is sharp, and logits are peaky, so that near ties decide nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB, POSITIONS = 64, 256
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Size:
    """Small files, and more than one group in every matrix of groups of 32, in some of groups of 128."""

    hidden: int
    intermediate: int
    layers: int

    @classmethod
    def for_group(cls, group_size: int) -> Size:
        return {128: cls(128, 256, 1), -1: cls(64, 192, 2)}.get(group_size, cls(64, 128, 2))


SPREADS = {"q_proj": 1.6, "k_proj": 1.6}  # the others: 1.2; both over sqrt(in_features)


def head_dim(family: str, size: Size) -> int:
    """Qwen3's heads need not divide the hidden size."""
    return size.hidden // HEADS * (2 if family == "qwen3" else 1)


def projections(family: str, size: Size) -> dict[str, tuple[int, int]]:
    """Name inside a layer -> (out_features, in_features)."""
    width = head_dim(family, size)
    return {
        "self_attn.q_proj": (HEADS * width, size.hidden),
        "self_attn.k_proj": (KV_HEADS * width, size.hidden),
        "self_attn.v_proj": (KV_HEADS * width, size.hidden),
        "self_attn.o_proj": (size.hidden, HEADS * width),
        "mlp.gate_proj": (size.intermediate, size.hidden),
        "mlp.up_proj": (size.intermediate, size.hidden),
        "mlp.down_proj": (size.hidden, size.intermediate),
    }


def write_source(
    folder: Path, family: str, seed: int, *, size: Size, tied: bool = False, positive_row: bool = False
) -> Path:
    """Weights, config.json and a word tokenizer.

    `positive_row`: row 7 of every projection has no negative weight, so that an asymmetric grid has zero points of 0.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...], spread: float, middle: float = 0.0) -> np.ndarray:
        return (middle + spread * rng.standard_normal(shape)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal((VOCAB, size.hidden), 0.6),
        "model.norm.weight": normal((size.hidden,), 0.1, 1.0),
    }
    if not tied:
        tensors["lm_head.weight"] = normal((VOCAB, size.hidden), 0.6)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in projections(family, size).items():
            tensors[f"{prefix}.{name}.weight"] = normal(
                (rows, columns), SPREADS.get(name.split(".")[1], 1.2) / columns**0.5
            )
            if positive_row:
                row = tensors[f"{prefix}.{name}.weight"][7]
                row[:] = np.abs(row)
            if family == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}.{name}.bias"] = normal((rows,), 0.5)
        norms = {"input_layernorm": size.hidden, "post_attention_layernorm": size.hidden}
        if family == "qwen3":
            norms |= {"self_attn.q_norm": head_dim(family, size), "self_attn.k_norm": head_dim(family, size)}
        for name, width in norms.items():
            tensors[f"{prefix}.{name}.weight"] = normal((width,), 0.1, 1.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(family, size, tied), indent=2) + "\n")
    write_tokenizer(folder)
    return folder


def _config(family: str, size: Size, tied: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    if family == "qwen3":
        config["head_dim"] = head_dim(family, size)
    if family == "mistral":
        config["sliding_window"] = None
    if family.startswith("qwen"):
        config |= {"use_sliding_window": False, "max_window_layers": size.layers}
    return config


def write_tokenizer(folder: Path) -> None:
    """One word per id: the peers want a tokenizer, the comparison never uses it."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
        "model_max_length": POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def calibration_ids(seed: int, rows: int = 16, length: int = 64) -> list[list[int]]:
    """Token ids that the peers calibrate with."""
    return np.random.default_rng([seed, 1]).integers(3, VOCAB, (rows, length)).tolist()


def probe_ids(seed: int, length: int = 16) -> list[int]:
    """Token ids whose logits are compared."""
    return np.random.default_rng([seed, 2]).integers(3, VOCAB, length).tolist()
