"""Turn a GGUF file of a Llama-family model into a Hugging Face folder: config, tokenizer, float16 weights.

Needs neither torch nor transformers: the gguf package dequantizes, numpy reorders, safetensors writes. Called by
`prepare` for recipes whose origin is a GGUF. Weights are stored as float16: a 4-bit GGUF value is a float16 scale times
a small integer plus a float16 offset, so float16 keeps it to 2^-11, a hundredth of the 4-bit step, at half the size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eesd_lite.errors import PrepareError
from eesd_lite.progress import Progress, no_progress

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL, _USER_DEFINED = 3, 4  # GGUF token types: control tokens, and added tokens with visible text
_FLOAT16_MAX = 65504.0


def convert_gguf(source: Path, target: Path, progress: Progress = no_progress) -> None:
    """Write the model in `source` into the existing, empty folder `target`."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, OSError, KeyError) as error:
        raise PrepareError(f"{source} cannot be read as a GGUF file ({error}); delete it and fetch it again") from error
    config = _config(fields, has_lm_head=any(tensor.name == "output.weight" for tensor in reader.tensors))
    _write_json(target / "config.json", config)
    token_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(target / "generation_config.json", {key: value for key, value in config.items() if key in token_ids})
    _write_tokenizer(fields, target)
    _write_weights(reader, config, target, progress)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _need(fields: dict[str, Any], key: str) -> Any:
    if key not in fields:
        raise PrepareError(f"the GGUF file has no field {key}; only complete Llama-family files can be converted")
    return fields[key]


def _config(fields: dict[str, Any], has_lm_head: bool) -> dict[str, Any]:
    architecture = _need(fields, "general.architecture")
    if architecture != "llama":
        raise PrepareError(f"GGUF architecture {architecture!r} cannot be converted; supported: llama")
    heads = _need(fields, "llama.attention.head_count")
    hidden = _need(fields, "llama.embedding_length")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _need(fields, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": _need(fields, "llama.feed_forward_length"),
        "max_position_embeddings": _need(fields, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": _need(fields, "llama.block_count"),
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        # The file holds a float32; the config it came from said 1e-05.
        "rms_norm_eps": float(f"{_need(fields, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": not has_lm_head,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": len(_need(fields, "tokenizer.ggml.tokens")),
    }
    if "llama.rope.scaling.type" in fields and fields["llama.rope.scaling.type"] != "none":
        raise PrepareError(f"GGUF rope scaling {fields['llama.rope.scaling.type']!r} cannot be converted")
    return {key: value for key, value in config.items() if value is not None}


def _pre_tokenizer(name: str) -> Any:
    """The text splitter behind a GGUF `tokenizer.ggml.pre` name; a wrong one changes ids silently, so no default."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "gpt2"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise PrepareError(f"GGUF pre-tokenizer {name!r} cannot be converted; supported: gpt-2, smollm")


def _write_tokenizer(fields: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    kind = _need(fields, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise PrepareError(f"GGUF tokenizer {kind!r} cannot be converted; supported: gpt2 (byte-level BPE)")
    tokens: list[str] = _need(fields, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _need(fields, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(fields.get("tokenizer.ggml.pre", "gpt-2"))
    tokenizer.decoder = decoders.ByteLevel()
    special: dict[str, dict[str, Any]] = {}
    for index, token_type in enumerate(fields.get("tokenizer.ggml.token_type", [])):
        if token_type in (_SPECIAL, _USER_DEFINED):
            is_control = token_type == _SPECIAL
            token = AddedToken(tokens[index], special=is_control, normalized=False)
            (tokenizer.add_special_tokens if is_control else tokenizer.add_tokens)([token])
            flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
            special[str(index)] = {"content": tokens[index], "special": is_control, **flags}
    tokenizer.save(str(target / "tokenizer.json"))
    settings: dict[str, Any] = {
        "added_tokens_decoder": special,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": _need(fields, "llama.context_length"),
        # Reads tokenizer.json as it is; a model-specific class would rebuild it with its own text splitter.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            settings[f"{role}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    _write_json(target / "tokenizer_config.json", settings)


def _hf_name(name: str) -> str | None:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    parts = name.split(".")  # blk.<layer>.<part>.weight
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.weight"
    return None


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of q and k (pairs interleaved) to Hugging Face's (first half, second half of a head)."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _tensors(reader: GGUFReader, config: dict[str, Any], progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
    import numpy as np
    from gguf import dequantize

    for done, tensor in enumerate(reader.tensors):
        progress("converting weights", done, len(reader.tensors))
        name = _hf_name(tensor.name)
        if name is None:
            if tensor.name == "rope_freqs.weight":
                raise PrepareError("GGUF files with rope_freqs (scaled rope) cannot be converted")
            raise PrepareError(f"GGUF tensor {tensor.name} is not part of a Llama model; this file cannot be converted")
        weight = dequantize(tensor.data, tensor.tensor_type)
        largest = float(np.abs(weight).max())
        if not largest <= _FLOAT16_MAX:  # also catches NaN
            raise PrepareError(f"GGUF tensor {tensor.name} holds {largest}, which float16 cannot store")
        if name.endswith("q_proj.weight"):
            weight = unpermute(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = unpermute(weight, config["num_key_value_heads"])
        yield name, np.ascontiguousarray(weight, dtype=np.float16)
    progress("converting weights", len(reader.tensors), len(reader.tensors))


def _write_weights(reader: GGUFReader, config: dict[str, Any], target: Path, progress: Progress) -> None:
    from safetensors.numpy import save_file

    tensors = dict(_tensors(reader, config, progress))
    expected = 2 + 9 * config["num_hidden_layers"] + (not config["tie_word_embeddings"])
    if len(tensors) != expected:
        raise PrepareError(f"the GGUF file has {len(tensors)} of the {expected} tensors a model of its shape needs")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
