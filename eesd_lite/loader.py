"""Building an engine's parts: choose kernels, plan, allocate exactly what was planned, read the resident layers.

Tensors are read one at a time and resident layers come from the packed store, so memory while loading is the plan plus
one layer. Called once by `Engine.from_pretrained`.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eesd_lite import __version__
from eesd_lite.bank_loader import Place, load_bank
from eesd_lite.blob_reader import BlobReader
from eesd_lite.cache import KVCache
from eesd_lite.config import ModelConfig
from eesd_lite.cpu_ops import FusedCpuOps
from eesd_lite.draft_vocabulary import DraftVocabulary
from eesd_lite.draft_weights import DraftWeights
from eesd_lite.errors import EesdError, HeadError
from eesd_lite.exit_head import ExitHead
from eesd_lite.head_file import HeadTensors
from eesd_lite.layer_blob import page_buffer
from eesd_lite.ops import Ops, Reach, TorchOps
from eesd_lite.packed_beside import MANIFEST
from eesd_lite.packed_store import PackedStore, open_store, packed_folder
from eesd_lite.packing import KernelSet
from eesd_lite.placement import Plan, PlanRequest, make_plan
from eesd_lite.preflight import EMBEDDING, FINAL_NORM, LM_HEAD, has_own_lm_head
from eesd_lite.progress import Progress, no_progress
from eesd_lite.rope import layer_reaches, on_device
from eesd_lite.sizing import default_context as default_context  # the engine asks here for all about loading
from eesd_lite.sizing import kernel_for, plan_request
from eesd_lite.streamer import Reader
from eesd_lite.target import Target
from eesd_lite.tier_rates import ROWS, TierRates, measure_rates
from eesd_lite.tiers import HOST_COMPUTE
from eesd_lite.transformer import DecoderLayer
from quant.checkpoint import Checkpoint
from quant.kernels import DenseKernel, Int4CpuKernel, Int4CudaKernel, Kernel
from quant.kernels_bnb import block_kernels

_TABLE_ROWS = 4096  # rows of an embedding that are converted at a time
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadOptions:
    """What `Engine.from_pretrained` was asked for, in bytes and integers."""

    device: str
    dtype: str
    device_memory: int | None
    resident_layers: int | None
    context: int
    draft_limit: int
    threads: int | None
    throttle: float | None
    host_memory: int | None = None
    host_mode: str = "auto"  # how layers in host memory are used: stream, compute, or what a short measurement says
    tiers: tuple[str, ...] | None = None  # of a saved plan
    draft: DraftWeights = DraftWeights()
    other_exits: tuple[int, ...] = ()  # of further resident heads


def choose_kernels(
    options: LoadOptions, checkpoint: Checkpoint | None = None, progress: Progress = no_progress
) -> tuple[Ops, KernelSet]:
    """Operations and kernels for device, dtype and checkpoint; the choice is part of what makes ids reproducible."""
    if options.dtype not in DTYPES:
        raise EesdError(f"dtype must be bfloat16 or float32, not '{options.dtype}'")
    device, dtype = _device(options.device), DTYPES[options.dtype]
    ops: Ops = TorchOps(dtype)
    if FusedCpuOps.supported(device, dtype) is None:
        FusedCpuOps.warm_up(progress)
        ops = FusedCpuOps(threads=torch.get_num_threads())
    kernels = KernelSet(_int4_kernel(device, dtype), DenseKernel(ops.dense, dtype))
    if checkpoint is not None and checkpoint.any_blocks:
        progress("loading bitsandbytes", 0, 0)
        kernels = replace(kernels, blocks=block_kernels(device, dtype, ops.dense), quantize=checkpoint.quantize)
    return ops, kernels


def _int4_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """torch's own product where it is fast."""
    if dtype == torch.float32:
        return None
    if device.type == "cuda":
        return Int4CudaKernel() if torch.cuda.get_device_capability(device) >= (8, 0) else None
    return Int4CpuKernel()


def draft_kernel(options: LoadOptions) -> str:
    """`sizing`'s name for the kernels of a head in fewer bits, as `choose_kernels` gives them."""
    device = torch.device(options.device)
    return kernel_for(device.type, options.dtype) if _int4_kernel(device, DTYPES[options.dtype]) else "dense"


def _device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise EesdError(f"device must be cpu or cuda, not '{name}'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EesdError("device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EesdError(f"device {name} was asked for, but there are only {torch.cuda.device_count()} CUDA devices")
    return device


def plan_for(
    checkpoint: Checkpoint, config: ModelConfig, store: PackedStore, options: LoadOptions, exit_layer: int | None,
    rates: TierRates | None = None,
) -> Plan:  # fmt: skip
    """The placement for these options; `rates` settle the host mode `auto`, which is `compute` without them."""
    return make_plan(request_for(checkpoint, config, store, options, exit_layer, rates))


def request_for(
    checkpoint: Checkpoint, config: ModelConfig, store: PackedStore, options: LoadOptions, exit_layer: int | None,
    rates: TierRates | None = None,
) -> PlanRequest:  # fmt: skip
    """What there is to place."""
    request = plan_request(
        config,
        layers=[layout.nbytes for layout in store.layouts],
        tied=not has_own_lm_head(checkpoint, config),
        itemsize=DTYPES[options.dtype].itemsize,
        context=options.context,
        draft_limit=options.draft_limit,
        exit_layer=exit_layer,
        device_memory=options.device_memory,
        resident_layers=options.resident_layers,
        draft=options.draft,
        kernel=draft_kernel(options),
    )
    request = replace(
        request,
        host_memory=options.host_memory,
        host_mode=options.host_mode if options.host_mode != "auto" or rates is not None else "compute",
        staging=torch.device(options.device).type != "cpu",
        tiers=options.tiers,
        other_exits=options.other_exits,
    )
    if rates is not None:
        request = replace(request, link_rate=rates.link, host_rate=rates.host)
    return request


def rates_for(
    checkpoint: Checkpoint, config: ModelConfig, store: PackedStore, options: LoadOptions, progress: Progress
) -> TierRates | None:
    """Measured where they decide something: a device beside the CPU, host layers, and nobody said what to do."""
    device = torch.device(options.device)
    if device.type == "cpu" or options.host_memory is None or options.host_mode != "auto" or options.tiers is not None:
        return None
    from eesd_lite.cuda_slot import CudaSlot, pin  # only where there is a CUDA device

    progress("measuring link and CPU", 0, 0)
    host = _host_place(checkpoint, config, options, layer_reaches(config, max(ROWS)), progress)
    layout = host.store.layouts[-1]
    blob = page_buffer(layout.nbytes)
    with closing(BlobReader()) as reader:
        reader.read(host.store.path(len(host.store.layouts) - 1), blob, layout.nbytes)
    slot, source = CudaSlot(layout.nbytes, device, torch.cuda.Stream(device), None), pin(blob)

    def copy() -> None:
        slot.copy_fill(source, layout.nbytes)
        torch.cuda.synchronize(device)

    kv = KVCache(
        1, max(ROWS), num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim, dtype=host.ops.dtype
    )
    layer = DecoderLayer(config, host.ops, layout, blob, host.kernels)
    return measure_rates(
        layer, layout.nbytes, hidden=lambda rows: torch.ones(rows, config.hidden_size), kv=kv, reach=host.reaches[-1],
        copy=copy,
    )  # fmt: skip


def load_target(
    checkpoint: Checkpoint, config: ModelConfig, store: PackedStore, plan: Plan, options: LoadOptions,
    ops: Ops, kernels: KernelSet, reader: Reader | None, progress: Progress,
) -> Target:  # fmt: skip
    """Everything that `plan` allocates for the target."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    capacity = plan.context + (options.draft_limit if plan.exit_layer is not None else 0)
    embedding = _table(checkpoint.tensor(EMBEDDING), dtype, device)
    lm_head = embedding
    if has_own_lm_head(checkpoint, config):
        quantized = checkpoint.is_quantized(LM_HEAD)
        stored = checkpoint.dequantized(LM_HEAD) if quantized else checkpoint.tensor(f"{LM_HEAD}.weight")
        lm_head = _table(stored, dtype, device)
    reaches = layer_reaches(config, plan.context, device, slack=capacity - plan.context)
    here = Place(device, ops, kernels, store, reaches)
    on_host = frozenset(index for index, tier in enumerate(plan.tiers) if tier == HOST_COMPUTE)
    beside = (
        here if device.type == "cpu" or not on_host else _host_place(checkpoint, config, options, reaches, progress)
    )
    kv = KVCache(
        config.num_hidden_layers, capacity, num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
        dtype=dtype, device=device, on_host=on_host,
    )  # fmt: skip
    reader = reader if reader is not None else BlobReader(options.throttle)
    return Target(
        config=config,
        ops=ops,
        bank=load_bank(config, plan, here, beside, reader, progress),
        kv=kv,
        reaches=reaches,
        embedding=embedding,
        norm=checkpoint.tensor(FINAL_NORM).to(dtype).to(device),
        lm_head=lm_head,
        exit_layer=plan.exit_layer or 0,
        device=device,
        exits=(*plan.other_exits, plan.exit_layer) if plan.exit_layer is not None else (),
    )  # fmt: skip


def _table(stored: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A [vocab, hidden] matrix in memory of its own: what a checkpoint gives is a mapped file, which may be evicted.

    A few rows at a time, so that a conversion takes no second table.
    """
    table = torch.empty(stored.shape, dtype=dtype, device=device)
    for start in range(0, stored.shape[0], _TABLE_ROWS):
        table[start : start + _TABLE_ROWS] = stored[start : start + _TABLE_ROWS].to(device)
    return table


def _host_place(
    checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, reaches: tuple[Reach, ...], progress: Progress
) -> Place:
    """The CPU beside a device: its own operations, kernels, packed layers and rotary tables."""
    ops, kernels = choose_kernels(replace(options, device="cpu"), checkpoint, progress)
    store = open_store(checkpoint, config, kernels, progress)
    return Place(torch.device("cpu"), ops, kernels, store, on_device(reaches, "cpu"))


def load_head(
    target: Target, head: HeadTensors, kernels: KernelSet, vocabulary: DraftVocabulary | None = None, bits: int = 16
) -> ExitHead:
    """Bind a head to a loaded target, with its weights in so many bits; HeadError where the plan drafts at another
    layer."""
    if head.exit_layer not in (target.exit_layer, *target.exits):
        raise HeadError(f"the head is for exit layer {head.exit_layer}, the plan drafts at {target.exit_layer}")
    config = target.config
    kv = KVCache(
        1, target.kv.capacity, num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
        dtype=target.ops.dtype, device=target.device,
    )  # fmt: skip
    reach = target.reaches[head.exit_layer]  # the head's layer stands where layer N does
    return ExitHead(
        config, head, ops=target.ops, kernels=kernels, reach=reach, kv=kv, device=target.device, vocabulary=vocabulary,
        bits=bits,
    )  # fmt: skip


def identity(checkpoint: Checkpoint, kernels: KernelSet, store: PackedStore, options: LoadOptions, ops: Ops) -> str:
    """What the bits of a cache entry depend on: the files (the manifest has every layer's checksum), what computes."""
    layers = hashlib.sha256((store.folder / MANIFEST).read_bytes()).hexdigest()[:16]
    return (
        f"{packed_folder(checkpoint, kernels).name} layers {layers} {options.device} {options.dtype} "
        f"{type(ops).__name__} threads {torch.get_num_threads()} torch {torch.__version__} "
        f"{torch.backends.cpu.get_cpu_capability()} eesd-lite {__version__}"
    )
