"""How every contender is started: our engine as a worker, and peers with as much of the model in memory as fits.

Peers get the same allowance: accelerate keeps the layers that fit into it and has the rest on disk, AirLLM reads every
layer for every pass by design, llama.cpp maps its file and leaves the choice to the page cache.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eesd_lite.baselines import accelerate, llama_cpp
from eesd_lite.baselines.peer import PeerMissing, PeerSpec, python_for
from eesd_lite.bench.offload import worker
from eesd_lite.bench.offload.settings import HEAD_MARGIN, MARGIN, OffloadSettings
from eesd_lite.config import ModelConfig
from eesd_lite.errors import PrepareError
from eesd_lite.prepare import ModelSource
from eesd_lite.progress import Progress
from quant.checkpoint import Checkpoint

RUNTIME_BYTES = 400 << 20  # anonymous memory of a process with torch, numba and a tokenizer, before any model
AIRLLM_PYTHON = "EESD_AIRLLM_PYTHON"
Specs = Callable[[int], dict[str, PeerSpec | str]]  # memory -> spec by name, or why there is none


def worker_spec(
    settings: OffloadSettings, source: ModelSource, memory: int, rate: float | None, eos: tuple[int, ...], *,
    drafter: str | None = None, exit_layer: int | None = None,
) -> PeerSpec:  # fmt: skip
    """Our engine with one drafter, at one exit layer where that needs one; plain decoding without a drafter."""
    margin = MARGIN + (0 if exit_layer is None else HEAD_MARGIN)
    options: dict[str, Any] = {
        "device_memory": memory - margin - (RUNTIME_BYTES if settings.whole_process else 0),
        "context": settings.context,
        "threads": settings.threads,
        "throttle": rate,
        "draft_limit": settings.longest_draft,
        "controller": "off",
        "drafter": drafter or "head",
        "head": "off" if exit_layer is None else settings.head,
    }
    if exit_layer is not None:
        options |= {"exit_layer": exit_layer, "draft_vocab": settings.draft_vocab, "head_bits": settings.head_bits}
    values = {"model": str(source.folder) if source.recipe is None else source.name, "options": options, "sampling": {}}
    return PeerSpec(
        "eesd", sys.executable, values, eos, settings.limit_prompts, settings.max_new_tokens, command=worker.COMMAND
    )


def peer_specs(
    settings: OffloadSettings, source: ModelSource, *, eos: tuple[int, ...], progress: Progress, stack: ExitStack
) -> Specs:
    """What is needed once for all memories (16-bit copies, the GGUF file) is made here, and removed with `stack`."""
    makers: dict[str, Callable[[int], PeerSpec] | str] = {}
    folder: Path | None = None
    for name in settings.baselines:
        try:
            if name == llama_cpp.NAME:
                gguf = llama_cpp.find_gguf(settings.gguf, source, progress)
                makers[name] = lambda memory, gguf=gguf: llama_cpp.peer_spec(  # type: ignore[misc]
                    gguf, context=settings.context, threads=settings.threads, eos=eos, prompts=settings.limit_prompts,
                    max_new_tokens=settings.max_new_tokens,
                )  # fmt: skip
                continue
            _check_installed(name)
            if folder is None:
                folder = stack.enter_context(accelerate.sixteen_bit_copy(source.folder, progress))
            tokenizer = sorted(source.folder.glob("*token*.json"))
            makers[name] = (
                (lambda memory, folder=folder: _accelerate(settings, folder, memory, eos))  # type: ignore[misc]
                if name == accelerate.NAME
                else (lambda memory, folder=folder, files=tokenizer: _airllm(settings, folder, files, eos))  # type: ignore[misc]
            )
        except (PeerMissing, PrepareError) as missing:
            makers[name] = str(missing)
    return lambda memory: {name: make if isinstance(make, str) else make(memory) for name, make in makers.items()}


def _check_installed(name: str) -> None:
    if name == accelerate.NAME:
        accelerate.check_installed()
    elif python_for(AIRLLM_PYTHON) == sys.executable and importlib.util.find_spec("airllm") is None:
        raise PeerMissing(f"airllm is not installed; set {AIRLLM_PYTHON} to the Python of an environment that has it")


def _accelerate(settings: OffloadSettings, folder: Path, memory: int, eos: tuple[int, ...]) -> PeerSpec:
    config, tensors = ModelConfig.from_folder(folder), Checkpoint(folder).tensors
    sizes = [
        sum(info.nbytes for name, info in tensors.items() if name.startswith(f"model.layers.{index}."))
        for index in range(config.num_hidden_layers)
    ]
    room = memory - MARGIN - 2 * max(sizes)  # a layer that is being loaded, and what computes with it
    room -= sum(info.nbytes for name, info in tensors.items() if ".layers." not in name)
    tiers = []
    for size in sizes:
        room -= size
        tiers.append("device" if room >= 0 else "disk")
    spec = accelerate.peer_spec(folder, tiers=tiers, threads=settings.threads, eos=eos, prompts=settings.limit_prompts)
    return _shorter(spec, settings.baseline_tokens)


def _airllm(settings: OffloadSettings, folder: Path, tokenizer: list[Path], eos: tuple[int, ...]) -> PeerSpec:
    shards = folder.with_name(f"{folder.name}-airllm")
    shutil.rmtree(shards, ignore_errors=True)
    shards.mkdir()
    for path in tokenizer:  # it loads one, whatever it is asked
        shutil.copy(path, folder)
    values = {"folder": str(folder), "offload_folder": str(shards), "threads": settings.threads}
    every = ["disk"] * ModelConfig.from_folder(folder).num_hidden_layers
    facts = {"sweep_bytes": accelerate.sweep_bytes(folder, every), "weights": "bfloat16, dequantized"}
    return PeerSpec(
        "airllm", python_for(AIRLLM_PYTHON), values, eos, settings.limit_prompts, settings.baseline_tokens, facts
    )


def _shorter(spec: PeerSpec, tokens: int) -> PeerSpec:
    return PeerSpec(spec.name, spec.python, spec.settings, spec.eos, spec.prompts, tokens, spec.facts)
