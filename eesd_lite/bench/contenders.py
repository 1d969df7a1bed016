"""Who takes part in a benchmark, behind one method: answer these ids, timed by the benchmark's own clock.

An EngineContender is a controller on an engine; several may share one engine, which makes their kernels and placement
the same by construction. A PeerContender (eesd_lite/baselines) is another program. The clock starts when the first
token has arrived, so that prefill is apart and everything between tokens, ours or theirs, counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eesd_lite.controller import any_controller
from eesd_lite.params import SamplingParams
from eesd_lite.stats import Stats


@dataclass(frozen=True)
class Run:
    """One answer of one contender."""

    ids: tuple[int, ...]
    prefill_seconds: float  # until the first token
    decode_seconds: float  # from the first token to the last
    stats: Stats | None = None  # what the engine counted meanwhile; None for peers

    @property
    def decoded(self) -> int:
        """Tokens that decoding produced; the first one comes from prefill."""
        return max(0, len(self.ids) - 1)


class BenchEngine(Protocol):
    """What a benchmark needs of an Engine; tests pass fakes."""

    stats: Stats
    plan: Any
    controller: Any

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Any]: ...
    def set_controller(self, spec: str) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


class Contender(Protocol):
    """One taker of turns. `prompts` is how many of the prompts it answers; None means all."""

    name: str
    prompts: int | None

    def run(self, ids: Sequence[int], params: SamplingParams) -> Run: ...


class EngineContender:
    """A controller on an engine, the cache empty for every prompt.

    Every prompt is a conversation of its own, so the controller begins anew; with `keeps_learning` the prompts are
    turns of one long conversation, as far as the controller can tell.
    """

    prompts: int | None = None

    def __init__(self, name: str, engine: BenchEngine, *, keeps_learning: bool = False) -> None:
        self.name = name
        self.engine = engine
        self._learned = any_controller(name) if keeps_learning else None

    def run(self, ids: Sequence[int], params: SamplingParams) -> Run:
        self.engine.reset()
        self.engine.set_controller(self.name)
        if self._learned is not None:
            self.engine.controller = self._learned
        before = self.engine.stats.snapshot()
        tokens: list[int] = []
        started = first = time.perf_counter()
        for event in self.engine.generate(list(ids), params):
            if event.token_id is not None:
                if not tokens:
                    first = time.perf_counter()
                tokens.append(event.token_id)
        finished = time.perf_counter()
        stats = self.engine.stats.since(before)
        return Run(tuple(tokens), first - started, finished - first, stats)
