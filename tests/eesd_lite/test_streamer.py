"""The ring of layers: order, wrap-around, errors, interruption, end. The "layers" are buffers with a number in them."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eesd_lite.errors import StreamError
from eesd_lite.layer_bank import LayerBank
from eesd_lite.layer_blob import BLOCK, lay_out
from eesd_lite.packed_store import PackedStore
from eesd_lite.streamer import HostSlot, LayerStreamer

LAYOUT = lay_out({"number": torch.zeros(4, dtype=torch.int64)}, {})


def number_checksum(index: int) -> int:
    """CRC-32 of the blob that NumberReader makes of a layer."""
    return zlib.crc32(index.to_bytes(8, "little") * 4 + b"\xff" * (BLOCK - 32))


class NumberReader:
    """Writes the layer's number into the buffer; `permits` limits how many reads succeed before `gate` is set."""

    def __init__(
        self, *, fail: Callable[[int], bool] = lambda count: False, permits: int = 10**9, parallel: int = 1
    ) -> None:
        self.fail, self.permits, self.parallel = fail, permits, parallel
        self.gate, self.started, self.closed = threading.Event(), 0, False
        self.order: list[int] = []

    def read(self, path: Path, buffer: Tensor, nbytes: int, offset: int = 0) -> None:
        assert nbytes == LAYOUT.nbytes == BLOCK and offset == 0
        self.started += 1
        if self.started > self.permits:
            self.gate.wait(30)
        if self.fail(self.started):
            raise OSError(5, f"read {self.started}")
        index = int(path.stem.split("-")[1])
        buffer.fill_(255)
        LAYOUT.views(buffer)["number"].fill_(index)
        self.order.append(index)

    def close(self) -> None:
        self.closed = True


class NumberLayer:
    """A bound layer: says which one its buffer holds."""

    def __init__(self, layout: Any, buffer: Tensor) -> None:
        self.number = layout.views(buffer)["number"]


def make(reader: NumberReader, layers: range = range(2, 7), slots: int = 3) -> LayerStreamer:
    store = PackedStore(
        Path("/nowhere"), (LAYOUT,) * layers.stop, tuple(number_checksum(n) for n in range(layers.stop))
    )
    ring = [HostSlot(torch.zeros(BLOCK, dtype=torch.uint8)) for _ in range(slots)]
    return LayerStreamer(store, layers, slots=ring, bind=NumberLayer, reader=reader)  # type: ignore[arg-type]


def sweep(streamer: LayerStreamer, count: int | None = None) -> list[int]:
    """Consume layers in order; the numbers that were really there."""
    numbers = []
    for index in streamer.layers[:count]:
        numbers.append(int(streamer.layer(index).number[0]))  # type: ignore[attr-defined]
        streamer.done(index)
    return numbers


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came to this")


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 7])
def test_layers_arrive_in_order_sweep_after_sweep_whatever_the_ring(layers: int, slots: int, parallel: int) -> None:
    reader = NumberReader(parallel=parallel)
    streamer = make(reader, range(2, 2 + layers), slots)
    for _ in range(5):
        assert sweep(streamer) == list(range(2, 2 + layers))
    streamer.close()
    assert reader.closed


def test_between_sweeps_the_first_layers_of_the_coming_one_are_fetched_and_no_more_than_the_ring_holds() -> None:
    reader = NumberReader()
    streamer = make(reader)
    sweep(streamer)
    wait_until(lambda: len(reader.order) == 5 + 3)
    time.sleep(0.05)
    assert reader.order == [2, 3, 4, 5, 6, 2, 3, 4]
    streamer.close()


def test_a_layer_in_use_is_never_overwritten() -> None:
    reader = NumberReader()
    streamer = make(reader, slots=2)
    layer = streamer.layer(2)
    wait_until(lambda: len(reader.order) == 2)
    time.sleep(0.05)
    assert reader.order == [2, 3] and int(layer.number[0]) == 2  # type: ignore[attr-defined]
    streamer.done(2)
    wait_until(lambda: len(reader.order) == 3)
    streamer.close()


def test_a_layer_out_of_order_is_a_mistake_of_the_caller() -> None:
    streamer = make(NumberReader())
    with pytest.raises(AssertionError, match="sweep is at layer 2, asked for 4"):
        streamer.layer(4)
    streamer.close()


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("stop_after", range(1, 5))
def test_after_an_interrupted_sweep_the_next_one_starts_at_its_beginning(stop_after: int, parallel: int) -> None:
    streamer = make(NumberReader(parallel=parallel))
    for _ in range(3):
        sweep(streamer, stop_after)
        streamer.abandon()
        assert sweep(streamer) == [2, 3, 4, 5, 6]
    streamer.close()


def test_an_interruption_while_a_layer_is_in_use_restarts_too() -> None:
    streamer = make(NumberReader())
    for held in (2, 3):
        for index in range(2, held):
            streamer.layer(index)
            streamer.done(index)
        streamer.layer(held)
        streamer.abandon()
        assert sweep(streamer) == [2, 3, 4, 5, 6]
    streamer.close()


def test_abandoning_between_sweeps_keeps_what_was_fetched() -> None:
    reader = NumberReader()
    streamer = make(reader)
    sweep(streamer)
    wait_until(lambda: len(reader.order) == 8)
    streamer.abandon()
    assert sweep(streamer) == [2, 3, 4, 5, 6]
    wait_until(lambda: len(reader.order) == 13)
    assert reader.order == [2, 3, 4, 5, 6] * 2 + [2, 3, 4]
    streamer.close()


def test_an_interrupted_read_that_ends_late_does_not_count_for_the_new_sweep() -> None:
    reader = NumberReader(permits=3)
    streamer = make(reader, slots=2)
    sweep(streamer, 2)
    wait_until(lambda: reader.started == 4)  # the fourth read hangs
    streamer.abandon()
    reader.gate.set()
    assert sweep(streamer) == [2, 3, 4, 5, 6]
    streamer.close()


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("failing", [1, 2, 4, 5, 6, 9])
def test_an_error_of_the_reader_reaches_the_consumer_once_and_the_next_sweep_works(failing: int, parallel: int) -> None:
    streamer = make(NumberReader(fail=lambda count: count == failing, parallel=parallel))
    with pytest.raises(StreamError, match=f"reading failed.*read {failing}"):
        for _ in range(3):
            sweep(streamer)
    streamer.abandon()
    for _ in range(2):
        assert sweep(streamer) == [2, 3, 4, 5, 6]
    streamer.close()


def test_two_reads_are_under_way_at_once_and_a_late_first_one_does_not_let_the_second_overtake() -> None:
    class Crossing(NumberReader):
        """The first read ends only after the second."""

        def read(self, path: Path, buffer: Tensor, nbytes: int, offset: int = 0) -> None:
            if path.stem.endswith("002") and not self.order:
                wait_until(lambda: bool(self.order))
            super().read(path, buffer, nbytes, offset)

    reader = Crossing(parallel=2)
    streamer = make(reader)
    assert sweep(streamer) == [2, 3, 4, 5, 6]
    assert reader.order[0] == 3
    streamer.close()


def test_a_slot_that_an_abandoned_read_still_writes_to_is_not_read_into_by_another_thread() -> None:
    reader = NumberReader(permits=3, parallel=2)
    streamer = make(reader, slots=2)
    sweep(streamer, 2)
    wait_until(lambda: reader.started == 4)  # one of the reads hangs, in one of the two slots
    streamer.abandon()
    time.sleep(0.05)
    assert reader.started <= 5, "the other thread may read into the other slot, and no more"
    reader.gate.set()
    for _ in range(3):
        assert sweep(streamer) == [2, 3, 4, 5, 6]
    streamer.close()


def test_content_that_is_not_what_was_written_is_an_error_that_names_the_file() -> None:
    class Flipping(NumberReader):
        def read(self, path: Path, buffer: Tensor, nbytes: int, offset: int = 0) -> None:
            super().read(path, buffer, nbytes, offset)
            buffer[1000] ^= int(path.stem.endswith("004"))

    streamer = make(Flipping())
    with pytest.raises(StreamError, match="layer-004.bin: the content does not match its checksum"):
        sweep(streamer)
    streamer.close()


def test_an_error_is_no_reason_to_read_on_without_end() -> None:
    reader = NumberReader(fail=lambda count: True)
    streamer = make(reader)
    time.sleep(0.05)
    wait_until(lambda: reader.started == 1)
    with pytest.raises(StreamError):
        streamer.layer(2)
    wait_until(lambda: reader.started == 2)
    time.sleep(0.05)
    assert reader.started == 2, "one attempt per request, not a busy loop"
    streamer.close()


def test_closing_wakes_a_waiting_consumer_and_a_second_close_is_harmless() -> None:
    reader = NumberReader(permits=0)
    streamer = make(reader)
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            streamer.layer(2)
        except StreamError as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    closer = threading.Thread(target=streamer.close)
    closer.start()
    consumer.join(10)
    assert len(raised) == 1 and "closed" in str(raised[0])
    reader.gate.set()
    closer.join(10)
    streamer.close()
    assert not closer.is_alive() and reader.closed


def test_the_bank_counts_passes_and_offloaded_bytes() -> None:
    streamer = make(NumberReader(), range(2, 5))
    resident: list[Any] = [NumberLayer(LAYOUT, torch.zeros(BLOCK, dtype=torch.uint8)) for _ in range(2)]
    bank = LayerBank(dict(enumerate(resident)), streamer, [10, 20, 30, 40, 50])
    for index in range(5):
        bank.layer(index)
        bank.done(index)
    bank.layer(0)
    bank.done(0)
    assert bank.forwards == [2, 1, 1, 1, 1]
    assert bank.streamed_bytes == 30 + 40 + 50
    bank.close()
