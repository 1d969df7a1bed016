"""Peers of a benchmark: opened where they are installed, left out with a reason where they are not.

The engine's own plan says which layers a peer has to keep on disk. Called by `run`; how each peer is started is in
eesd_lite/baselines.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eesd_lite.baselines import accelerate, llama_cpp
from eesd_lite.baselines.peer import Peer, PeerMissing, PeerSpec
from eesd_lite.bench.report import baseline_figures
from eesd_lite.bench.settings import BenchSettings
from eesd_lite.bench.turns import Results
from eesd_lite.errors import PrepareError
from eesd_lite.prepare import ModelSource
from eesd_lite.progress import Progress

if TYPE_CHECKING:
    from eesd_lite.bench.run import Field


def open_peers(
    taking_part: Field,
    settings: BenchSettings,
    source: ModelSource,
    *,
    eos: tuple[int, ...],
    progress: Progress,
    stack: ExitStack,
) -> None:
    """Starts the baselines that were asked for and adds them to the field, or to its `skipped`."""
    for name in settings.baselines:
        progress(f"starting the baseline {name}", 0, 0)
        try:
            spec = _spec(name, taking_part, settings, source, eos=eos, progress=progress, stack=stack)
            taking_part.peers.append(stack.enter_context(Peer(spec)))
        except (PeerMissing, PrepareError) as missing:  # not installed, or its model cannot be fetched
            taking_part.skipped[name] = str(missing)
            progress(f"baseline {name} skipped: {missing}", 1, 1)


def _spec(
    name: str,
    taking_part: Field,
    settings: BenchSettings,
    source: ModelSource,
    *,
    eos: tuple[int, ...],
    progress: Progress,
    stack: ExitStack,
) -> PeerSpec:
    threads, plan = settings.threads, taking_part.plain.plan
    if name == llama_cpp.NAME:
        return llama_cpp.peer_spec(
            llama_cpp.find_gguf(settings.gguf, source, progress),
            context=plan.context,
            threads=threads,
            eos=eos,
            prompts=settings.baseline_prompts,
            max_new_tokens=settings.params.max_new_tokens,
        )
    accelerate.check_installed()
    folder: Path = stack.enter_context(accelerate.sixteen_bit_copy(source.folder, progress))
    return accelerate.peer_spec(folder, tiers=plan.tiers, threads=threads, eos=eos, prompts=settings.baseline_prompts)


def peer_figures(taking_part: Field, results: Results) -> dict[str, dict[str, Any]]:
    """The report's `baselines`: figures, or why there are none."""
    found: dict[str, dict[str, Any]] = {name: {"skipped": why} for name, why in taking_part.skipped.items()}
    for peer in taking_part.peers:
        figures = baseline_figures(peer.name, results) | peer.figures()
        plan = taking_part.plain.plan
        if peer.name == accelerate.NAME and plan.sweep_bytes:
            figures |= accelerate.owed_to_bytes(figures, sweep_bytes=plan.sweep_bytes)
        found[peer.name] = figures
    return found
