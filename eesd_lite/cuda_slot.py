"""A ring slot whose layer is computed on a CUDA device, fed on a copy stream of its own.

Layers in host memory are copied from their own pinned blob, layers on disk pass through a pinned staging buffer. The
copy of one layer overlaps the products of another; events order them, so the device is never synchronized as a whole.
Where memory cannot be pinned the copy goes through pageable memory, which is slower and otherwise the same. Covered by
`gpu`-marked tests; used by `eesd_lite.bank_loader` on CUDA only.
"""

from __future__ import annotations

import threading
import warnings

import torch
from torch import Tensor

from eesd_lite.layer_blob import BlobLayout, page_buffer
from eesd_lite.streamer import Bind
from eesd_lite.transformer import DecoderLayer

_UNPINNED = "page-locked memory ran out: streaming through pageable memory, which is slower"


class Staging:
    """Pinned host buffers that layers on disk pass through; fewer than slots will do."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._free = [(pin(page_buffer(nbytes)), torch.cuda.Event()) for _ in range(count)]
        # Entered directly, as in the streamer: `give` is also called by the thread that Ctrl-C strikes.
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)

    def take(self) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer that no copy reads from any more, and the event to record behind the next one."""
        with self._lock:
            while not self._free:
                self._returned.wait()
            buffer, copied = self._free.pop(0)
        copied.synchronize()
        return buffer, copied

    def give(self, buffer: Tensor, copied: torch.cuda.Event) -> None:
        """Back after its copy was queued and `copied` recorded behind it, or unused."""
        with self._lock:
            self._free.append((buffer, copied))
            self._returned.notify()


class CudaSlot:
    """See `streamer.Slot`. `staging` may be None where no layer is on disk."""

    def __init__(self, nbytes: int, device: torch.device, stream: torch.cuda.Stream, staging: Staging | None) -> None:
        self._device_buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._stream = stream
        self._device = device
        self._staging = staging
        self._staged: tuple[Tensor, torch.cuda.Event] | None = None
        self._copied = torch.cuda.Event()  # the device holds the layer
        self._computed = torch.cuda.Event()  # the device buffer may be overwritten
        self._bound: dict[BlobLayout, DecoderLayer] = {}

    @property
    def buffer(self) -> Tensor:
        """The staging buffer between `begin_fill` and `end_fill`."""
        assert self._staged is not None
        return self._staged[0]

    def begin_fill(self) -> None:
        """The reader waits here until the last copy out of a staging buffer has ended."""
        assert self._staging is not None
        if self._staged is None:  # else another part of the layer began, or failed: its buffer is still here
            self._staged = self._staging.take()

    def end_fill(self, nbytes: int) -> None:
        """Queue the copy out of the staging buffer."""
        assert self._staged is not None and self._staging is not None
        buffer, copied = self._staged
        self.copy_fill(buffer, nbytes)
        copied.record(self._stream)
        self._staged = None
        self._staging.give(buffer, copied)

    def drop_fill(self) -> None:
        """The staging buffer goes back: there may be fewer than slots, and the next sweep begins in another slot."""
        if self._staged is not None and self._staging is not None:
            staged, self._staged = self._staged, None
            self._staging.give(*staged)

    def copy_fill(self, source: Tensor, nbytes: int) -> None:
        """Queue a copy from host memory behind the products that still use the device buffer."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            self._device_buffer[:nbytes].copy_(source[:nbytes], non_blocking=True)
            self._copied.record(self._stream)

    def acquire(self, layout: BlobLayout, bind: Bind) -> DecoderLayer:
        """The compute stream waits for the copy; the host does not."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        if layout not in self._bound:
            self._bound[layout] = bind(layout, self._device_buffer)
        return self._bound[layout]

    def release(self) -> None:
        """Mark in the compute stream where the layer's last product was queued."""
        self._computed.record(torch.cuda.current_stream(self._device))


def pin(buffer: Tensor) -> Tensor:
    """Page-lock a page-aligned uint8 buffer for as long as the process lives; itself, pageable, where that fails.

    One buffer a layer: drivers with a cap on a single allocation (WSL2, containers) still pin some of them.
    """
    # Registering our own pages keeps them page-aligned for O_DIRECT, which pin_memory() does not promise.
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)  # type: ignore[attr-defined]
    if int(error) != 0:
        warnings.warn(_UNPINNED, stacklevel=2)  # the same text and place: shown once
    return buffer
