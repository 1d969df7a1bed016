"""Background fetching of offloaded layers into a small ring of buffers, in sweep order, without end.

The thread reads the next layer whenever a slot is free, wrapping around from the last layer to the first: while
drafting runs, the first layers of the coming sweep arrive. The consumer takes layers strictly in order, each exactly
once per sweep. An error on the thread is raised at the next `layer` call; `abandon` makes an interrupted sweep start
anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from eesd_lite.errors import StreamError
from eesd_lite.layer_blob import BlobLayout
from eesd_lite.packed_store import PackedStore
from eesd_lite.transformer import DecoderLayer

Bind = Callable[[BlobLayout, Tensor], DecoderLayer]


class Reader(Protocol):
    """What the thread reads with: `blob_reader.BlobReader`, or something slower in tests."""

    def read(self, path: Path, buffer: Tensor, nbytes: int) -> None: ...

    def close(self) -> None: ...


class Slot(Protocol):
    """One place of the ring. `buffer` is read into; the rest is called in the order listed."""

    buffer: Tensor

    def begin_fill(self) -> None: ...  # reader thread: wait until the buffer may be overwritten

    def end_fill(self, nbytes: int) -> None: ...  # reader thread: the bytes are in `buffer`

    def acquire(self, layout: BlobLayout, bind: Bind) -> DecoderLayer: ...  # consumer: the layer, ready to run

    def release(self) -> None: ...  # consumer: done with it


class HostSlot:
    """The layer is computed where it was read to."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._bound: dict[BlobLayout, DecoderLayer] = {}

    def begin_fill(self) -> None:
        """Nothing to wait for: the ring's count already says that the consumer is done."""

    def end_fill(self, nbytes: int) -> None:
        """Nothing to copy."""

    def acquire(self, layout: BlobLayout, bind: Bind) -> DecoderLayer:
        if layout not in self._bound:  # layers of one layout share the views
            self._bound[layout] = bind(layout, self.buffer)
        return self._bound[layout]

    def release(self) -> None:
        """Nothing to record."""


class LayerStreamer:
    """Streams `layers` of `store` through `slots`. One consumer thread at a time."""

    def __init__(
        self, store: PackedStore, layers: Sequence[int], *, slots: Sequence[Slot], bind: Bind, reader: Reader
    ) -> None:
        assert layers and slots, (len(layers), len(slots))
        self.layers = tuple(layers)
        self.reader = reader
        self._store = store
        self._slots = tuple(slots)
        self._bind = bind
        # Entered directly: Ctrl-C could strike inside Condition.__enter__ and leave the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._filled = 0  # layers read since the last restart; the next goes to slot filled % ring
        self._taken = 0  # layers that the consumer has finished with
        self._restarts = 0
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="eesd-streamer", daemon=True)
        self._thread.start()

    def layer(self, index: int) -> DecoderLayer:
        """The next layer of the sweep, which must be `index`; waits until it is there."""
        expected = self.layers[self._taken % len(self.layers)]
        assert index == expected, f"sweep is at layer {expected}, asked for {index}"
        with self._lock:
            while self._filled <= self._taken and self._error is None and not self._closed:
                self._changed.wait()
            if self._error is not None:
                error, self._error = self._error, None
                self._restart()
                raise error
            if self._closed:
                raise StreamError("the engine is closed")
        slot = self._slots[self._taken % len(self._slots)]
        return slot.acquire(self._store.layouts[index], self._bind)

    def done(self, index: int) -> None:
        """Give the slot of layer `index` back."""
        assert index == self.layers[self._taken % len(self.layers)], index
        self._slots[self._taken % len(self._slots)].release()
        with self._lock:
            self._taken += 1
            self._changed.notify_all()

    def abandon(self) -> None:
        """Begin the next sweep at the first layer, wherever an interrupted one stopped."""
        with self._lock:
            if self._taken % len(self.layers) != 0:
                self._restart()
            self._changed.notify_all()  # `done` may have been interrupted before it said so

    def _restart(self) -> None:
        self._filled = self._taken = 0
        self._restarts += 1
        self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and close the files. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.reader.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and (self._error is not None or self._filled - self._taken >= len(self._slots)):
                    self._changed.wait()
                if self._closed:
                    return
                number, restarts = self._filled, self._restarts
            try:
                self._fill(number)
            except Exception as error:  # whatever it is, the consumer must hear of it instead of waiting for ever
                with self._lock:
                    if restarts == self._restarts:
                        self._error = (
                            error if isinstance(error, StreamError) else StreamError(f"reading failed: {error}")
                        )
                        self._changed.notify_all()
                continue
            with self._lock:
                if restarts == self._restarts:  # else the sweep was abandoned meanwhile: read again from its start
                    self._filled += 1
                    self._changed.notify_all()

    def _fill(self, number: int) -> None:
        index = self.layers[number % len(self.layers)]
        slot = self._slots[number % len(self._slots)]
        nbytes = self._store.layouts[index].nbytes
        slot.begin_fill()
        self.reader.read(self._store.path(index), slot.buffer, nbytes)
        slot.end_fill(nbytes)


class LayerBank:
    """All layers of the target: the first ones resident, the rest through the streamer. Counts what is consumed."""

    def __init__(
        self, resident: Sequence[DecoderLayer], streamer: LayerStreamer | None, layer_bytes: Sequence[int]
    ) -> None:
        self.resident = list(resident)
        self.streamer = streamer
        self.layer_bytes = tuple(layer_bytes)
        self.streamed_bytes = 0  # bytes of offloaded layers consumed so far
        self.forwards = [0] * len(layer_bytes)  # passes through every layer

    def layer(self, index: int) -> DecoderLayer:
        """See `LayerSource`."""
        self.forwards[index] += 1
        if index < len(self.resident):
            return self.resident[index]
        assert self.streamer is not None, f"layer {index} is neither resident nor streamed"
        layer = self.streamer.layer(index)
        self.streamed_bytes += self.layer_bytes[index]
        return layer

    def done(self, index: int) -> None:
        """See `LayerSource`."""
        if index >= len(self.resident) and self.streamer is not None:
            self.streamer.done(index)

    def abandon(self) -> None:
        """After an interruption: the next sweep starts at its beginning."""
        if self.streamer is not None:
            self.streamer.abandon()

    def close(self) -> None:
        """Stop fetching."""
        if self.streamer is not None:
            self.streamer.close()
