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
from eesd_lite.layer_shapes import layer_prefix
from eesd_lite.ops import Reach
from quant.checkpoint import Checkpoint


@dataclass(frozen=True)
class DenseLayer:
    """One decoder layer in one dtype; weights are [out_features, in_features], biases and norms [features] or None."""

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
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def bias(self, projection: str) -> Tensor | None:
        """The bias of `q_proj` and the like."""
        found: Tensor | None = getattr(self, _bias_field(projection))
        return found

    def product(self, projection: str, x: Tensor) -> Tensor:
        """x [..., in_features] through a projection."""
        return F.linear(x, getattr(self, projection), self.bias(projection))

    def named(self) -> dict[str, Tensor]:
        """The tensors that are there, by Hugging Face's names inside a layer."""
        found = {f"{name}.weight": getattr(self, name) for name in ("input_layernorm", "post_attention_layernorm")}
        for block, name in PROJECTIONS:
            found |= {f"{block}.{name}.weight": getattr(self, name), f"{block}.{name}.bias": self.bias(name)}
        found |= {f"self_attn.{name}.weight": getattr(self, name) for name in ("q_norm", "k_norm")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

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


def _bias_field(projection: str) -> str:
    return f"{projection.removesuffix('_proj')}_bias"


def read_dense_layer(checkpoint: Checkpoint, index: int) -> DenseLayer:
    """Layer `index` in float32, dequantized where the checkpoint is quantized."""
    prefix = layer_prefix(index)
    weights: dict[str, Tensor] = {}
    for block, names in PROJECTION_GROUPS:
        for name in names:
            module = f"{prefix}.{block}.{name}"
            weights[name] = checkpoint.dequantized(module)
            if f"{module}.bias" in checkpoint:  # zeros too: a quantized copy must hold what its family expects
                weights[_bias_field(name)] = checkpoint.tensor(f"{module}.bias").to(torch.float32)
    for name in ("q_norm", "k_norm"):
        if f"{prefix}.self_attn.{name}.weight" in checkpoint:
            weights[name] = checkpoint.tensor(f"{prefix}.self_attn.{name}.weight").to(torch.float32)
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


def band(seq: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of `seq` keys each of `seq` queries sees, bool [seq, seq]; None where being causal says it all."""
    if window is None or window >= seq:
        return None
    return torch.ones(seq, seq, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def _mix(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """torch's attention of a whole sequence to itself, [batch, heads, seq, head_dim]."""
    mask = band(query.shape[2], window, query.device)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
    )


def attend(
    config: ModelConfig,
    layer: DenseLayer,
    normed: Tensor,  # [batch, seq, hidden]
    reach: Reach,
    past: BatchKV | None = None,
    start: int = 0,
) -> Tensor:
    """Causal attention before o_proj, [batch, seq, heads * head_dim]; with `past`, positions begin at `start`."""
    batch, seq, _ = normed.shape
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query = layer.product("q_proj", normed).view(batch, seq, heads, size)
    key = layer.product("k_proj", normed).view(batch, seq, kv_heads, size)
    if config.qk_norm:
        assert layer.q_norm is not None and layer.k_norm is not None, "a layer without the norms of its family"
        query, key = (
            rms_norm(query, layer.q_norm, config.rms_norm_eps),
            rms_norm(key, layer.k_norm, config.rms_norm_eps),
        )
    cos, sin = (table[start : start + seq] for table in reach.rope)
    query, key = rotate(query.transpose(1, 2), cos, sin), rotate(key.transpose(1, 2), cos, sin)
    value = layer.product("v_proj", normed).view(batch, seq, kv_heads, size).transpose(1, 2)
    if past is None:
        mixed = _mix(query, key, value, reach.window)
    else:
        past.keys[:, :, start : start + seq] = key
        past.values[:, :, start : start + seq] = value
        assert seq == 1 or start == 0, "a batch in lock-step goes on one token at a time"
        if seq == 1:  # the query heads of a group become rows that share keys: nothing is copied or repeated
            first = 0 if reach.window is None else max(0, start + 1 - reach.window)
            key, value = past.keys[:, :, first : start + 1], past.values[:, :, first : start + 1]
            query = query.view(batch, kv_heads, heads // kv_heads, size)
            mixed = F.scaled_dot_product_attention(query, key, value).view(batch, heads, 1, size)
        else:
            mixed = _mix(query, key, value, reach.window)
    return mixed.transpose(1, 2).reshape(batch, seq, heads * size)


def mlp_input(config: ModelConfig, layer: DenseLayer, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """(the residual after attention, its norm), from `attend`'s result; [batch, seq, hidden] both."""
    hidden = hidden + layer.product("o_proj", mixed)
    return hidden, rms_norm(hidden, layer.post_attention_layernorm, config.rms_norm_eps)


def mlp_inner(layer: DenseLayer, normed: Tensor) -> Tensor:
    """What down_proj sees, [batch, seq, intermediate]."""
    return F.silu(layer.product("gate_proj", normed)) * layer.product("up_proj", normed)


def layer_forward(
    config: ModelConfig,
    layer: DenseLayer,
    hidden: Tensor,  # [batch, seq, hidden]
    reach: Reach,
    past: BatchKV | None = None,
    start: int = 0,
) -> Tensor:
    """One decoder layer; the residual keeps the dtype of `hidden`."""
    normed = rms_norm(hidden, layer.input_layernorm, config.rms_norm_eps)
    hidden, normed = mlp_input(config, layer, hidden, attend(config, layer, normed, reach, past, start))
    return hidden + layer.product("down_proj", mlp_inner(layer, normed))
