"""Settles an engine's exit layer before its plan is made: as asked, as a saved plan has it, or by what it promises.

`auto` measures first, for some tenths of a second: the disk, a pass through one layer, a slice of lm_head. A default
that does not fit is replaced without measuring, by stated rates, so that `eesd plan` says the same. Called by
`eesd_lite.opening`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from eesd_lite.blob_reader import BlobReader
from eesd_lite.cache import KVCache, Rows
from eesd_lite.config import ModelConfig
from eesd_lite.exit_choice import AUTO, Settled, settle_exit
from eesd_lite.head_list import expected_shares, heads_at_hand, usual_exit
from eesd_lite.layer_blob import BLOCK, page_buffer
from eesd_lite.loader import LoadOptions, rates_for, request_for
from eesd_lite.ops import Ops
from eesd_lite.packed_store import PackedStore
from eesd_lite.packing import KernelSet
from eesd_lite.plan_cost import Rates
from eesd_lite.prepare import ModelSource
from eesd_lite.progress import Progress
from eesd_lite.rope import layer_reaches
from eesd_lite.saved_plan import read_exit_layer
from eesd_lite.streamer import SMALLEST_PART
from eesd_lite.tiers import leading_device_layers
from eesd_lite.transformer import DecoderLayer
from quant.checkpoint import Checkpoint

_ROWS = 5  # a verification of four drafted tokens: what a further row takes
_REPEATS = 9
_READS = 8  # layers whose reading is timed
_SLICE_BYTES = 64 << 20  # of lm_head, at most
_MADE = ("off", "instant", "random")  # heads that are no files


def settle(
    source: ModelSource, checkpoint: Checkpoint, config: ModelConfig, store: PackedStore, options: LoadOptions,
    ops: Ops, kernels: KernelSet, *, exit_layer: int | str | None, head: str | Path | None, saved: Path | None,
    progress: Progress,
) -> tuple[Settled, str | Path | None]:  # fmt: skip
    """The exit layer, and which head to look for: "off" where plain decoding was chosen."""
    if isinstance(exit_layer, int) or head in _MADE:
        return Settled(exit_layer if isinstance(exit_layer, int) else None), head
    if exit_layer is None and head is not None and not Path(head).is_dir():
        return Settled(None), head  # one file: it says for which layer it is
    heads = expected_shares(heads_at_hand(source, head))
    default = None if exit_layer == AUTO or not heads else usual_exit(source, heads)
    if default is None and exit_layer is None:
        return Settled(None), head
    measured = rates_for(checkpoint, config, store, options, progress) if default is None else None
    request = request_for(checkpoint, config, store, options, default or max(heads, default=1), measured)
    if options.tiers is not None and saved is not None:
        kept = read_exit_layer(saved)
        if default is None or leading_device_layers(options.tiers) < default:
            if kept is None:
                return Settled(None, None, (f"plain decoding, as {saved} has it",)), "off"
            if default is None or kept in heads:  # a head that is gone is missed only by who asked for it
                return Settled(kept), head
    if default is None:
        rates = measure(checkpoint, config, store, options, ops, kernels, progress) if heads else Rates()
        rates = rates if measured is None else replace(rates, link=measured.link, host=measured.host)
        settled = settle_exit(request, heads, rates, default=None)
        return settled, head if settled.exit_layer is not None else "off"
    return settle_exit(request, heads, stated_rates(options), default=default), head


def stated_rates(options: LoadOptions) -> Rates:
    """As `eesd plan` has them, unless told otherwise."""
    linked = torch.device(options.device).type != "cpu" or options.host_memory is not None
    rates = Rates() if linked else Rates(link=None)
    return rates if options.throttle is None else replace(rates, disk=max(1, int(options.throttle)))


def measure(
    checkpoint: Checkpoint, config: ModelConfig, store: PackedStore, options: LoadOptions, ops: Ops,
    kernels: KernelSet, progress: Progress,
) -> Rates:  # fmt: skip
    """The machine's rates: medians of a few passes. A device's link is measured by `tier_rates`, or as stated."""
    progress("measuring what an exit would cost", 0, 0)
    device = torch.device(options.device)
    index = len(store.layouts) - 1
    layout = store.layouts[index]
    buffer = page_buffer(max(layout.nbytes for layout in store.layouts))
    with closing(BlobReader()) as reader:
        disk = _disk_rate(store, buffer, reader)
        reader.read(store.path(index), buffer, layout.nbytes)
    blob = buffer if device.type == "cpu" else buffer.to(device)
    layer = DecoderLayer(config, ops, layout, blob, kernels)
    reach = layer_reaches(config, _ROWS, device)[index]
    kv = KVCache(
        1, _ROWS, num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim, dtype=ops.dtype,
        device=device,
    )  # fmt: skip

    def layer_pass(count: int) -> Callable[[], object]:
        states, rows = torch.ones(count, config.hidden_size, device=device), Rows.chain(0, count, device)
        return lambda: layer.forward(states.clone(), rows, kv.layer(0), reach)

    items = min(config.vocab_size, max(1024, _SLICE_BYTES // (config.hidden_size * ops.dtype.itemsize)))
    part = torch.zeros(items, config.hidden_size, dtype=ops.dtype, device=device)
    state = torch.ones(1, config.hidden_size, dtype=torch.float32, device=device)
    normed = ops.rms_norm(state, torch.ones(config.hidden_size, dtype=ops.dtype, device=device), config.rms_norm_eps)
    with torch.inference_mode():
        one, several = (_seconds(layer_pass(count), device) for count in (1, _ROWS))
        product = _seconds(lambda: ops.logits(normed, part), device)
    rate = max(1, int(part.numel() * part.element_size() / product))
    launch = max(0.0, one - layout.nbytes / rate)
    row = min(1.0, max(0.0, (several / one - 1.0) / (_ROWS - 1)))
    stated = stated_rates(options)
    return replace(
        stated, disk=min(disk, stated.disk) if options.throttle is not None else disk, device=rate,
        layer_time=round(launch * 1e6), row=round(row, 3),
    )  # fmt: skip


def _disk_rate(store: PackedStore, buffer: torch.Tensor, reader: BlobReader) -> int:
    """Bytes a second of reading some layers, in parts side by side as the streamer does; the first read does not count,
    since it opens the file."""
    rates = []
    with ThreadPoolExecutor(reader.parallel) as threads:
        for index in range(min(_READS, len(store.layouts))):
            nbytes, path = store.layouts[index].nbytes, store.path(index)
            reader.read(path, buffer, BLOCK)
            started = time.perf_counter()
            list(threads.map(lambda cut: reader.read(path, buffer[cut[0] :], cut[1] - cut[0], cut[0]), _cuts(nbytes)))  # noqa: B023
            rates.append(nbytes / max(time.perf_counter() - started, 1e-9))
    return max(1, int(statistics.median(rates)))


def _cuts(nbytes: int) -> list[tuple[int, int]]:
    """Two parts, unless that would make small ones."""
    middle = nbytes // 2 // BLOCK * BLOCK
    return [(0, middle), (middle, nbytes)] if middle >= SMALLEST_PART else [(0, nbytes)]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of some runs, after one that warms up."""
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return max(statistics.median(times[1:]), 1e-9)
