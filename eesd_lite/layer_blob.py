"""A decoder layer as one contiguous blob: which tensor lies at which offset, and how to bind views to a buffer.

Resident layers, ring slots and files all hold the same bytes, so a sweep is one read per layer and never a repack.
Blobs are multiples of BLOCK bytes, and begin at multiples of it, as O_DIRECT wants. The exit head uses the same form.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 4096
ALIGNMENT = 64  # of every tensor in the blob: a cache line, and what vector loads like


@dataclass(frozen=True)
class TensorSlot:
    """One tensor in a blob. `name` is such as `qkv.0.packed`; `dtype` is torch's name, such as `uint8`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class BlobLayout:
    """All tensors of one layer. `kernels` maps a module (`qkv`, `o`, ...) to the name of its kernel."""

    slots: tuple[TensorSlot, ...]
    kernels: tuple[tuple[str, str], ...]
    nbytes: int

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Typed views into a uint8 buffer of at least `nbytes`."""
        assert buffer.dtype == torch.uint8 and buffer.numel() >= self.nbytes, (
            buffer.dtype,
            buffer.numel(),
            self.nbytes,
        )
        return {
            slot.name: buffer[slot.offset : slot.offset + slot.nbytes].view(getattr(torch, slot.dtype)).view(slot.shape)
            for slot in self.slots
        }

    def as_dict(self) -> dict[str, object]:
        """For the manifest of a packed folder."""
        slots = [[slot.name, slot.dtype, list(slot.shape), slot.offset] for slot in self.slots]
        return {"slots": slots, "kernels": [list(pair) for pair in self.kernels], "nbytes": self.nbytes}

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> BlobLayout:
        """Inverse of `as_dict`; KeyError, TypeError or ValueError for anything else."""
        slots = tuple(TensorSlot(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in raw["slots"])  # type: ignore[attr-defined]
        kernels = tuple((module, kernel) for module, kernel in raw["kernels"])  # type: ignore[attr-defined]
        nbytes = int(raw["nbytes"])  # type: ignore[call-overload]
        if nbytes % BLOCK or any(slot.offset < 0 or slot.offset + slot.nbytes > nbytes for slot in slots):
            raise ValueError(f"a layout of {nbytes} bytes does not hold its tensors")
        return cls(slots, kernels, nbytes)


def lay_out(tensors: Mapping[str, Tensor], kernels: Mapping[str, str]) -> BlobLayout:
    """Give every tensor an offset, in the order given."""
    slots, offset = [], 0
    for name, tensor in tensors.items():
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        slots.append(TensorSlot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        offset += tensor.nbytes
    return BlobLayout(tuple(slots), tuple(kernels.items()), max(-(-offset // BLOCK), 1) * BLOCK)


def fill(layout: BlobLayout, buffer: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` to their places in `buffer`."""
    views = layout.views(buffer)
    assert views.keys() == tensors.keys(), sorted(views.keys() ^ tensors.keys())
    for name, view in views.items():
        view.copy_(tensors[name])


def page_buffer(nbytes: int) -> Tensor:
    """A page-aligned uint8 buffer of its own anonymous mapping, given back to the system when the tensor dies."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
