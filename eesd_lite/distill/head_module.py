"""The exit head as a trainable module, over packed tokens (no padding outside attention).

Parameters carry the names of the head file. Whole sequences are laid end to end, [tokens, H]; `Packing` tells
attention where each begins. Weights are float32 masters; matrix products run in `compute` (bfloat16 on CPUs that have
it). Called by `ridge` for the closed form and by `train`; the engine has its own, row-invariant forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eesd_lite.dense import band, rotate
from eesd_lite.layer_shapes import HeadShape
from eesd_lite.ops import Reach


@dataclass(frozen=True)
class Packing:
    """Where the packed tokens of several sequences sit in a right-padded [batch, seq] grid."""

    positions: Tensor  # [tokens] int64, from 0 in each sequence
    to_grid: Tensor  # [batch, seq] int64: row of the packed tokens; padding repeats the sequence's first row
    from_grid: Tensor  # [tokens] int64: index into the flattened grid

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Packing:
        sizes = torch.tensor(list(lengths), dtype=torch.int64)
        longest = int(sizes.max())
        starts = sizes.cumsum(0) - sizes
        columns = torch.arange(longest)
        real = columns < sizes[:, None]
        to_grid = torch.where(real, starts[:, None] + columns, starts[:, None])
        positions = columns.expand(len(sizes), longest)[real]
        from_grid = real.flatten().nonzero().squeeze(1)
        return cls(positions.to(device), to_grid.to(device), from_grid.to(device))


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        heads = shape.num_attention_heads * shape.head_dim
        kv = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, heads, bias="q_proj" in shape.biases)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias="k_proj" in shape.biases)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias="v_proj" in shape.biases)
        self.o_proj = nn.Linear(heads, shape.hidden_size, bias="o_proj" in shape.biases)
        if shape.qk_norm:
            self.q_norm, self.k_norm = _Norm(shape.head_dim), _Norm(shape.head_dim)


class _Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias="gate_proj" in shape.biases)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias="up_proj" in shape.biases)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias="down_proj" in shape.biases)


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden_size)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden_size)
        self.mlp = _Mlp(shape)


class ExitHead(nn.Module):
    """u = A.layer(h) + b, then RMSNorm with the head's own weight: what the target's lm_head takes."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        shape: HeadShape,
        reach: Reach,
        *,
        eps: float,
        compute: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.compute, self.window = shape, eps, compute, reach.window
        self.layer = _Layer(shape)
        self.affine = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.norm = _Norm(shape.hidden_size)
        self.register_buffer("cos", reach.rope[0], persistent=False)  # [context, head_dim / 2] float32
        self.register_buffer("sin", reach.rope[1], persistent=False)

    def load(self, tensors: Mapping[str, Tensor]) -> ExitHead:
        self.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return self

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def forward(self, states: Tensor, positions: Tensor, to_grid: Tensor, from_grid: Tensor) -> Tensor:
        """[tokens, H] states entering target layer N -> [tokens, H] float32 normalized states."""
        last = self.run_layer(states, Packing(positions, to_grid, from_grid))
        return self.finish(last)

    def finish(self, last: Tensor) -> Tensor:
        return self._norm(self._product(last, self.affine).float(), self.norm).float()

    def run_layer(self, states: Tensor, packing: Packing) -> Tensor:
        """The decoder layer alone: [tokens, H] -> [tokens, H] float32 residual stream."""
        layer = self.layer
        states = states.float()
        states = states + self._attend(self._norm(states, layer.input_layernorm), packing)
        normed = self._norm(states, layer.post_attention_layernorm)
        mlp = layer.mlp
        inner = F.silu(self._product(normed, mlp.gate_proj)) * self._product(normed, mlp.up_proj)
        return states + self._product(inner, mlp.down_proj)

    def _norm(self, x: Tensor, norm: _Norm) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, self.eps)

    def _product(self, x: Tensor, linear: nn.Linear) -> Tensor:
        bias = None if linear.bias is None else linear.bias.to(self.compute)
        return F.linear(x.to(self.compute), linear.weight.to(self.compute), bias)

    def _attend(self, normed: Tensor, packing: Packing) -> Tensor:
        shape, attention = self.shape, self.layer.self_attn
        normed = normed.to(self.compute)
        tokens = normed.shape[0]
        cos = self.cos[packing.positions].unsqueeze(1).to(self.compute)  # [tokens, 1, head_dim / 2]
        sin = self.sin[packing.positions].unsqueeze(1).to(self.compute)

        def heads(linear: nn.Linear) -> Tensor:
            return self._product(normed, linear).view(tokens, -1, shape.head_dim)

        def grid(x: Tensor) -> Tensor:  # [tokens, heads, head_dim] -> [batch, heads, seq, head_dim]
            batch, seq = packing.to_grid.shape
            rows = x.index_select(0, packing.to_grid.flatten())
            return rows.view(batch, seq, -1, shape.head_dim).transpose(1, 2)

        query, key = heads(attention.q_proj), heads(attention.k_proj)
        if shape.qk_norm:
            query = self._norm(query.float(), attention.q_norm).to(self.compute)
            key = self._norm(key.float(), attention.k_norm).to(self.compute)
        # Causal and right-padded: a real position never sees padding, so no mask is needed for it.
        mask = band(packing.to_grid.shape[1], self.window, normed.device)
        mixed = F.scaled_dot_product_attention(
            grid(rotate(query, cos, sin)),
            grid(rotate(key, cos, sin)),
            grid(heads(attention.v_proj)),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=shape.num_attention_heads != shape.num_key_value_heads,
        )
        flat = mixed.transpose(1, 2).reshape(-1, shape.num_attention_heads * shape.head_dim)
        return self._product(flat.index_select(0, packing.from_grid), attention.o_proj)
