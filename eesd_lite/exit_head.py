"""The exit head at work: from the state entering target layer N to a guess of the next token.

One 16-bit decoder layer with its own keys and values, an affine map and an RMSNorm, then the target's own lm_head
(DESIGN.md, section 2). Its arithmetic is row-invariant like the target's, so its cache after any number of rounds is
what a fresh prefill would give. Weights come from `eesd_lite.head_file`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eesd_lite.cache import KVCache, Rows
from eesd_lite.config import ModelConfig
from eesd_lite.head_file import HeadTensors
from eesd_lite.layer_blob import fill, lay_out, page_buffer
from eesd_lite.ops import Ops, Rope
from eesd_lite.packing import KernelSet
from eesd_lite.transformer import DecoderLayer


def _layer_blob(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's layer under the names that a layer's blob uses, products fused."""

    def stack(block: str, *names: str) -> Tensor:
        return torch.cat([tensors[f"layer.{block}.{name}.weight"] for name in names]).to(dtype)

    return {
        "qkv.0.weight": stack("self_attn", "q_proj", "k_proj", "v_proj"),
        "o.0.weight": stack("self_attn", "o_proj"),
        "gate_up.0.weight": stack("mlp", "gate_proj", "up_proj"),
        "down.0.weight": stack("mlp", "down_proj"),
        "input_norm.weight": tensors["layer.input_layernorm.weight"].to(dtype),
        "post_attention_norm.weight": tensors["layer.post_attention_layernorm.weight"].to(dtype),
        "affine.weight": tensors["affine.weight"].to(dtype),
        "affine.bias": tensors["affine.bias"].to(dtype),
        "norm.weight": tensors["norm.weight"].to(dtype),
    }


class ExitHead:
    """A head bound to one engine: weights, own KV cache, and the two things it does."""

    def __init__(
        self,
        config: ModelConfig,
        head: HeadTensors,
        *,
        ops: Ops,
        kernels: KernelSet,
        rope: Rope,
        kv: KVCache,
        device: torch.device | str = "cpu",
    ) -> None:
        stored = _layer_blob(dict(head.tensors), kernels.dense.dtype)
        names = {f"{module}.0": kernels.dense.name for module in ("qkv", "o", "gate_up", "down")}
        layout = lay_out(stored, names)
        buffer = page_buffer(layout.nbytes)
        fill(layout, buffer, stored)
        if torch.device(device).type != "cpu":
            buffer = buffer.to(device)
        views = layout.views(buffer)
        self.exit_layer = head.exit_layer
        self.nbytes = layout.nbytes
        self._ops, self._rope, self._kv = ops, rope, kv
        self._eps = config.rms_norm_eps
        self._layer = DecoderLayer(config, ops, layout, buffer, kernels)
        self._affine, self._bias, self._norm = views["affine.weight"], views["affine.bias"], views["norm.weight"]

    def forward(self, state: Tensor, rows: Rows) -> Tensor:
        """state float32 [rows, hidden] entering layer N (left as it is) -> input of lm_head, [rows, hidden]."""
        hidden = state.clone()
        self._layer.forward(hidden, rows, self._kv.layer(0), self._rope)
        mapped = self._ops.dense(hidden.to(self._ops.dtype), self._affine, self._bias)
        return self._ops.rms_norm(mapped.to(torch.float32), self._norm, self._eps)

    def keep(self, state: Tensor, rows: Rows) -> None:
        """Only the keys and values of rows from which nothing is drafted; `state` as in `forward`."""
        self._layer.write_kv(state, rows, self._kv.layer(0), self._rope)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Compact an accepted tree path, as in the target's cache."""
        self._kv.move(sources, targets)
