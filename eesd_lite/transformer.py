"""The Llama-family decoder layer over rows, and runs of layers. This is the hot loop.

Hidden states are float32 [rows, hidden] and are updated in place; matrix products and norms are in the compute dtype.
A row may be a prompt token, the current token or a node of a draft tree: `Rows` says what it sees. Nothing here knows
where weights live (`LayerSource`) or why rows are run (`eesd_lite.speculative`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from eesd_lite.cache import KVCache, Rows
from eesd_lite.config import ModelConfig
from eesd_lite.layer_blob import BlobLayout
from eesd_lite.ops import Ops, QKNorm, Reach
from eesd_lite.packing import KernelSet
from quant.linear import GPTQLinear


class JoinedLinear:
    """Parts of a fused module that could not be packed together: their outputs side by side."""

    def __init__(self, parts: list[GPTQLinear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


def bind_linear(
    module: str, layout: BlobLayout, views: Mapping[str, Tensor], kernels: KernelSet
) -> GPTQLinear | JoinedLinear:
    """The linear `module` of a layer over views of its blob."""
    parts = []
    for part, kernel in layout.kernels:
        if part.rsplit(".", 1)[0] == module:
            stored = {
                name.removeprefix(f"{part}."): view for name, view in views.items() if name.startswith(f"{part}.")
            }
            parts.append(GPTQLinear(kernels.by_name(kernel), stored))
    assert parts, f"layout has no module {module}"
    return parts[0] if len(parts) == 1 else JoinedLinear(parts)


class DecoderLayer:
    """One decoder layer bound to a buffer that holds its blob."""

    def __init__(self, config: ModelConfig, ops: Ops, layout: BlobLayout, buffer: Tensor, kernels: KernelSet) -> None:
        views = layout.views(buffer)
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.num_heads = config.num_attention_heads
        self.input_norm = views["input_norm.weight"]
        self.post_attention_norm = views["post_attention_norm.weight"]
        self.qkv = bind_linear("qkv", layout, views, kernels)
        self.o = bind_linear("o", layout, views, kernels)
        self.gate_up = bind_linear("gate_up", layout, views, kernels)
        self.down = bind_linear("down", layout, views, kernels)
        self.qk_norm: QKNorm | None = None
        if config.qk_norm:
            self.qk_norm = QKNorm(views["q_norm.weight"], views["k_norm.weight"], config.rms_norm_eps)

    def forward(self, hidden: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], reach: Reach) -> None:
        """hidden float32 [rows, hidden], updated in place; keys and values of the rows go into `cache`."""
        ops = self.ops
        qkv = self.qkv(ops.rms_norm(hidden, self.input_norm, self.eps))
        mixed = ops.attention(qkv, cache[0], cache[1], rows, reach, self.num_heads, self.qk_norm)
        normed = ops.add_rms_norm(hidden, self.o(mixed), self.post_attention_norm, self.eps)
        hidden += self.down(ops.silu_mul(self.gate_up(normed)))

    def write_kv(self, hidden: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], reach: Reach) -> None:
        """Only the keys and values of the rows: what later rows need of rows whose own output nobody reads."""
        qkv = self.qkv(self.ops.rms_norm(hidden, self.input_norm, self.eps))
        self.ops.attention(qkv, cache[0], cache[1], rows.alone(), reach, self.num_heads, self.qk_norm)


class RunnableLayer(Protocol):
    """A decoder layer that can be run, wherever it computes."""

    def forward(self, hidden: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], reach: Reach) -> None:
        """See `DecoderLayer.forward`."""
        ...


class LayerSource(Protocol):
    """Where layers come from. Each is borrowed by `layer` and given back by `done`, in order."""

    def layer(self, index: int) -> RunnableLayer:
        """Layer `index`, ready to run: waits for it if it is streamed."""
        ...

    def done(self, index: int) -> None:
        """The caller has finished with layer `index`; its buffer may be filled again."""
        ...


def run_layers(
    source: LayerSource,
    layers: range,
    hidden: Tensor,  # float32 [rows, hidden], updated in place
    rows: Rows,
    *,
    kv: KVCache,
    reaches: Sequence[Reach],  # one for every layer of the model
    chunk: int,
    done: Callable[[int], None] | None = None,
) -> None:
    """Pass all rows through `layers`, layer-major: one layer is fetched once, however many chunks of rows pass it.

    `done` hears of every layer that all rows have passed.
    """
    pieces = [(hidden, rows)] if len(rows) <= chunk else _pieces(hidden, rows, chunk)
    for index in layers:
        layer = source.layer(index)
        cache = kv.layer(index)
        for piece, piece_rows in pieces:
            layer.forward(piece, piece_rows, cache, reaches[index])
        source.done(index)
        if done is not None:
            done(index)


def _pieces(hidden: Tensor, rows: Rows, chunk: int) -> list[tuple[Tensor, Rows]]:
    starts = range(0, len(rows), chunk)
    return [(hidden[i : i + chunk], rows.slice(i, min(i + chunk, len(rows)))) for i in starts]
