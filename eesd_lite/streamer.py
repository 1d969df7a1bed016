"""Background fetching of offloaded layers into a small ring of buffers, in sweep order, without end.

Threads read the next layers whenever slots are free, wrapping around from the last layer to the first: while drafting
runs, the first layers of the coming sweep arrive. The consumer takes layers strictly in order, each exactly once per
sweep. An error on a thread is raised at the next `layer` call; `abandon` makes an interrupted sweep start anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from eesd_lite.errors import StreamError
from eesd_lite.layer_blob import BlobLayout
from eesd_lite.packed_store import PackedStore
from eesd_lite.transformer import DecoderLayer

Bind = Callable[[BlobLayout, Tensor], DecoderLayer]


class Reader(Protocol):
    """What the threads read with: `blob_reader.BlobReader`, or something slower in tests."""

    @property
    def parallel(self) -> int:
        """How many reads may be under way at once."""
        ...

    def read(self, path: Path, buffer: Tensor, nbytes: int) -> None: ...

    def close(self) -> None: ...


class Slot(Protocol):
    """One place of the ring. `buffer` is read into; the rest is called in the order listed."""

    @property
    def buffer(self) -> Tensor: ...

    def begin_fill(self) -> None: ...  # reader thread: wait until the buffer may be overwritten

    def end_fill(self, nbytes: int) -> None: ...  # reader thread: the bytes are in `buffer`

    def copy_fill(self, source: Tensor, nbytes: int) -> None: ...  # reader thread: instead of both, from host memory

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

    def copy_fill(self, source: Tensor, nbytes: int) -> None:
        """One plain copy: torch's would start a second set of OpenMP threads from here."""
        self.buffer.numpy()[:nbytes] = source.numpy()[:nbytes]

    def acquire(self, layout: BlobLayout, bind: Bind) -> DecoderLayer:
        if layout not in self._bound:  # layers of one layout share the views
            self._bound[layout] = bind(layout, self.buffer)
        return self._bound[layout]

    def release(self) -> None:
        """Nothing to record."""


class LayerStreamer:
    """Streams `layers` of `store` through `slots`: from disk, or from host memory those whose blobs `host` has.

    One consumer thread at a time.
    """

    def __init__(
        self,
        store: PackedStore,
        layers: Sequence[int],
        *,
        slots: Sequence[Slot],
        bind: Bind,
        reader: Reader,
        host: Mapping[int, Tensor] | None = None,
    ) -> None:
        assert layers and slots, (len(layers), len(slots))
        self.layers = tuple(layers)
        self.reader = reader
        self.host = dict(host or {})
        self._store = store
        self._slots = tuple(slots)
        self._bind = bind
        # Entered directly: Ctrl-C could strike inside Condition.__enter__ and leave the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._claimed = 0  # layers that a thread has read or is reading since the last restart, in sweep order
        self._filled: set[int] = set()  # of those, the ones that lie in their slot: number n in slot n % ring
        self._taken = 0  # layers that the consumer has finished with
        self._reading: set[int] = set()  # slots that a thread writes to, even for a sweep that was abandoned
        self._checked: set[int] = set()  # layers whose content was compared with its checksum
        self._restarts = 0
        self.waited_seconds = 0.0  # of the consumer, for layers that were not there yet
        self._read_seconds = 0.0  # in which at least one read was under way
        self._reads, self._reads_since = 0, 0.0
        self._error: Exception | None = None
        self._closed = False
        count = max(1, min(reader.parallel, len(slots)))
        self._threads = [threading.Thread(target=self._run, name="eesd-streamer", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def layer(self, index: int) -> DecoderLayer:
        """The next layer of the sweep, which must be `index`; waits until it is there."""
        expected = self.layers[self._taken % len(self.layers)]
        assert index == expected, f"sweep is at layer {expected}, asked for {index}"
        with self._lock:
            if self._taken not in self._filled:
                self._wait_for_fill()
            if self._error is not None:
                error, self._error = self._error, None
                self._restart()
                raise error
            if self._closed:
                raise StreamError("the engine is closed")
        slot = self._slots[self._taken % len(self._slots)]
        return slot.acquire(self._store.layouts[index], self._bind)

    def _wait_for_fill(self) -> None:
        started = time.perf_counter()
        while self._taken not in self._filled and self._error is None and not self._closed:
            self._changed.wait()
        self.waited_seconds += time.perf_counter() - started

    @property
    def read_seconds(self) -> float:
        """Seconds in which at least one read was under way."""
        with self._lock:
            return self._read_seconds + (time.perf_counter() - self._reads_since if self._reads else 0.0)

    def _count_reads(self, change: int) -> None:
        """Reads that begin (1) or end (-1); under the lock."""
        now = time.perf_counter()
        if self._reads:
            self._read_seconds += now - self._reads_since
        self._reads += change
        self._reads_since = now

    def done(self, index: int) -> None:
        """Give the slot of layer `index` back."""
        assert index == self.layers[self._taken % len(self.layers)], index
        self._slots[self._taken % len(self._slots)].release()
        with self._lock:
            self._filled.discard(self._taken)
            self._taken += 1
            self._changed.notify_all()

    def abandon(self) -> None:
        """Begin the next sweep at the first layer, wherever an interrupted one stopped."""
        with self._lock:
            if self._taken % len(self.layers) != 0:
                self._restart()
            self._changed.notify_all()  # `done` may have been interrupted before it said so

    def _restart(self) -> None:
        self._claimed = self._taken = 0
        self._filled.clear()
        self._restarts += 1
        self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads and close the files. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.reader.close()

    def _run(self) -> None:
        while (claim := self._claim()) is not None:
            number, restarts = claim
            error: Exception | None = None
            try:
                self._fill(number)
            except Exception as raised:  # whatever it is, the consumer must hear of it instead of waiting for ever
                error = raised if isinstance(raised, StreamError) else StreamError(f"reading failed: {raised}")
            with self._lock:
                self._count_reads(-1)
                self._reading.discard(number % len(self._slots))
                if restarts == self._restarts:  # else the sweep was abandoned meanwhile: read again from its start
                    if error is None:
                        self._filled.add(number)
                    else:
                        self._error = self._error or error
                self._changed.notify_all()

    def _claim(self) -> tuple[int, int] | None:
        """The next number to read and the restarts so far, once its slot is free; None when the streamer is closed."""
        with self._lock:
            while not self._closed:
                slot = self._claimed % len(self._slots)
                free = self._claimed - self._taken < len(self._slots) and slot not in self._reading
                if free and self._error is None:
                    self._reading.add(slot)
                    self._claimed += 1
                    self._count_reads(1)
                    return self._claimed - 1, self._restarts
                self._changed.wait()
            return None

    def _fill(self, number: int) -> None:
        index = self.layers[number % len(self.layers)]
        slot = self._slots[number % len(self._slots)]
        nbytes = self._store.layouts[index].nbytes
        if index in self.host:
            slot.copy_fill(self.host[index], nbytes)
            return
        slot.begin_fill()
        self.reader.read(self._store.path(index), slot.buffer, nbytes)
        if index not in self._checked:  # once: a sweep has no time for more
            self._store.check(index, slot.buffer)
            self._checked.add(index)
        slot.end_fill(nbytes)
