"""One benchmark from settings to report. Numbered stages, each a function or a module of its own.

`run_bench` opens what is real (model, engines, peers) and `measure` does the rest with whatever it is given, which is
how tests run it on fakes. Plain decoding shares the engine of the controllers when all have one split; with a memory
budget it gets an engine of its own, without head, whose bytes then hold more layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eesd_lite.baselines.peer import Peer
from eesd_lite.bench import internals, memory
from eesd_lite.bench.contenders import BenchEngine, Contender, EngineContender
from eesd_lite.bench.disk import DiskRate, mean_rate, raw_rate
from eesd_lite.bench.exits import measure_exits
from eesd_lite.bench.machine import describe_machine, versions
from eesd_lite.bench.peers import open_peers, peer_figures
from eesd_lite.bench.prompts import load_prompts
from eesd_lite.bench.report import controller_figures, disk_figures
from eesd_lite.bench.settings import PLAIN, BenchSettings
from eesd_lite.bench.turns import Course, take_turns
from eesd_lite.config import ModelConfig
from eesd_lite.controller import draft_limit_for
from eesd_lite.errors import PromptError
from eesd_lite.exit_choice import AUTO
from eesd_lite.head_list import heads_at_hand
from eesd_lite.prepare import ModelSource, resolve_model
from eesd_lite.progress import Progress, no_progress

CONTEXT_STEP = 256  # the context is rounded up to this, so that a slightly longer prompt changes no plan
_SLACK = 8
_DISK_TURN = 0.25  # seconds: the raw rate takes turns like everybody, since a disk's mood changes within seconds

Options = dict[str, Any]
OpenEngine = Callable[[str, Options, Progress], BenchEngine]


@dataclass
class Field:
    """Who takes part, and what is known about them."""

    plain: BenchEngine
    drafting: BenchEngine  # the same object as `plain` when all share one split
    options: dict[str, Options]  # by "plain" and "drafting": what the engines were opened with
    peers: list[Peer] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # baselines that are not there, and why

    @property
    def engines(self) -> dict[str, BenchEngine]:
        """By the names that the report uses; one entry when there is one engine."""
        return {"plain": self.plain} | ({"drafting": self.drafting} if self.drafting is not self.plain else {})

    def contenders(self, settings: BenchSettings) -> list[Contender]:
        """Plain decoding first, then the other controllers, then peers."""
        ours = [
            EngineContender(
                name, self.plain if name == PLAIN else self.drafting, keeps_learning=settings.keep_controllers
            )
            for name in settings.contenders
        ]
        return [*ours, *self.peers]


def run_bench(settings: BenchSettings, progress: Progress = no_progress) -> dict[str, Any]:
    """Everything; the result is the JSON object. Raises EesdError for what the user can cause."""
    from eesd_lite.text import TextCodec

    # 1. What is asked.
    prompts = load_prompts(settings.prompts, settings.limit_prompts)
    source = resolve_model(settings.model, progress)
    codec = TextCodec.from_folder(source.folder)
    ids = [
        codec.encode(p.text) if settings.raw_prompts else codec.render_chat([{"role": "user", "content": p.text}])
        for p in prompts
    ]
    course = Course(ids, settings.params, settings.repeat, settings.warmup_tokens)
    # 2. Where to draft, if that is to be measured.
    exits: dict[str, Any] = {}
    if settings.exit_layer == AUTO:
        exits = _measure_exits(settings, course, _context(settings, ids, source), source, progress)
        settings = replace(settings, exit_layer=exits["chosen"])
    with ExitStack() as stack:
        # 3. Who answers.
        taking_part = open_field(
            settings, _context(settings, ids, source), progress, open_engine=_open_engine, stack=stack
        )
        open_peers(taking_part, settings, source, eos=tuple(codec.eos_token_ids), progress=progress, stack=stack)
        # 4. Measuring, and the report.
        report = measure(settings, course, taking_part, progress)
    return {"benchmark": "eesd bench", "model": _describe_model(settings, source), **report, "exits": exits}


def _measure_exits(
    settings: BenchSettings, course: Course, context: int, source: ModelSource, progress: Progress
) -> dict[str, Any]:
    without_head, with_head = engine_options(settings, context)

    def open_one(exit_layer: int | None) -> BenchEngine:
        options = without_head if exit_layer is None else {**with_head, "exit_layer": exit_layer}
        return _open_engine(settings.model, options, progress)

    return measure_exits(settings, course, sorted(heads_at_hand(source, settings.head)), open_one, progress)


def engine_options(settings: BenchSettings, context: int) -> tuple[Options, Options]:
    """What engines are opened with: without a head, and with one."""
    common: Options = {
        "device": settings.device,
        "dtype": settings.dtype,
        "threads": settings.threads,
        "context": context,
        "device_memory": settings.device_memory,
        "resident_layers": settings.resident_layers,
        "weights": settings.weights,
        "quantize": settings.quantize,
        "draft_limit": draft_limit_for(*settings.contenders),
    }
    without_head = {**common, "head": "off", "controller": PLAIN}
    with_head = {**common, "exit_layer": settings.exit_layer, "head": settings.head, "controller": PLAIN}
    with_head |= {"drafter": settings.drafter, "draft_vocab": settings.draft_vocab}
    with_head |= {"head_bits": settings.head_bits}
    return without_head, with_head


def open_field(
    settings: BenchSettings, context: int, progress: Progress, *, open_engine: OpenEngine, stack: ExitStack
) -> Field:
    """The engines: one for all, or with a memory budget one for plain decoding and one for those that draft."""
    without_head, with_head = engine_options(settings, context)

    def opened(options: Options) -> BenchEngine:
        engine = open_engine(settings.model, options, progress)
        stack.callback(engine.close)
        return engine

    if not settings.drafts:
        plain = opened(without_head)
        return Field(plain, plain, {"plain": without_head})
    if settings.same_memory:
        return Field(opened(without_head), opened(with_head), {"plain": without_head, "drafting": with_head})
    shared = opened(with_head)
    return Field(shared, shared, {"plain": with_head})


def measure(settings: BenchSettings, course: Course, taking_part: Field, progress: Progress) -> dict[str, Any]:
    """Throttle, turns, disk and memory; everything of the report that does not concern the model's name."""
    machine = describe_machine()
    progress("setting the link", 0, 0)
    engines = list(taking_part.engines.values())
    throttle = internals.apply_throttle(settings.throttle, engines, course.prompt_ids[:2], course.params)
    files = sorted({path for engine in engines for path in internals.streamed_files(engine)})
    raw: list[list[DiskRate]] = [[] for _ in range(course.repeat)]

    def measure_disk(repeat: int) -> None:
        if files:
            raw[repeat].append(raw_rate(files, _DISK_TURN))

    contenders = taking_part.contenders(settings)
    results = take_turns(contenders, course, progress, after_prompt=measure_disk)
    controllers = {name: controller_figures(name, results) for name in settings.contenders}
    for name, bytes_ in _memory(settings, course, taking_part, progress).items():
        controllers[name].update(bytes_)
    disk: dict[str, Any] = {}
    sweep_bytes = taking_part.plain.plan.sweep_bytes
    if files and sweep_bytes:
        limit = throttle["bytes_per_second"] if throttle else None
        rates = [mean_rate(turns) for turns in raw]
        disk = disk_figures(rates, controllers[PLAIN], sweep_bytes=sweep_bytes, throttle=limit)
        disk |= {"method": raw[0][0].method, "bytes_read": sum(turn.bytes_read for turns in raw for turn in turns)}
    return {
        "settings": _describe_settings(settings, course),
        "plans": {name: _describe_plan(engine.plan) for name, engine in taking_part.engines.items()},
        "controllers": controllers,
        "baselines": peer_figures(taking_part, results),
        "throttle": throttle,
        "disk": disk,
        "machine": machine,
        "versions": versions(),
    }


def all_identical(report: dict[str, Any]) -> bool:
    """Whether every controller said exactly what plain decoding said."""
    measured = [row["controllers"] for row in report.get("exits", {}).get("rows", [])]
    return all(figures["identical"] for part in (report["controllers"], *measured) for figures in part.values())


def _memory(
    settings: BenchSettings, course: Course, taking_part: Field, progress: Progress
) -> dict[str, dict[str, int | None]]:
    """Peak memory by contender, each in a process of its own; None where that was switched off."""
    found: dict[str, dict[str, int | None]] = {}
    for number, name in enumerate(settings.contenders):
        found[name] = {"peak_rss_bytes": None, "start_rss_bytes": None}
        if settings.own_process_memory:
            progress(f"measuring the memory of {name}", number, len(settings.contenders))
            key = "drafting" if name != PLAIN and "drafting" in taking_part.options else "plain"
            longest = max(course.prompt_ids, key=len)
            options = taking_part.options[key]
            found[name] |= memory.measure(settings.model, options, controller=name, ids=longest, params=settings.params)
    return found


def _open_engine(model: str, options: Options, progress: Progress) -> BenchEngine:
    from eesd_lite.engine import Engine

    engine: BenchEngine = Engine.from_pretrained(model, **options, progress=progress)
    return engine


def _context(settings: BenchSettings, ids: Sequence[Sequence[int]], source: ModelSource) -> int:
    """Room for the longest prompt and its answer, unless the user says otherwise."""
    if settings.context is not None:
        return settings.context
    needed = max(len(prompt) for prompt in ids) + settings.params.max_new_tokens + _SLACK
    longest = ModelConfig.from_folder(source.folder).max_position_embeddings
    if needed > longest:
        raise PromptError(f"the longest prompt and its answer take {needed} tokens, the model has room for {longest}")
    return min(longest, -(-needed // CONTEXT_STEP) * CONTEXT_STEP)


def _describe_model(settings: BenchSettings, source: ModelSource) -> dict[str, Any]:
    return {"name": source.name, "asked_for": settings.model, "folder": str(source.folder)}


def _describe_settings(settings: BenchSettings, course: Course) -> dict[str, Any]:
    values = {k: v for k, v in vars(settings).items() if k not in ("model", "params", "throttle")}
    values |= asdict(settings.params)
    paths = {name: str(values[name]) for name in ("prompts", "gguf") if values[name] is not None}
    comparison = "same memory" if settings.same_memory else "same split"
    return {
        **values,
        **paths,
        "prompts_file": paths.get("prompts"),
        "prompts": len(course.prompt_ids),
        "prompt_tokens": sum(len(ids) for ids in course.prompt_ids),
        "comparison": comparison,
    }


def _describe_plan(plan: Any) -> dict[str, Any]:
    return {**asdict(plan), "items": dict(plan.items)}
