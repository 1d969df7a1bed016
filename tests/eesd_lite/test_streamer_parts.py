"""Layers that several threads read in parts: put together, late, abandoned, failing. Real files of random bytes."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eesd_lite import cuda_slot
from eesd_lite.blob_reader import BlobReader
from eesd_lite.errors import StreamError
from eesd_lite.layer_blob import BLOCK, lay_out, page_buffer
from eesd_lite.packed_store import PackedStore
from eesd_lite.streamer import SMALLEST_PART, HostSlot, LayerStreamer
from tests.eesd_lite.test_streamer import wait_until


class PartReader(BlobReader):
    """Reads real files. Those parts wait, or fail, that `hold` and `fail` name by file number and offset."""

    def __init__(self, parallel: int = 2) -> None:
        super().__init__()
        self.parallel = parallel
        self.hold: set[tuple[int, int]] = set()
        self.fail: set[tuple[int, int]] = set()
        self.gate = threading.Event()
        self.begun: list[tuple[int, int]] = []
        self.read_parts: list[tuple[int, int]] = []

    def read(self, path: Path, buffer: Tensor, nbytes: int, offset: int = 0) -> None:
        part = int(path.stem.split("-")[1]), offset
        self.begun.append(part)
        if part in self.hold:
            self.gate.wait(30)
        if part in self.fail:
            self.fail.remove(part)
            raise StreamError(f"part {part} failed on purpose")
        super().read(path, buffer, nbytes, offset)
        self.read_parts.append(part)


def whole(layout: Any, buffer: Tensor) -> Any:
    """A bound layer: all bytes of its buffer as they are when asked."""
    return lambda: buffer[: layout.nbytes].clone()


class StagedSlot(HostSlot):
    """Like a slot on a card: read into one of a few buffers that slots share, then copied."""

    def __init__(self, buffer: Tensor, free: queue.Queue[Tensor]) -> None:
        super().__init__(buffer)
        self.own, self._free, self._held, self.starved = buffer, free, False, False

    def begin_fill(self) -> None:
        if self._held:
            return
        self.starved = True
        self.buffer, self._held = self._free.get(timeout=20), True  # an error then, instead of waiting for ever
        self.starved = False

    def end_fill(self, nbytes: int) -> None:
        self.own[:nbytes] = self.buffer[:nbytes]
        self.drop_fill()

    def drop_fill(self) -> None:
        if self._held:
            self._free.put(self.buffer)
            self.buffer, self._held = self.own, False


def in_parts(
    folder: Path,
    reader: PartReader,
    *,
    blocks: int = 2 * SMALLEST_PART // BLOCK,
    slots: int = 2,
    staging: int | None = None,
) -> tuple[LayerStreamer, list[Tensor]]:
    """Three layers of random bytes in files, and what is in them."""
    layout = lay_out({"bytes": torch.zeros(blocks * BLOCK, dtype=torch.uint8)}, {})
    contents = [torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8) for _ in range(3)]
    sums = tuple(zlib.crc32(content.numpy().tobytes()) for content in contents)
    store = PackedStore(folder, (layout,) * 3, sums)
    for index, content in enumerate(contents):
        store.path(index).write_bytes(content.numpy().tobytes())
    buffers = [page_buffer(layout.nbytes) for _ in range(slots)]
    ring = [HostSlot(buffer) for buffer in buffers]
    if staging is not None:
        free: queue.Queue[Tensor] = queue.Queue()
        for _ in range(staging):
            free.put(page_buffer(layout.nbytes))
        ring = [StagedSlot(buffer, free) for buffer in buffers]
    return LayerStreamer(store, range(3), slots=ring, bind=whole, reader=reader), contents  # type: ignore[arg-type]


def check_sweep(streamer: LayerStreamer, contents: list[Tensor]) -> None:
    for index, content in enumerate(contents):
        assert torch.equal(streamer.layer(index)(), content), index  # type: ignore[operator]
        streamer.done(index)


@pytest.mark.parametrize("parallel", [1, 2, 3])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("blocks", [1, 129, 400])
def test_a_layer_read_in_parts_is_put_together_byte_for_byte(
    tmp_path: Path, blocks: int, slots: int, parallel: int
) -> None:
    reader = PartReader(parallel)
    streamer, contents = in_parts(tmp_path, reader, blocks=blocks, slots=slots)
    for _ in range(4):
        check_sweep(streamer, contents)
    parts = min(parallel, max(1, blocks * BLOCK // SMALLEST_PART))
    assert len({offset for _, offset in reader.read_parts}) == parts
    streamer.close()


def test_the_threads_read_one_layer_together_and_it_is_there_when_its_last_part_is(tmp_path: Path) -> None:
    reader = PartReader()
    reader.hold = {(0, 0)}
    streamer, contents = in_parts(tmp_path, reader)
    wait_until(lambda: (1, 0) in reader.read_parts)  # the other thread went on to the next layer
    assert reader.begun[:2] in ([(0, 0), (0, SMALLEST_PART)], [(0, SMALLEST_PART), (0, 0)])
    assert 0 not in streamer._filled
    reader.gate.set()
    check_sweep(streamer, contents)
    streamer.close()


def test_a_part_of_an_abandoned_sweep_that_ends_late_belongs_to_no_other(tmp_path: Path) -> None:
    reader = PartReader()
    streamer, contents = in_parts(tmp_path, reader)
    check_sweep(streamer, contents)
    streamer.layer(0)
    streamer.done(0)
    reader.hold = {(2, SMALLEST_PART)}
    wait_until(lambda: (2, SMALLEST_PART) in reader.begun[6:])
    streamer.abandon()
    begun = len(reader.begun)
    wait_until(lambda: (0, SMALLEST_PART) in reader.begun[begun:])
    time.sleep(0.05)
    assert len(reader.begun) == begun + 2, "the slot of the second layer is still written to"
    reader.hold = set()
    reader.gate.set()
    for _ in range(3):
        check_sweep(streamer, contents)
    streamer.close()


@pytest.mark.parametrize("failing", [(0, 0), (0, SMALLEST_PART), (2, SMALLEST_PART)])
def test_a_part_that_cannot_be_read_fails_its_layer_once(tmp_path: Path, failing: tuple[int, int]) -> None:
    reader = PartReader()
    reader.fail = {failing}
    streamer, contents = in_parts(tmp_path, reader)
    with pytest.raises(StreamError, match="failed on purpose"):
        for _ in range(2):
            check_sweep(streamer, contents)
    for _ in range(2):
        check_sweep(streamer, contents)
    streamer.close()


def test_layers_that_an_abandoned_sweep_left_half_read_give_their_staging_buffers_back(tmp_path: Path) -> None:
    reader = PartReader()
    reader.hold = {(1, SMALLEST_PART), (2, 0)}
    streamer, contents = in_parts(tmp_path, reader, slots=3, staging=2)
    streamer.layer(0)
    streamer.done(0)
    wait_until(lambda: reader.hold <= set(reader.begun))  # both buffers are taken, by the second slot and the third
    streamer.abandon()  # the next sweep begins in the first
    reader.hold = set()
    reader.gate.set()
    for _ in range(3):
        check_sweep(streamer, contents)
    streamer.close()


@pytest.mark.parametrize("staging", [1, 2])
def test_layers_that_failed_give_their_staging_buffers_back(tmp_path: Path, staging: int) -> None:
    reader = PartReader()
    streamer, contents = in_parts(tmp_path, reader, slots=3, staging=staging)
    for failing in ((1, 0), (2, SMALLEST_PART), (1, SMALLEST_PART), (2, 0)):
        reader.fail = {failing}
        with pytest.raises(StreamError, match="failed on purpose"):
            for _ in range(3):
                check_sweep(streamer, contents)
        check_sweep(streamer, contents)
    streamer.close()


def test_closing_does_not_wait_for_a_staging_buffer_of_a_layer_that_failed(tmp_path: Path) -> None:
    reader = PartReader()
    reader.hold, reader.fail = {(0, SMALLEST_PART)}, {(0, SMALLEST_PART)}
    streamer, _ = in_parts(tmp_path, reader, slots=2, staging=1)
    wait_until(lambda: (0, 0) in reader.read_parts)  # its thread now waits for the buffer, for the next layer
    reader.gate.set()
    streamer.close()
    assert not any(slot.starved for slot in streamer._slots if isinstance(slot, StagedSlot))


def test_a_slot_on_a_card_gives_back_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(cuda_slot, "pin", lambda buffer: buffer)
    staging = cuda_slot.Staging(1, BLOCK)
    first, second = (cuda_slot.CudaSlot(BLOCK, torch.device("cpu"), None, staging) for _ in range(2))  # type: ignore[arg-type]
    first.begin_fill()
    first.begin_fill()  # another part
    held = first.buffer
    first.drop_fill()
    first.drop_fill()
    second.begin_fill()
    assert second.buffer is held


def test_a_second_read_that_was_refused_directly_goes_on_buffered_like_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reader, original = tmp_path / "blob", BlobReader(), os.preadv
    content = os.urandom(BLOCK)
    path.write_bytes(content)
    refused: list[int] = []

    def refuse_once(*arguments: Any) -> int:
        if not refused:
            refused.append(1)
            reader.mode = "buffered"  # as the other thread left it, whose read was refused as well
            raise OSError(errno.EINVAL, "refused")
        return original(*arguments)

    reader.mode = "direct"
    monkeypatch.setattr(os, "preadv", refuse_once)
    buffer = page_buffer(BLOCK)
    reader.read(path, buffer, BLOCK)
    assert refused and buffer.numpy().tobytes() == content
    reader.close()
