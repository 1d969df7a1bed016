"""Tiny random models of every family for tests: a GPTQ folder packed by `numpy_gptq`, and its exact weights.

The exact weights have Hugging Face's names. Weights are large enough that every layer and the whole context matter to
the next token, and logits are peaky, so that near ties decide nothing. The tokenizer has one token per byte (an emoji
is four), a few longer ones, and a chat template. `Tiny.engine` keeps EESD_HOME beside the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from eesd_lite.config import ModelConfig
from eesd_lite.engine import Engine
from tests.numpy_gptq import draw

ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
BEGIN, END, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
MERGES = [("s", "t"), ("o", "p"), ("st", "op"), ("stop", "!"), ("e", "n"), ("en", "d")]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PROJECTIONS = {
    "self_attn.q_proj": ("heads", "hidden"),
    "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"),
    "self_attn.o_proj": ("hidden", "heads"),
    "mlp.gate_proj": ("inner", "hidden"),
    "mlp.up_proj": ("inner", "hidden"),
    "mlp.down_proj": ("hidden", "inner"),
}


@dataclass(frozen=True)
class TinySpec:
    """What to build; see `numpy_gptq.draw`.

    `bias` is none (but for what the family itself has), zero (on all seven projections, as AutoGPTQ writes it) or real
    (attention_bias is true). `modules` names modules that are not like the rest, such as `0.mlp.gate_proj`, in layer 0.
    """

    seed: int = 0
    hidden: int = 64
    inner: int = 96
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    group: int = 32
    bits: int = 4
    sym: bool = True
    desc_act: bool = False
    version: int = 1
    tied: bool = False
    bias: str = "none"
    g_idx: bool = True
    quantized_lm_head: bool = False
    positions: int = 512
    modules: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # module: other options; None: 16 bit
    model_type: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)  # further keys of config.json

    def size(self, name: str) -> int:
        heads = {"heads": self.heads * self.head_dim, "kv": self.kv_heads * self.head_dim}
        return heads[name] if name in heads else getattr(self, name)


@dataclass(frozen=True)
class Tiny:
    """A model folder and its exact weights, float32."""

    folder: Path
    spec: TinySpec
    weights: dict[str, Tensor]

    @property
    def home(self) -> Path:
        return self.folder.parent / f"{self.folder.name}-home"

    def engine(self, **options: Any) -> Engine:
        """An engine on one thread with a short context; options as for `Engine.from_pretrained`."""
        options = {"threads": 1, "context": 128, "head": "off", **options}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EESD_HOME", str(self.home))
            return Engine.from_pretrained(self.folder, **options)


def write_tokenizer(folder: Path) -> int:
    """tokenizer.json and its settings; how many ids it knows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BEGIN, END, USER, ASSISTANT)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tokenizer.get_vocab_size()


def _table(rng: np.random.Generator, vocab: int, known: int, spec: TinySpec) -> Tensor:
    """An embedding or lm_head whose printable tokens win nearly always, and whose padding rows would."""
    table = rng.standard_normal((vocab, spec.hidden)) * 0.6
    printable = {n for n, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())) if piece.isascii()}
    for row in range(known):
        if row not in printable and row < 256:
            table[row] *= 0.4
    table[known:] *= 3.0  # rows that no tokenizer knows: must never be chosen
    return torch.from_numpy(table).to(torch.float16)


def _config(spec: TinySpec, vocab: int, end: int) -> dict[str, Any]:
    return {
        "architectures": [f"{ARCHITECTURES[spec.model_type]}ForCausalLM"],
        "model_type": spec.model_type,
        "vocab_size": vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.inner,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": spec.positions,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.bias != "none",
        "bos_token_id": end - 1,
        "eos_token_id": end,
        "torch_dtype": "float16",
        "quantization_config": {
            "quant_method": "gptq",
            "bits": spec.bits,
            "group_size": spec.group,
            "desc_act": spec.desc_act,
            "sym": spec.sym,
            "checkpoint_format": "gptq" if spec.version == 1 else "gptq_v2",
        },
        **spec.config,
    }


def _add_layer(
    rng: np.random.Generator, spec: TinySpec, config: ModelConfig, prefix: str,
    stored: dict[str, Tensor], exact: dict[str, Tensor],
) -> None:  # fmt: skip
    biases = config.biases
    order = {
        "bits": spec.bits, "group": spec.group, "sym": spec.sym, "desc_act": spec.desc_act, "version": spec.version,
    }  # fmt: skip
    for name, (rows, columns) in PROJECTIONS.items():
        out_features, in_features = spec.size(rows), spec.size(columns)
        # Queries and keys are larger, so that attention is sharp; the others keep the residual growing slowly.
        spread = (1.6 if name[-6:] in ("q_proj", "k_proj") else 1.2) / np.sqrt(in_features)
        module = f"{prefix}.{name}"
        special = spec.modules.get(module.removeprefix("model.layers."), {})
        drawn = draw(rng, out_features, in_features, spread=float(spread), **order | (special or {}))
        if special is None:
            exact[f"{module}.weight"] = torch.from_numpy(drawn.dequantized).half().float()
            stored[f"{module}.weight"] = exact[f"{module}.weight"].half()
        else:
            stored |= {
                f"{module}.{part}": torch.from_numpy(array)
                for part, array in drawn.tensors.items()
                if part != "g_idx" or spec.g_idx
            }
            exact[f"{module}.weight"] = torch.from_numpy(drawn.dequantized)
        if spec.bias == "zero":
            stored[f"{module}.bias"] = torch.zeros(out_features, dtype=torch.float16)
            if name.rpartition(".")[2] in biases:
                exact[f"{module}.bias"] = torch.zeros(out_features)
        elif name.rpartition(".")[2] in biases:
            stored[f"{module}.bias"] = torch.from_numpy(rng.standard_normal(out_features) * 0.5).to(torch.float16)
            exact[f"{module}.bias"] = stored[f"{module}.bias"].float()
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weight = torch.from_numpy(1 + 0.1 * rng.standard_normal(spec.hidden)).to(torch.float16)
        stored[f"{prefix}.{norm}.weight"] = weight
        exact[f"{prefix}.{norm}.weight"] = weight.float()
    for norm in ("q_norm", "k_norm") if config.qk_norm else ():
        weight = torch.from_numpy(1 + 0.3 * rng.standard_normal(spec.head_dim)).to(torch.float16)
        stored[f"{prefix}.self_attn.{norm}.weight"] = weight
        exact[f"{prefix}.self_attn.{norm}.weight"] = weight.float()


def build(folder: Path, spec: TinySpec | None = None) -> Tiny:
    """Write the folder."""
    spec = spec if spec is not None else TinySpec()
    known = write_tokenizer(folder)
    vocab = -(-(known + 8) // 16) * 16
    rng = np.random.default_rng(spec.seed)
    stored: dict[str, Tensor] = {"model.embed_tokens.weight": _table(rng, vocab, known, spec)}
    stored["model.norm.weight"] = torch.from_numpy(1 + 0.1 * rng.standard_normal(spec.hidden)).to(torch.float16)
    if not spec.tied and not spec.quantized_lm_head:
        stored["lm_head.weight"] = _table(rng, vocab, known, spec)
    exact = {name: tensor.float() for name, tensor in stored.items()}
    if spec.quantized_lm_head:
        drawn = draw(rng, vocab, spec.hidden, bits=spec.bits, group=spec.group, version=spec.version, spread=0.6)
        stored |= {f"lm_head.{part}": torch.from_numpy(array) for part, array in drawn.tensors.items()}
        exact["lm_head.weight"] = torch.from_numpy(drawn.dequantized)
    (folder / "config.json").write_text(json.dumps(_config(spec, vocab, end=known - 3)), encoding="utf-8")
    config = ModelConfig.from_folder(folder)
    for layer in range(spec.layers):
        _add_layer(rng, spec, config, f"model.layers.{layer}", stored, exact)
    if spec.tied:
        exact["lm_head.weight"] = exact["model.embed_tokens.weight"]
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return Tiny(folder, spec, exact)
