"""The batched forward pass over dense weights, one layer at a time: calibration, text generation, teacher passes.

Throughput, not exactness, is its purpose: many sequences share each matrix product and torch's own attention is used.
What users see is decoded by `eesd_lite.transformer`, never by this module. Callers are `eesd_lite.quantize` and
`eesd_lite.distill`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eesd_lite.config import ModelConfig
from quant.checkpoint import Checkpoint


@dataclass(frozen=True)
class DenseLayer:
    """One decoder layer in one dtype; weights are [out_features, in_features], biases or None."""

    input_layernorm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    post_attention_layernorm: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None

    def to(self, dtype: torch.dtype) -> DenseLayer:
        """The same layer in `dtype`."""
        changes = {f.name: getattr(self, f.name).to(dtype) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(self, **changes)


# Hugging Face's place of every projection inside a decoder layer, in the order in which inputs become known.
PROJECTION_GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
PROJECTIONS = tuple((block, name) for block, names in PROJECTION_GROUPS for name in names)


def layer_prefix(index: int) -> str:
    """`model.layers.7`"""
    return f"model.layers.{index}"


def read_dense_layer(checkpoint: Checkpoint, index: int) -> DenseLayer:
    """Layer `index` in float32, dequantized where the checkpoint is quantized."""
    prefix = layer_prefix(index)
    weights: dict[str, Tensor] = {}
    for block, names in PROJECTION_GROUPS:
        for name in names:
            weights[name] = checkpoint.dequantized(f"{prefix}.{block}.{name}")
    for name in ("q", "k", "v"):
        bias = checkpoint.bias(f"{prefix}.self_attn.{name}_proj")
        if bias is not None:
            weights[f"{name}_bias"] = bias
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[name] = checkpoint.tensor(f"{prefix}.{name}.weight").to(torch.float32)
    return DenseLayer(**weights)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm computed in float32, returned in the dtype of `weight`."""
    x = x.to(torch.float32)
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, seq, head_dim] by tables [seq, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass
class BatchKV:
    """Keys and values of one layer for a batch in lock-step: [batch, kv_heads, capacity, head_dim]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype) -> BatchKV:
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        return cls(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def attend(
    config: ModelConfig,
    layer: DenseLayer,
    normed: Tensor,  # [batch, seq, hidden]
    rope: tuple[Tensor, Tensor],
    past: BatchKV | None = None,
    start: int = 0,
) -> Tensor:
    """Causal attention before o_proj, [batch, seq, heads * head_dim]; with `past`, positions begin at `start`."""
    batch, seq, _ = normed.shape
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    cos, sin = rope[0][start : start + seq], rope[1][start : start + seq]
    query = F.linear(normed, layer.q_proj, layer.q_bias).view(batch, seq, heads, size).transpose(1, 2)
    key = F.linear(normed, layer.k_proj, layer.k_bias).view(batch, seq, kv_heads, size).transpose(1, 2)
    value = F.linear(normed, layer.v_proj, layer.v_bias).view(batch, seq, kv_heads, size).transpose(1, 2)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    if past is None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    else:
        past.keys[:, :, start : start + seq] = key
        past.values[:, :, start : start + seq] = value
        assert seq == 1 or start == 0, "a batch in lock-step goes on one token at a time"
        key, value = past.keys[:, :, : start + seq], past.values[:, :, : start + seq]
        if seq == 1:  # the query heads of a group become rows that share keys: nothing is copied or repeated
            query = query.view(batch, kv_heads, heads // kv_heads, size)
            mixed = F.scaled_dot_product_attention(query, key, value).view(batch, heads, 1, size)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(batch, seq, heads * size)


def layer_forward(
    config: ModelConfig,
    layer: DenseLayer,
    hidden: Tensor,  # [batch, seq, hidden]
    rope: tuple[Tensor, Tensor],
    past: BatchKV | None = None,
    start: int = 0,
) -> Tensor:
    """One decoder layer; the residual keeps the dtype of `hidden`."""
    normed = rms_norm(hidden, layer.input_layernorm, config.rms_norm_eps)
    hidden = hidden + F.linear(attend(config, layer, normed, rope, past, start), layer.o_proj)
    normed = rms_norm(hidden, layer.post_attention_layernorm, config.rms_norm_eps)
    product = F.silu(F.linear(normed, layer.gate_proj)) * F.linear(normed, layer.up_proj)
    return hidden + F.linear(product, layer.down_proj)
