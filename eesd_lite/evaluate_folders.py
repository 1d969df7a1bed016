"""What `eesd eval` does: settings in, models loaded, figures out. The arithmetic is in `eesd_lite.evaluate`.

Model and reference see the same ids, cut by the model's own tokenizer; a reference with another vocabulary is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eesd_lite.bench.prompts import load_prompts
from eesd_lite.cache import Rows
from eesd_lite.config import ModelConfig
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError, ModelError, PromptError
from eesd_lite.evaluate import WINDOW, Scorer, TransformersScorer, evaluate, read_ids, read_text
from eesd_lite.preflight import check_tensors
from eesd_lite.prepare import resolve_model
from eesd_lite.progress import Progress
from eesd_lite.text import TextCodec
from quant.checkpoint import Checkpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    model: str
    reference: str | None = None
    text: Path | None = None
    ids: Path | None = None  # at most one of the two; neither: the shipped prompts
    window: int = WINDOW
    limit_windows: int | None = None
    engine: bool = False  # the model through our engine, and the reference by transformers unless memory is bounded
    device_memory: int | None = None  # bytes that model and reference may each take, both through our engine
    weights: str | None = None  # the file to read, where the folder of the model holds several
    quantize: str | None = None  # nf4 or fp4: the model in 4 bits, whoever runs it; a reference stays as it is
    dtype: str | None = None
    reference_dtype: str = "float32"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.text is not None and self.ids is not None:
            raise EesdError("--text and --ids exclude each other")
        if self.device_memory is not None and not self.engine:
            raise EesdError("--device-memory needs --engine: transformers holds whole models in memory")

    @property
    def model_dtype(self) -> str:
        return self.dtype or ("bfloat16" if self.engine else "float32")


class EngineScorer:
    """Our own forward: the prompt passes the layers as in prefill, lm_head sees a block of rows at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @torch.inference_mode()
    def blocks(self, ids: Sequence[int], rows: int) -> Iterator[Tensor]:
        """See `Scorer`."""
        engine, target = self._engine, self._engine.target
        if len(ids) > engine.plan.context:
            raise PromptError(f"a window of {len(ids)} tokens is longer than the context of {engine.plan.context}")
        engine.reset()  # what follows overwrites the cache
        positions = Rows.chain(0, len(ids), target.device)
        hidden = target.upper(target.lower(target.embed(list(ids)), positions), positions)
        for part in hidden.split(rows):
            yield target.logits(part.contiguous()).cpu()


def evaluate_folders(settings: EvalSettings, progress: Progress) -> dict[str, Any]:
    """The figures as a dict for JSON. Raises one of `errors.USER_ERRORS`."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    source = resolve_model(settings.model, progress)
    config = ModelConfig.from_folder(source.folder)
    check_tensors(Checkpoint(source.folder, settings.weights, tolerant=True, quantize=settings.quantize), config)
    folder = None
    if settings.reference is not None:
        folder = resolve_model(settings.reference, progress).folder
        _check_reference(folder, config)
    sequences = _sequences(settings, source.folder, config)
    with ExitStack() as stack:
        progress(f"loading {source.name}", 0, 0)
        longest = max((len(ids) for ids in sequences), default=0)
        model = _open(settings, source.folder, max(longest, 8), stack, progress)
        reference = None
        if folder is not None:
            progress(f"loading {settings.reference}", 0, 0)
            reference = _open_reference(settings, folder, max(longest, 8), stack, progress)
        found = evaluate(model, sequences, reference=reference, progress=progress)
    return {
        "model": source.name,
        "folder": str(source.folder),
        "reference": None if folder is None else str(folder),
        "forward": "engine" if settings.engine else "transformers",
        "dtype": settings.model_dtype,
        "quantize": settings.quantize,
        "reference_dtype": None if folder is None else settings.reference_dtype,
        "reference_forward": None if folder is None else _reference_forward(settings),
        "text": str(settings.text or settings.ids or "shipped prompts"),
        "window": settings.window,
        **found.as_dict(),
    }


def _check_reference(folder: Path, config: ModelConfig) -> None:
    """ModelError unless `folder` holds a whole model of the same vocabulary."""
    theirs = ModelConfig.from_folder(folder)
    if theirs.vocab_size != config.vocab_size:
        raise ModelError(
            f"the reference has {theirs.vocab_size} tokens and the model {config.vocab_size}: not the same model"
        )
    check_tensors(Checkpoint(folder, tolerant=True), theirs)


def _open(settings: EvalSettings, folder: Path, context: int, stack: ExitStack, progress: Progress) -> Scorer:
    if not settings.engine:
        return TransformersScorer.from_folder(
            folder, _DTYPES[settings.model_dtype], settings.quantize, settings.weights
        )
    engine = Engine.from_pretrained(
        folder, head="off", controller="off", context=context, dtype=settings.model_dtype,
        quantize=settings.quantize, weights=settings.weights, device_memory=settings.device_memory, progress=progress,
    )  # fmt: skip
    return EngineScorer(stack.enter_context(engine))


def _reference_forward(settings: EvalSettings) -> str:
    """transformers is the independent one, but holds all of a model."""
    return "transformers" if settings.device_memory is None else "engine"


def _open_reference(settings: EvalSettings, folder: Path, context: int, stack: ExitStack, progress: Progress) -> Scorer:
    if _reference_forward(settings) == "transformers":
        return TransformersScorer.from_folder(folder, _DTYPES[settings.reference_dtype])
    engine = Engine.from_pretrained(
        folder, head="off", controller="off", context=context, dtype=settings.reference_dtype,
        device_memory=settings.device_memory, progress=progress,
    )  # fmt: skip
    return EngineScorer(stack.enter_context(engine))


def _sequences(settings: EvalSettings, folder: Path, config: ModelConfig) -> list[list[int]]:
    if settings.ids is not None:
        found = read_ids(settings.ids, config.vocab_size)
    else:
        codec = TextCodec.from_folder(folder)
        if settings.text is not None:
            first = codec.encode("")  # the BOS, for models that expect one
            found = read_text(
                settings.text, lambda text: codec.encode(text, add_bos=False), first=first, window=settings.window
            )
        else:
            found = [codec.render_chat([{"role": "user", "content": prompt.text}]) for prompt in load_prompts()]
    highest = max((max(ids) for ids in found if ids), default=0)
    if highest >= config.vocab_size:
        raise PromptError(
            f"the text has the token id {highest}, outside the model's vocabulary of {config.vocab_size}: "
            "the tokenizer does not belong to this model"
        )
    return found[: settings.limit_windows]
