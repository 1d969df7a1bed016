"""`eesd train`: text, hidden states, closed-form start, training, head files, report.

Every stage leaves its result on disk (states/, checkpoint-exitNN.pt, exit-NN.safetensors), so a killed run is
continued by the same call. Under `accelerate launch` the main process writes the states and all processes train; on
several machines the output folder must be a shared one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from eesd_lite.config import ModelConfig
from eesd_lite.distill import texts
from eesd_lite.distill.real_tau import measure_tau
from eesd_lite.distill.report import Quality
from eesd_lite.distill.ridge import Start, TargetParts, given_head, instant_head
from eesd_lite.distill.settings import TrainSettings
from eesd_lite.distill.state_cache import StateCache, cache_bytes
from eesd_lite.distill.train import HeadTrainer, TrainResult
from eesd_lite.draft_vocabulary import frequency_order
from eesd_lite.errors import PrepareError
from eesd_lite.head_file import load_head, save_head, states_fingerprint
from eesd_lite.layer_shapes import HeadShape, layer_prefix
from eesd_lite.progress import Progress, no_progress
from eesd_lite.rope import layer_reaches

_LONGEST = 1024  # tokens of one of the user's samples; longer ones are cut


@dataclass(frozen=True)
class TrainRequest:
    """What to train. `cache` uses an existing state cache; `data` a JSON lines file; neither: self-written text."""

    model: str
    exit_layers: tuple[int, ...]
    out: Path
    tokens: int = 1_000_000
    data: Path | None = None
    samples: int | None = None
    cache: Path | None = None
    instant: bool = False
    start: Path | None = None  # a folder of finished heads to go on from; None: the closed form
    quantize: str | None = None  # nf4 or fp4: the teacher is the 16-bit model in 4 bits, as it will be run
    weights: str | None = None  # the file to read, where the model's folder holds several
    seed: int = 0
    settings: TrainSettings = field(default_factory=TrainSettings)


@dataclass(frozen=True)
class HeadReport:
    """One line of the report. `start` is the closed form or the given head, `quality` the head as saved."""

    exit_layer: int
    path: Path
    variant: str  # how the start was solved, or "given"
    start: Quality
    quality: Quality
    tokens: int
    minutes: float
    skipped: int
    tau: float = 0.0  # of real decoding; 0 before it was measured


def head_name(exit_layer: int) -> str:
    return f"exit-{exit_layer:02d}.safetensors"


def train_heads(request: TrainRequest, progress: Progress = no_progress) -> list[HeadReport]:
    """Run or continue a whole training; returns one report per exit layer, in the order asked for.

    Under `accelerate launch` all processes call it, once: it leaves their group at its end."""
    from eesd_lite.prepare import resolve_model

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",
        # Processes that wait for the main one to write the states may wait for hours.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=2))],
    )
    if not accelerator.is_main_process:
        progress = no_progress
    folder = resolve_model(request.model, progress).folder
    config = ModelConfig.from_folder(folder)
    check_exit_layers(request.exit_layers, config)
    _check_start(request, folder, config)
    cache_folder = request.cache or Path(request.out) / "states"
    if accelerator.is_main_process and request.cache is None:
        write_states(request, folder, config, cache_folder, progress)
    accelerator.wait_for_everyone()
    cache = StateCache(cache_folder)
    fingerprint = states_fingerprint(folder, config, request.quantize, request.weights)
    if cache.meta.fingerprint != fingerprint:
        raise PrepareError(f"{cache_folder}: states of another model; delete the folder or give another --out")
    chosen = {"quantize": request.quantize, "weights": request.weights}
    parts = target_parts(folder, config, request.exit_layers, longest=int(cache.lengths.max()), **chosen)
    reports = []
    for exit_layer in request.exit_layers:
        report = _one_head(request, exit_layer, cache, parts, config, accelerator, progress)
        if accelerator.is_main_process:
            tau = measure_tau(folder, report.path, cache, progress, **chosen)
            report = replace(report, tau=round(tau, 3))
        reports.append(report)
    if accelerator.is_main_process:
        _write_report(Path(request.out), reports)
    leave_together(accelerator)
    return reports


def leave_together(accelerator: Accelerator) -> None:
    """End the group of processes of a launch, all at once. Without it a process that ends early takes its connections
    down while threads of the group still use them, and is aborted now and then."""
    accelerator.wait_for_everyone()
    accelerator.end_training()


def check_exit_layers(exit_layers: Sequence[int], config: ModelConfig) -> None:
    if not exit_layers or len(set(exit_layers)) != len(exit_layers):
        raise PrepareError(f"exit layers {list(exit_layers)}: name at least one, each once")
    for exit_layer in exit_layers:
        if not 0 < exit_layer < config.num_hidden_layers:
            raise PrepareError(
                f"exit layer {exit_layer} is not possible; this model allows 1 to {config.num_hidden_layers - 1}"
            )


def _check_start(request: TrainRequest, folder: Path, config: ModelConfig) -> None:
    """Refuses heads to start from before text is written for them, which may take an hour."""
    if request.start is None:
        return
    if request.start.resolve() == Path(request.out).resolve():
        raise PrepareError(f"{request.start}: the heads to start from would be overwritten; give another --out")
    fingerprint = states_fingerprint(folder, config, request.quantize, request.weights).split("-")[0]
    for exit_layer in request.exit_layers:
        load_head(request.start / head_name(exit_layer), config, fingerprint)


def write_states(
    request: TrainRequest, folder: Path, config: ModelConfig, out: Path, progress: Progress = no_progress
) -> None:
    """The text and its hidden states, unless they are there already."""
    from eesd_lite.home import require_free

    wanted = request.tokens
    if (out / "meta.json").exists():
        have = StateCache(out).meta
        if (request.data is not None and have.tokens) or have.tokens >= wanted:
            return
        wanted -= have.tokens
    out.mkdir(parents=True, exist_ok=True)
    size = cache_bytes(
        tokens=wanted, sequences=wanted // 256, hidden_size=config.hidden_size, exits=len(request.exit_layers)
    )
    require_free(out, size, "hidden states for training")
    if request.data is None:
        from eesd_lite.distill.generate import generate_cache

        generate_cache(
            folder, out, exit_layers=request.exit_layers, tokens=request.tokens, seed=request.seed, progress=progress,
            quantize=request.quantize, weights=request.weights,
        )  # fmt: skip
        return
    from eesd_lite.distill.teacher import cache_texts
    from eesd_lite.text import TextCodec

    samples = texts.read_samples(request.data, samples=request.samples)
    sequences = texts.tokenize(
        samples,
        TextCodec.from_folder(folder),
        longest=min(_LONGEST, config.max_position_embeddings),
        max_tokens=request.tokens,
        progress=progress,
    )
    highest = max(max(ids) for ids in sequences)
    if highest >= config.vocab_size:
        raise PrepareError(
            f"{request.data}: token id {highest} is outside the model's vocabulary of {config.vocab_size}; "
            "the tokenizer does not belong to this model, or the text holds tokens that were added to it"
        )
    cache_texts(
        folder, out, sequences, exit_layers=request.exit_layers, progress=progress, quantize=request.quantize,
        weights=request.weights,
    )  # fmt: skip


def target_parts(
    folder: Path, config: ModelConfig, exit_layers: Sequence[int], *, longest: int, quantize: str | None = None,
    weights: str | None = None,
) -> TargetParts:  # fmt: skip
    """The few dense tensors of the target that training touches."""
    from eesd_lite.distill.teacher import DenseTarget

    target = DenseTarget(
        folder, context=longest, dtype=torch.float32, layer_budget=0, quantize=quantize, weights=weights
    )
    shape, layers = HeadShape.from_config(config), {}
    for exit_layer in exit_layers:
        found = target.layer(exit_layer).named()
        missing = next((name for name in shape.layer_shapes() if name not in found), None)
        if missing is not None:
            raise PrepareError(f"{folder}: tensor '{layer_prefix(exit_layer)}.{missing}' is missing")
        layers[exit_layer] = {name: found[name] for name in shape.layer_shapes()}
    return TargetParts(
        shape=shape,
        rms_norm_eps=config.rms_norm_eps,
        reaches=layer_reaches(config, longest),
        layers=layers,
        norm=target.norm,
        lm_head=target.lm_head,
    )


def _one_head(
    request: TrainRequest,
    exit_layer: int,
    cache: StateCache,
    parts: TargetParts,
    config: ModelConfig,
    accelerator: Accelerator,
    progress: Progress,
) -> HeadReport:
    settings = request.settings
    begun = time.monotonic()
    compute = getattr(torch, settings.compute)
    start = _given(request.start, exit_layer, cache, parts, config, compute) if request.start else None
    start = start or instant_head(cache, exit_layer, parts, compute=compute, progress=progress)
    result: TrainResult | None = None
    if not request.instant:
        trainer = HeadTrainer(
            cache,
            exit_layer,
            parts,
            start=start.tensors,
            start_name=start.name,
            out=Path(request.out),
            settings=settings,
            accelerator=accelerator,
            progress=progress,
        )
        result = trainer.run()
    path = Path(request.out) / head_name(exit_layer)
    report = HeadReport(
        exit_layer=exit_layer,
        path=path,
        variant=start.variant,
        start=start.quality,
        quality=result.quality if result else start.quality,
        tokens=result.tokens if result else 0,
        minutes=round(result.minutes if result else (time.monotonic() - begun) / 60, 2),
        skipped=result.skipped if result else 0,
    )
    if accelerator.is_main_process:
        summary = {
            "text_tokens": cache.meta.tokens,
            "tokens": report.tokens,
            "minutes": report.minutes,
            "agreement": round(report.quality.agreement, 4),
            "overlap": round(report.quality.overlap, 4),
            "closed_form": start.variant,
            "trained": result is not None,
        }
        save_head(
            path,
            result.tensors if result else start.tensors,
            config=config,
            exit_layer=exit_layer,
            fingerprint=cache.meta.fingerprint.removesuffix(f"-{request.quantize}"),
            summary=summary,
            draft_vocab=torch.from_numpy(frequency_order(cache.tokens)),
        )
    return report


def _given(
    folder: Path, exit_layer: int, cache: StateCache, parts: TargetParts, config: ModelConfig, compute: torch.dtype
) -> Start:
    """The finished head for `exit_layer` in `folder`; HeadError where there is none, or one of another model."""
    head = load_head(folder / head_name(exit_layer), config, cache.meta.fingerprint.split("-")[0])
    return given_head(head.tensors, cache, exit_layer, parts, compute=compute)


def _write_report(out: Path, reports: Sequence[HeadReport]) -> None:
    temporary = out / "report.json.tmp"
    temporary.write_text(json.dumps([asdict(r) | {"path": str(r.path)} for r in reports], indent=1))
    os.replace(temporary, out / "report.json")
