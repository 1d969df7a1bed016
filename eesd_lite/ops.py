"""The arithmetic of a layer that is not an int4 product, as a protocol, and its plain torch form.

Every operation is row-invariant: the result of a row is the same bits however many rows share the call. `TorchOps`
has that by construction, since it computes one row at a time; it runs on any device in float32 or bfloat16 and is the
oracle for `FusedCpuOps`. Sums are float32; results are rounded once, to the compute dtype. The residual is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from eesd_lite.cache import Rows

Rope = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each float32 [context, head_dim / 2]
_WEIGHT_CHUNK = 4096  # rows of a weight that are widened to float32 at a time


@dataclass(frozen=True)
class Reach:
    """What positions mean to a layer's attention: how far they turn a head, and how far back a row sees."""

    rope: Rope
    window: int | None = None  # a row sees the last `window` of its keys, itself included; None: all of them


class QKNorm(NamedTuple):
    """RMSNorm of every head of queries and keys before rotation; weights [head_dim] in the compute dtype."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Ops(Protocol):
    """What the transformer and the exit head call. All tensors are contiguous, and on one device."""

    name: str
    dtype: torch.dtype

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x float32 [R, H] -> [R, H] in the compute dtype."""
        ...

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual (float32 [R, H]) += delta (compute dtype), in place; then rms_norm(residual)."""
        ...

    def attention(
        self,
        qkv: torch.Tensor,  # [R, (num_heads + 2 * num_key_value_heads) * head_dim]
        k_cache: torch.Tensor,  # [num_key_value_heads, capacity, head_dim]
        v_cache: torch.Tensor,
        rows: Rows,
        reach: Reach,
        num_heads: int,
        qk_norm: QKNorm | None = None,
    ) -> torch.Tensor:
        """Normalize q and k if asked, rotate them, write k and v of all rows to rows.slots, then attend.

        -> [R, num_heads * head_dim] in the compute dtype
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[R, 2 I] -> silu(gate) * up, [R, I]."""
        ...

    def dense(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [R, K], weight [N, K] -> [R, N] in the compute dtype."""
        ...

    def logits(self, x: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        """x [R, H], lm_head [V, H] -> float32 [R, V]."""
        ...


def attended_slots(rows: Rows, row: int, window: int | None = None) -> torch.Tensor:
    """The slots that a row attends, in sequence order; of all that it could see, the last `window`."""
    prefix = torch.arange(int(rows.prefix[row]), device=rows.slots.device)
    path = rows.paths[row]
    slots = torch.cat([prefix, path[path >= 0]])
    return slots if window is None else slots[-window:]


class TorchOps:
    """One row at a time in float32. Each row is copied first: a product's last bits may depend on alignment."""

    name = "torch"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        assert dtype in (torch.float32, torch.bfloat16), f"dtype {dtype}"
        self.dtype = dtype

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.dim() == 2 and weight.shape == (x.shape[1],), f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        scale = weight.float()
        for row in range(x.shape[0]):
            values = x[row].to(torch.float32, copy=True)
            out[row] = values * torch.rsqrt(values.square().mean() + eps) * scale
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert residual.dtype == torch.float32, f"residual is {residual.dtype}"
        assert residual.shape == delta.shape, f"residual {tuple(residual.shape)}, delta {tuple(delta.shape)}"
        residual += delta
        return self.rms_norm(residual, weight, eps)

    def attention(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: Rows,
        reach: Reach,
        num_heads: int,
        qk_norm: QKNorm | None = None,
    ) -> torch.Tensor:
        num_kv, _, head_dim = k_cache.shape
        width = (num_heads + 2 * num_kv) * head_dim
        assert qkv.shape == (len(rows), width), f"qkv {tuple(qkv.shape)}, expected {(len(rows), width)}"
        queries = []
        for row in range(len(rows)):
            heads = qkv[row].to(torch.float32, copy=True).view(-1, head_dim)
            query, key, value = heads.split([num_heads, num_kv, num_kv])
            if qk_norm is not None:
                query, key = (_norm_heads(x, w, qk_norm.eps) for x, w in ((query, qk_norm.query), (key, qk_norm.key)))
            cos, sin = (table[rows.positions[row]] for table in reach.rope)
            queries.append(_rotate(query, cos, sin))
            k_cache[:, rows.slots[row]] = _rotate(key, cos, sin).to(k_cache.dtype)
            v_cache[:, rows.slots[row]] = value.to(v_cache.dtype)
        out = torch.empty(len(rows), num_heads * head_dim, dtype=self.dtype, device=qkv.device)
        for row, query in enumerate(queries):
            slots = attended_slots(rows, row, reach.window)
            keys, values = k_cache[:, slots].float(), v_cache[:, slots].float()  # [num_kv, keys, head_dim]
            grouped = query.view(num_kv, num_heads // num_kv, head_dim)
            scores = torch.bmm(grouped, keys.transpose(1, 2)) * head_dim**-0.5
            out[row] = torch.bmm(torch.softmax(scores, dim=-1), values).flatten()
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=self.dtype, device=gate_up.device)
        for row in range(gate_up.shape[0]):
            gate, up = gate_up[row].to(torch.float32, copy=True).chunk(2)
            out[row] = torch.nn.functional.silu(gate) * up
        return out

    def dense(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self.logits(x, weight)
        if bias is not None:
            out += bias
        return out.to(self.dtype)

    def logits(self, x: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 2 and lm_head.shape[1] == x.shape[1], f"x {tuple(x.shape)}, weight {tuple(lm_head.shape)}"
        rows = [row.to(torch.float32, copy=True) for row in x]
        out = torch.empty(x.shape[0], lm_head.shape[0], dtype=torch.float32, device=x.device)
        for start in range(0, lm_head.shape[0], _WEIGHT_CHUNK):
            chunk = lm_head[start : start + _WEIGHT_CHUNK].float()
            for row, values in enumerate(rows):
                out[row, start : start + _WEIGHT_CHUNK] = torch.mv(chunk, values)
        return out


def _norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension; heads [n, head_dim] float32."""
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim / 2), as Hugging Face's Llama does; heads [n, head_dim] float32."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
