"""What a GPTQ folder says, in float64: numpy takes the packed integers apart, transformers computes the logits.

Shares no code with `quant`: settings come from the manifest and the shapes. transformers' own float64 forward still
passes RMSNorm and softmax through float32, which bounds what it can tell apart to about 1e-7.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor


def unpack_bits(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """int32 [w, m] read along dim 0 as one stream of bits, low first -> [count, m]."""
    stream = np.unpackbits(np.ascontiguousarray(words.T).view(np.uint8), axis=1, bitorder="little")
    fields = stream[:, : count * bits].reshape(words.shape[1], count, bits).astype(np.int64)
    return (fields << np.arange(bits)).sum(axis=2).T


def zero_points(qzeros: np.ndarray, bits: int, count: int, version: int, whole_words: bool) -> np.ndarray:
    """[groups, count]. `whole_words`: the writer took one off whole words (GPTQModel, asymmetric version 1)."""
    if version == 1 and whole_words and bits != 3:
        words = qzeros.view(np.uint32) + np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        return unpack_bits(words.view(np.int32).T, bits, count).T
    return unpack_bits(qzeros.T, bits, count).T + (version == 1)


def dequantize(tensors: dict[str, np.ndarray], module: str, version: int, whole_words: bool) -> np.ndarray:
    """float64 [out, in]; the bit width follows from the shapes."""
    qweight, scales = tensors[f"{module}.qweight"], tensors[f"{module}.scales"].astype(np.float64)
    g_idx = tensors[f"{module}.g_idx"]
    in_features, out_features = len(g_idx), qweight.shape[1]
    bits = qweight.shape[0] * 32 // in_features
    codes = unpack_bits(qweight, bits, in_features)
    zeros = zero_points(tensors[f"{module}.qzeros"], bits, out_features, version, whole_words)
    return ((codes - zeros[g_idx]) * scales[g_idx]).T


def exact_weights(folder: Path, version: int, whole_words: bool) -> dict[str, Tensor]:
    """Every parameter in float64, in Hugging Face's names."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    for file in sorted(folder.glob("*.bin")):
        tensors |= {name: value.numpy() for name, value in torch.load(file, weights_only=True).items()}
    weights = {}
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part == "qweight":
            weights[f"{module}.weight"] = torch.from_numpy(dequantize(tensors, module, version, whole_words))
        elif part in ("weight", "bias"):
            weights[name] = torch.from_numpy(tensors[name].astype(np.float64))
    return weights


@torch.inference_mode()
def float64_logits(folder: Path, ids: list[int], *, version: int, whole_words: bool = False) -> Tensor:
    """[positions, vocab]"""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    raw.pop("quantization_config", None)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    config._attn_implementation = "eager"
    config.dtype = torch.float64
    model = AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
    missing, unexpected = model.load_state_dict(exact_weights(folder, version, whole_words), strict=False)
    allowed = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(missing) <= allowed, missing
    assert all(name.endswith(".bias") for name in unexpected), unexpected  # zeros, as AutoGPTQ writes them
    return model(torch.tensor([ids])).logits[0]
