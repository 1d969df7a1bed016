"""From packed blobs to a `LayerBank`: every layer is read to the tier that the plan gives it.

One blob is held at a time beyond what stays. Layers that the CPU multiplies beside another device are packed for the
CPU's kernels, in a store of their own; on a CPU engine all tiers share one layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_lite.blob_reader import BlobReader
from eesd_lite.config import ModelConfig
from eesd_lite.layer_bank import HostLayer, LayerBank
from eesd_lite.layer_blob import BlobLayout, page_buffer
from eesd_lite.ops import Ops, Reach
from eesd_lite.packed_store import PackedStore
from eesd_lite.packing import KernelSet
from eesd_lite.progress import Progress
from eesd_lite.streamer import HostSlot, LayerStreamer, Reader, Slot
from eesd_lite.tiers import DISK, HOST_COMPUTE, HOST_STREAM, Plan
from eesd_lite.transformer import DecoderLayer, RunnableLayer
from eesd_lite.units import format_size


@dataclass(frozen=True)
class Place:
    """Where layers of a tier compute, and with what."""

    device: torch.device
    ops: Ops
    kernels: KernelSet
    store: PackedStore  # blobs in the layout of `kernels`
    reaches: tuple[Reach, ...]  # of every layer of the model


def load_bank(
    config: ModelConfig, plan: Plan, device: Place, host: Place, reader: Reader, progress: Progress
) -> LayerBank:
    """Read resident and host layers, and start streaming the rest with `reader`."""
    loading = BlobReader()
    fixed: dict[int, RunnableLayer] = {}
    streamed_from_host: dict[int, Tensor] = {}
    kept = [index for index, tier in enumerate(plan.tiers) if tier != DISK]
    try:
        size = sum(device.store.layouts[index].nbytes for index in kept)
        for done, index in enumerate(kept):
            progress(f"loading {format_size(size)}, layer", done, len(kept))
            tier = plan.tiers[index]
            place = host if tier == HOST_COMPUTE else device
            buffer = _read(place.store, index, loading)
            if tier == HOST_STREAM:
                streamed_from_host[index] = _pinned(buffer, device.device)
            elif tier == HOST_COMPUTE:
                layer = _bind(config, host, host.store.layouts[index], buffer)
                fixed[index] = HostLayer(layer, host.reaches[index])
            else:
                on_device = buffer if device.device.type == "cpu" else buffer.to(device.device)
                fixed[index] = _bind(config, device, device.store.layouts[index], on_device)
    finally:
        loading.close()
    streamed = [index for index, tier in enumerate(plan.tiers) if tier in (HOST_STREAM, DISK)]
    streamer = None
    if streamed:
        size = max(device.store.layouts[index].nbytes for index in streamed)
        streamer = LayerStreamer(
            device.store,
            streamed,
            slots=_slots(plan, size, device.device),
            bind=lambda layout, buffer: _bind(config, device, layout, buffer),
            reader=reader,
            host=streamed_from_host,
        )
    return LayerBank(fixed, streamer, [layout.nbytes for layout in device.store.layouts])


def _read(store: PackedStore, index: int, reader: BlobReader) -> Tensor:
    """The blob of a layer in a buffer of its own."""
    nbytes = store.layouts[index].nbytes
    buffer = page_buffer(nbytes)
    reader.read(store.path(index), buffer, nbytes)
    store.check(index, buffer)
    return buffer


def _bind(config: ModelConfig, place: Place, layout: BlobLayout, buffer: Tensor) -> DecoderLayer:
    return DecoderLayer(config, place.ops, layout, buffer, place.kernels)


def _pinned(buffer: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return buffer
    from eesd_lite.cuda_slot import pin  # only where there is a CUDA device

    return pin(buffer)


def _slots(plan: Plan, size: int, device: torch.device) -> list[Slot]:
    if device.type != "cuda":
        return [HostSlot(page_buffer(size)) for _ in range(plan.ring_slots)]
    from eesd_lite.cuda_slot import CudaSlot, Staging

    staging = Staging(plan.host_ring_slots or plan.ring_slots, size) if DISK in plan.tiers else None
    stream = torch.cuda.Stream(device)
    return [CudaSlot(size, device, stream, staging) for _ in range(plan.ring_slots)]
