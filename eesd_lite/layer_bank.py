"""All layers of the target, wherever their weights live: the one place that knows a layer's tier at run time.

Layers that stay where they are computed (on the device, or on the CPU beside it) are bound once; the others come
through the `LayerStreamer` in order. The bank counts what is consumed, so that invariant 1 can be checked by bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.ops import Reach
from eesd_lite.streamer import LayerStreamer
from eesd_lite.transformer import DecoderLayer, RunnableLayer


class HostLayer:
    """Tier host-compute: weights, keys and values stay in host memory, and only hidden states travel.

    The layer brings states, rows and rotary tables to the CPU itself, so that its caller need not know where it is.
    """

    def __init__(self, layer: DecoderLayer, reach: Reach) -> None:
        self._layer = layer
        self._reach = reach

    def forward(self, hidden: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], reach: Reach) -> None:
        """See `DecoderLayer.forward`; `hidden` may lie on any device, `cache` lies in host memory."""
        states = hidden.to("cpu")
        self._layer.forward(states, rows.to("cpu"), cache, self._reach)
        if states is not hidden:
            hidden.copy_(states)


class LayerBank:
    """`fixed` has the layers that stay where they are computed; the rest passes through `streamer`."""

    def __init__(
        self, fixed: Mapping[int, RunnableLayer], streamer: LayerStreamer | None, layer_bytes: Sequence[int]
    ) -> None:
        streamed = set(streamer.layers) if streamer is not None else set()
        assert set(fixed) | streamed == set(range(len(layer_bytes))) and not set(fixed) & streamed, (fixed, streamed)
        self.fixed = dict(fixed)
        self.streamer = streamer
        self.layer_bytes = tuple(layer_bytes)
        self.streamed_bytes = 0  # bytes of offloaded layers consumed so far
        self.forwards = [0] * len(layer_bytes)  # passes through every layer

    @property
    def resident(self) -> list[RunnableLayer]:
        """Layers of tier device, in order."""
        return [layer for _, layer in sorted(self.fixed.items()) if not isinstance(layer, HostLayer)]

    @property
    def computed_on_host(self) -> list[HostLayer]:
        """Layers of tier host-compute, in order."""
        return [layer for _, layer in sorted(self.fixed.items()) if isinstance(layer, HostLayer)]

    @property
    def waited_seconds(self) -> float:
        """How long layers were waited for."""
        return self.streamer.waited_seconds if self.streamer is not None else 0.0

    @property
    def read_seconds(self) -> float:
        """In how many seconds some layer was being read."""
        return self.streamer.read_seconds if self.streamer is not None else 0.0

    def layer(self, index: int) -> RunnableLayer:
        """See `LayerSource`."""
        self.forwards[index] += 1
        if index in self.fixed:
            return self.fixed[index]
        assert self.streamer is not None
        layer = self.streamer.layer(index)
        self.streamed_bytes += self.layer_bytes[index]
        return layer

    def done(self, index: int) -> None:
        """See `LayerSource`."""
        if index not in self.fixed and self.streamer is not None:
            self.streamer.done(index)

    def abandon(self) -> None:
        """After an interruption: the next sweep starts at its beginning."""
        if self.streamer is not None:
            self.streamer.abandon()

    def close(self) -> None:
        """Stop fetching."""
        if self.streamer is not None:
            self.streamer.close()
