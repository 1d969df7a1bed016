"""A tiny random Llama with a tokenizer, as folders: 16 bit, and 4-bit GPTQ that the real engine runs in a blink."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from eesd_lite.quantize import quantize_folder
from eesd_lite.text import TextCodec
from tests.eesd_lite.tiny_tokenizers import byte_level

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 16, 96, 14


def sixteen_bit(folder: Path, seed: int = 0) -> Path:
    """Hugging Face's layout; weights large enough that texts wander and near ties are rare."""
    byte_level(folder)
    vocab = -(-(TextCodec.from_folder(folder).vocab_size + 8) // 16) * 16
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {f"{attention}.q_proj": (HEADS * HEAD_DIM, HIDDEN), f"{attention}.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {f"{attention}.{name}": (KV_HEADS * HEAD_DIM, HIDDEN) for name in ("k_proj", "v_proj")}
        shapes |= {f"{mlp}.{name}": (INTERMEDIATE, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes[f"{mlp}.down_proj"] = (HIDDEN, INTERMEDIATE)
    tensors = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * 0.2).bfloat16() for name, shape in shapes.items()
    }
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def four_bit(folder: Path, seed: int = 0) -> Path:
    """The same model, rounded to nearest in groups of 32."""
    source = sixteen_bit(folder.parent / f"{folder.name}-16bit", seed)
    quantize_folder(source, folder, group_size=32, sym=False, method="rtn")
    return folder
