"""Background fetching of offloaded layers into a small ring of buffers, in sweep order, without end.

Threads read the next layers whenever slots are free, wrapping around from the last layer to the first: while drafting
runs, the first layers of the coming sweep arrive. All threads read parts of one layer: two layers side by side would
end together, and nothing would be read while the first of them is computed. The consumer takes layers strictly in
order, each exactly once per sweep. An error on a thread is raised at the next `layer` call; `abandon` makes an
interrupted sweep start anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from eesd_lite.errors import StreamError
from eesd_lite.layer_blob import BLOCK, BlobLayout
from eesd_lite.packed_store import PackedStore
from eesd_lite.transformer import DecoderLayer

Bind = Callable[[BlobLayout, Tensor], DecoderLayer]
SMALLEST_PART = 512 << 10  # bytes: smaller reads cost a disk more than they gain


class Reader(Protocol):
    """What the threads read with: `blob_reader.BlobReader`, or something slower in tests."""

    @property
    def parallel(self) -> int:
        """How many reads may be under way at once."""
        ...

    def read(self, path: Path, buffer: Tensor, nbytes: int, offset: int = 0) -> None:
        """Bytes from `offset` of the file on into the first `nbytes` of `buffer`."""
        ...

    def close(self) -> None: ...


class Slot(Protocol):
    """One place of the ring. `buffer` is read into; the rest is called in the order listed."""

    @property
    def buffer(self) -> Tensor: ...

    # Reader threads, every one before its part: wait until the buffer may be overwritten. One at a time.
    def begin_fill(self) -> None: ...

    def end_fill(self, nbytes: int) -> None: ...  # reader thread: all bytes are in `buffer`

    def drop_fill(self) -> None: ...  # any thread, nobody writes any more: what was begun will not end; may be nothing

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

    def drop_fill(self) -> None:
        """Nothing to give back."""

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
        self._claimed = 0  # layers that threads have read or are reading since the last restart, in sweep order
        self._next_part = 0  # of the layer after those
        self._parts_read: dict[int, int] = {}  # of layers whose parts are not all there
        self._filled: set[int] = set()  # layers that lie in their slot: number n in slot n % ring
        self._taken = 0  # layers that the consumer has finished with
        self._writing = [0] * len(self._slots)  # threads that write to a slot, even for a sweep that was abandoned
        self._beginning = [threading.Lock() for _ in self._slots]
        self._checked: set[int] = set()  # layers whose content was compared with its checksum
        self._restarts = 0
        self.waited_seconds = 0.0  # of the consumer, for layers that were not there yet
        self._read_seconds = 0.0  # in which at least one read was under way
        self._reads, self._reads_since = 0, 0.0
        self._error: Exception | None = None
        self._closed = False
        count = max(1, reader.parallel)
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
        self._claimed = self._taken = self._next_part = 0
        self._filled.clear()
        self._parts_read.clear()
        self._restarts += 1
        self._drop_fills()
        self._changed.notify_all()

    def _drop_fills(self) -> None:
        """What lies half read in a slot is void, and so is what is being read: its last reader drops that."""
        for slot, writing in zip(self._slots, self._writing, strict=True):
            if not writing:
                slot.drop_fill()

    def close(self) -> None:
        """Stop the threads and close the files. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._drop_fills()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.reader.close()

    def _run(self) -> None:
        while (claim := self._claim()) is not None:
            number, part, restarts = claim
            error: Exception | None = None
            whole = False
            try:
                self._read(number, part)
                whole = self._is_whole(number, restarts)
                if whole:
                    self._finish(number)
            except Exception as raised:  # whatever it is, the consumer must hear of it instead of waiting for ever
                error = raised if isinstance(raised, StreamError) else StreamError(f"reading failed: {raised}")
            with self._lock:
                self._count_reads(-1)
                place = number % len(self._slots)
                self._writing[place] -= 1
                if self._writing[place] == 0 and (restarts != self._restarts or self._closed):
                    self._slots[place].drop_fill()
                if restarts == self._restarts:  # else the sweep was abandoned meanwhile: read again from its start
                    if error is not None:
                        self._error = self._error or error
                    elif whole:
                        self._filled.add(number)
                self._changed.notify_all()

    def _claim(self) -> tuple[int, int, int] | None:
        """The next number, which part of it to read once its slot is free, and the restarts so far; None: closed."""
        with self._lock:
            while not self._closed:
                number, part = self._claimed, self._next_part
                slot = number % len(self._slots)
                free = part > 0 or (number - self._taken < len(self._slots) and not self._writing[slot])
                if free and self._error is None:
                    self._writing[slot] += 1
                    self._next_part += 1
                    if self._next_part == len(self._parts(number)):
                        self._claimed, self._next_part = number + 1, 0
                    self._count_reads(1)
                    return number, part, self._restarts
                self._changed.wait()
            return None

    def _parts(self, number: int) -> list[tuple[int, int]]:
        """Where each part of the layer begins and ends: one a thread, unless the layer is small or in host memory."""
        index = self.layers[number % len(self.layers)]
        nbytes = self._store.layouts[index].nbytes
        count = 1 if index in self.host else max(1, min(len(self._threads), nbytes // SMALLEST_PART))
        cuts = [nbytes // BLOCK * part // count * BLOCK for part in range(count)]
        return list(zip(cuts, [*cuts[1:], nbytes], strict=True))

    def _read(self, number: int, part: int) -> None:
        index = self.layers[number % len(self.layers)]
        slot = self._slots[number % len(self._slots)]
        if index in self.host:
            return
        with self._beginning[number % len(self._slots)]:
            slot.begin_fill()
        begin, end = self._parts(number)[part]
        self.reader.read(self._store.path(index), slot.buffer[begin:], end - begin, begin)

    def _is_whole(self, number: int, restarts: int) -> bool:
        """Counts a part that was read; True for the last one of its layer."""
        with self._lock:
            if restarts != self._restarts:
                return False
            count = self._parts_read.pop(number, 0) + 1
            if count == len(self._parts(number)):
                return True
            self._parts_read[number] = count
            return False

    def _finish(self, number: int) -> None:
        """All bytes are there, or lie in host memory."""
        index = self.layers[number % len(self.layers)]
        slot = self._slots[number % len(self._slots)]
        nbytes = self._store.layouts[index].nbytes
        if index in self.host:
            slot.copy_fill(self.host[index], nbytes)
            return
        if index not in self._checked:  # once: a sweep has no time for more
            self._store.check(index, slot.buffer)
            self._checked.add(index)
        slot.end_fill(nbytes)
