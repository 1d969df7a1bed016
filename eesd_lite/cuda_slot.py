"""A ring slot whose layer is computed on a CUDA device: disk to pinned memory to device, on a copy stream of its own.

The copy of one layer overlaps the products of another; events order them, so the device is never synchronized as a
whole. Where memory cannot be pinned the copy goes through pageable memory, which is slower and otherwise the same.
Covered by `gpu`-marked tests; used by `eesd_lite.loader` on CUDA only.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from eesd_lite.layer_blob import BlobLayout, page_buffer
from eesd_lite.streamer import Bind
from eesd_lite.transformer import DecoderLayer


class CudaSlot:
    """See `streamer.Slot`."""

    def __init__(self, nbytes: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.buffer = _pinned(nbytes)
        self._device_buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._stream = stream
        self._device = device
        self._copied = torch.cuda.Event()  # the device holds the layer, the host buffer may be overwritten
        self._computed = torch.cuda.Event()  # the device buffer may be overwritten
        self._bound: dict[BlobLayout, DecoderLayer] = {}

    def begin_fill(self) -> None:
        """The reader waits here until the last copy out of the host buffer has ended."""
        self._copied.synchronize()

    def end_fill(self, nbytes: int) -> None:
        """Queue the copy behind the products that still use the device buffer."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed)
            self._device_buffer[:nbytes].copy_(self.buffer[:nbytes], non_blocking=True)
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


def _pinned(nbytes: int) -> Tensor:
    buffer = page_buffer(nbytes)
    # Registering our own pages keeps them page-aligned for O_DIRECT, which pin_memory() does not promise.
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0)  # type: ignore[attr-defined]
    if int(error) != 0:
        warnings.warn("page-locked memory ran out: streaming through pageable memory, which is slower", stacklevel=2)
    return buffer
