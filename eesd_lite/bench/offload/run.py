"""The matrix, point by point: at each memory and link rate all contenders run side by side and take turns.

Every contender is a process of its own under a real memory limit: what its runtime holds before it loads a model, plus
the same bytes for all. Peers run at the disk's own rate only. A contender that cannot start, or is killed by its limit,
is reported as such and the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eesd_lite.baselines.peer import Peer, PeerMissing, PeerSpec
from eesd_lite.bench.contenders import Run
from eesd_lite.bench.disk import DiskRate, mean_rate, raw_rate
from eesd_lite.bench.limits import memory_group
from eesd_lite.bench.machine import describe_machine, versions
from eesd_lite.bench.offload.contenders import peer_specs, worker_spec
from eesd_lite.bench.offload.figures import contender_figures, disk_figures
from eesd_lite.bench.offload.settings import OffloadSettings
from eesd_lite.bench.prompts import load_prompts
from eesd_lite.bench.settings import PLAIN
from eesd_lite.errors import EesdError
from eesd_lite.params import SamplingParams
from eesd_lite.prepare import ModelSource, resolve_model
from eesd_lite.progress import Progress, no_progress

_DISK_TURN = 0.5  # seconds


@dataclass
class Contender:
    """One way to answer: a process and, for ours, a controller; several controllers share a process."""

    name: str
    peer: Peer
    controller: str | None  # None: another program
    exit_layer: int | None = None
    runs: list[list[Run]] = field(default_factory=list)  # [repeat][prompt]
    failed: str | None = None


def run_offload(settings: OffloadSettings, progress: Progress = no_progress) -> dict[str, Any]:
    """Everything; the result is the JSON object. Raises EesdError for what the user can cause."""
    from eesd_lite.text import TextCodec

    source = resolve_model(settings.model, progress)
    codec = TextCodec.from_folder(source.folder)
    prompts = load_prompts(settings.prompts, settings.limit_prompts)
    ids = [codec.render_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    machine = describe_machine()
    eos = tuple(codec.eos_token_ids)
    points = []
    with ExitStack() as stack:
        specs = peer_specs(settings, source, eos=eos, progress=progress, stack=stack)
        for memory in settings.memories:
            for rate in settings.rates:
                peers = specs(memory) if rate is None else {}
                points.append(_point(settings, source, ids, memory, rate, peers, eos, progress))
    return {
        "benchmark": "eesd bench offload",
        "model": {"name": source.name, "asked_for": settings.model},
        "settings": {name: _plain(value) for name, value in vars(settings).items()},
        "points": points,
        "machine": machine,
        "versions": versions(),
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _point(
    settings: OffloadSettings, source: ModelSource, ids: Sequence[Sequence[int]], memory: int, rate: float | None,
    peers: dict[str, PeerSpec | str], eos: tuple[int, ...], progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """One memory and one link rate."""
    contenders: list[Contender] = []
    skipped: dict[str, str] = {}
    with ExitStack() as stack:

        def start(
            name: str, spec: PeerSpec | str, controllers: Sequence[str | None], exit_layer: int | None = None
        ) -> None:
            progress(f"starting {name}", 0, 0)
            try:
                if isinstance(spec, str):
                    raise PeerMissing(spec)
                peer = _start(spec, settings, memory, stack)
            except (PeerMissing, EesdError) as reason:
                skipped[name] = str(reason)
                return
            names = [name if control in (None, PLAIN) else f"{name}, {control}" for control in controllers]
            contenders.extend(
                Contender(label, peer, control, exit_layer) for label, control in zip(names, controllers, strict=True)
            )

        start(PLAIN, worker_spec(settings, source, memory, rate, eos), [PLAIN])
        for drafter, exit_layer in settings.sources:
            spec = worker_spec(settings, source, memory, rate, eos, drafter=drafter, exit_layer=exit_layer)
            start(_name(drafter, exit_layer), spec, settings.drafting, exit_layer)
        for name, peer_spec in peers.items():
            start(name, peer_spec, [None])
        if not any(contender.controller == PLAIN for contender in contenders):
            raise EesdError(f"plain decoding does not run in {memory >> 20} MiB: {skipped[PLAIN]}")
        raw = _take_turns(settings, contenders, ids, progress)
        plain = next(contender for contender in contenders if contender.controller == PLAIN)
        figures = {contender.name: contender_figures(contender, plain) for contender in contenders}
    link = mean_rate(raw) if raw else None
    return {
        "memory_bytes": memory,
        "link_bytes_per_second": rate,
        "simulated": rate is not None,
        "contenders": figures,
        "skipped": skipped,
        "disk": disk_figures(link, raw, rate, plain.peer.info["plan"]["sweep_bytes"], figures[PLAIN]),
    }


def _name(drafter: str, exit_layer: int | None) -> str:
    """As reports call it."""
    if exit_layer is None:
        return drafter
    return f"exit {exit_layer}" if drafter == "head" else f"exit {exit_layer} and n-grams"


def _start(spec: PeerSpec, settings: OffloadSettings, memory: int, stack: ExitStack) -> Peer:
    group = stack.enter_context(memory_group())
    if settings.whole_process:
        group.limit(memory)
    return stack.enter_context(Peer(spec, group, None if settings.whole_process else memory))


def _take_turns(
    settings: OffloadSettings, contenders: Sequence[Contender], ids: Sequence[Sequence[int]], progress: Progress
) -> list[DiskRate]:
    """Everybody answers every prompt, who begins rotates, and the disk itself takes a turn after each prompt."""
    plain = next(contender for contender in contenders if contender.controller == PLAIN)
    files = [Path(name) for name in plain.peer.info["files"]]
    params = SamplingParams(max_new_tokens=settings.max_new_tokens, ignore_eos=settings.ignore_eos)
    raw: list[DiskRate] = []
    total, done = settings.repeat * len(ids) * len(contenders), 0
    for repeat in range(settings.repeat):
        for contender in contenders:
            contender.runs.append([])
        for number, prompt in enumerate(ids):
            first = (repeat * len(ids) + number) % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                progress(f"repeat {repeat + 1}, prompt {number + 1}, {contender.name}", done, total)
                done += 1
                if contender.failed is None:
                    _answer(contender, prompt, params)
            if files:
                raw.append(raw_rate(files, _DISK_TURN))
    return raw


def _answer(contender: Contender, ids: Sequence[int], params: SamplingParams) -> None:
    more = {} if contender.controller is None else {"controller": contender.controller}
    try:
        contender.runs[-1].append(contender.peer.run(ids, params, **more))
    except EesdError as error:
        contender.failed = str(error)
