"""A 16-bit Llama folder of random weights with a tiny tokenizer, for commands that read a real model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from eesd_lite.text import TextCodec
from tests.eesd_lite.tiny_tokenizers import byte_level

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 4, 2


def tiny_model(folder: Path) -> Path:
    byte_level(folder)
    vocab = TextCodec.from_folder(folder).vocab_size
    vocab += -vocab % 16
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", kv, HIDDEN), ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN), ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN), ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):  # fmt: skip
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
    tensors = {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.1).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
