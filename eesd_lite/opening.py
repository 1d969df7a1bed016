"""From what a user asks for to the parts of an engine: model, plan, target, head. Called by `Engine.from_pretrained`.

What can be refused is refused before anything slow: options, then the folder's headers, then tokenizer, packed layers,
head and plan; weights are read last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eesd_lite.config import ModelConfig
from eesd_lite.contradictions import contradictions
from eesd_lite.controller import draft_limit_for
from eesd_lite.draft_vocabulary import DraftVocabulary, most_frequent
from eesd_lite.draft_weights import DraftWeights, usual_bits
from eesd_lite.drafter_names import check_drafter
from eesd_lite.errors import BudgetError, EesdError
from eesd_lite.exit_choice import ExitTable, ExitWish, check_exit, split_exits
from eesd_lite.exit_head import ExitHead
from eesd_lite.exit_opening import settle
from eesd_lite.head_choice import choose_head, ids_by_frequency
from eesd_lite.head_packing import notices as rounding_notices
from eesd_lite.loader import (
    LoadOptions,
    choose_kernels,
    default_context,
    identity,
    load_head,
    load_target,
    plan_for,
    rates_for,
)
from eesd_lite.packed_store import open_store
from eesd_lite.placement import Plan
from eesd_lite.preflight import check_tensors
from eesd_lite.prepare import resolve_model
from eesd_lite.progress import Progress
from eesd_lite.saved_plan import read_tiers, write_plan
from eesd_lite.sizing import kernel_for
from eesd_lite.streamer import Reader
from eesd_lite.target import Target
from eesd_lite.text import TextCodec
from eesd_lite.tiers import HOST_MODES, leading_device_layers
from eesd_lite.units import device_memory_size, parse_size
from quant.checkpoint import Checkpoint

LARGEST_THREADS = 1024  # OpenMP libraries crash on absurd numbers instead of refusing them


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments of `Engine.from_pretrained`, where they are explained."""

    device: str
    device_memory: str | int | None
    resident_layers: int | None
    exit_layer: ExitWish
    head: str | Path | None
    force_head: bool
    controller: str
    context: int | None
    threads: int | None
    dtype: str
    quantize: str | None
    throttle: float | None
    draft_limit: int | None
    drafter: str
    template: str | None
    host_memory: str | int | None
    host_mode: str
    plan_file: str | Path | None
    weights: str | None
    draft_vocab: int | str | None
    head_bits: int | None

    @property
    def draft(self) -> DraftWeights:
        """Of the weights that only drafts read."""
        kernel = kernel_for(self.device.partition(":")[0], self.dtype)
        return DraftWeights(usual_bits(kernel) if self.head_bits is None else self.head_bits, self.draft_vocab)

    def checked_draft_limit(self) -> int:
        """How many tokens a round may draft; EesdError for any option that no model could fulfil."""
        check_drafter(self.drafter)
        planned = draft_limit_for(self.controller)  # a misspelt name fails before minutes of loading
        limit = planned if self.draft_limit is None else self.draft_limit
        if not 1 <= limit <= 64:
            raise EesdError(f"draft_limit must be from 1 to 64, not {limit}")
        if self.host_mode not in HOST_MODES:
            raise EesdError(f"host_mode must be one of {', '.join(HOST_MODES)}, not '{self.host_mode}'")
        if self.threads is not None and not 1 <= self.threads <= LARGEST_THREADS:
            raise EesdError(f"threads must be from 1 to {LARGEST_THREADS}, not {self.threads}")
        self.draft.check()
        check_exit(self.exit_layer, self.head)
        return limit

    def for_loading(self, config: ModelConfig, draft_limit: int) -> LoadOptions:
        """In bytes and integers."""
        return LoadOptions(
            device=self.device, dtype=self.dtype, device_memory=device_memory_size(self.device_memory, self.device),
            resident_layers=self.resident_layers, context=default_context(config, self.context),
            draft_limit=draft_limit, threads=self.threads, throttle=self.throttle,
            host_memory=None if self.host_memory is None else parse_size(self.host_memory), host_mode=self.host_mode,
            draft=self.draft,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What an engine is made of. Whoever drops it without making one has to close `target.bank`."""

    target: Target
    text: TextCodec
    plan: Plan
    heads: tuple[ExitHead, ...]  # ascending by exit layer
    draft_limit: int
    name: str
    notices: tuple[str, ...]
    identity: str
    exits: ExitTable | None = None  # where the exit layer was chosen by what it promises


def open_parts(model: str | Path, asked: EngineOptions, reader: Reader | None, progress: Progress) -> Opened:
    """Raises one of `errors.USER_ERRORS`."""
    draft_limit = asked.checked_draft_limit()
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    source = replace(resolve_model(model, progress), weights=asked.weights, quantize=asked.quantize)
    config = ModelConfig.from_folder(source.folder)
    options = asked.for_loading(config, draft_limit)
    checkpoint = Checkpoint(source.folder, asked.weights, tolerant=True, quantize=asked.quantize)
    notes = [*check_tensors(checkpoint, config), *contradictions(checkpoint, config)]
    text = TextCodec.from_folder(source.folder, template=asked.template)
    ops, kernels = choose_kernels(options, checkpoint, progress)
    known = min(text.vocab_size, config.vocab_size) if text.vocab_size > 0 else config.vocab_size
    asked.draft.check(known)
    store = open_store(checkpoint, config, kernels, progress)
    wish = "off" if asked.drafter == "ngram" else asked.head
    saved = None if asked.plan_file is None else Path(asked.plan_file)
    if saved is not None and saved.exists():
        tiers = read_tiers(saved, layers=config.num_hidden_layers, kernels=kernels.key)
        first = leading_device_layers(tiers)
        if options.resident_layers not in (None, first):
            asked_for = f"{options.resident_layers} were asked for"
            raise BudgetError(f"{saved}: a plan with {first} resident layers, but {asked_for}; remove it to plan anew")
        options = replace(options, tiers=tiers)
    deepest, others = split_exits(asked.exit_layer)
    settled, wish = settle(
        source, checkpoint, config, store, options, ops, kernels, exit_layer=deepest, head=wish, saved=saved,
        progress=progress,
    )  # fmt: skip
    chosen, *more = (
        choose_head(source, config, wish, layer, force=asked.force_head, progress=progress)
        for layer in (settled.exit_layer, *others)
    )
    options = replace(options, other_exits=others if chosen.head is not None else ())
    rates = rates_for(checkpoint, config, store, options, progress)
    plan = plan_for(checkpoint, config, store, options, chosen.exit_layer, rates)
    if saved is not None and options.tiers is None:
        write_plan(saved, plan, kernels.key, settled.table)
    target = load_target(checkpoint, config, store, plan, options, ops, kernels, reader, progress)
    try:
        heads, told = list[ExitHead](), tuple[str, ...]()
        if plan.exit_layer is not None and chosen.head is not None:
            progress("preparing the exit head", 0, 0)
            ids, vocabulary = None, None
            if isinstance(asked.draft_vocab, int):
                order = ids_by_frequency(source, chosen.head)
                ids = most_frequent(asked.draft_vocab, order=order, always=text.eos_token_ids, vocabulary=known)
            if asked.draft_vocab is not None:
                vocabulary = DraftVocabulary.of(target.lm_head, ids, bits=asked.draft.bits, kernels=kernels)
            tensors = [one.head for one in (*more, chosen) if one.head is not None]
            heads = [load_head(target, one, kernels, vocabulary, asked.draft.bits) for one in tensors]
            told = rounding_notices(kernels, asked.draft.bits)
        return Opened(
            target=target, text=text, plan=plan, heads=tuple(heads), draft_limit=draft_limit, name=source.name,
            notices=(*notes, *settled.notes, *chosen.notices, *plan.notes, *told),
            identity=identity(checkpoint, kernels, store, options, ops), exits=settled.table,
        )  # fmt: skip
    except BaseException:  # Ctrl-C included: nobody else would stop the reading threads
        target.bank.close()
        raise
