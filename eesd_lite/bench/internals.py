"""What a benchmark needs from inside an engine: which files it streams, its link's rate, how long a draft step takes.

The only place of the benchmark that looks behind Engine's public names. A draft step is timed by a controller that
notes when it is asked: between two questions lies exactly one step (exit head, lm_head, layers below the exit).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eesd_lite.bench.settings import Throttle
from eesd_lite.errors import EesdError
from eesd_lite.params import SamplingParams

CALIBRATION_DRAFTS = 8  # a round
CALIBRATION_TOKENS = 48
CALIBRATION_PROMPTS = 4


class Stopwatch:
    """A controller that always drafts `length` tokens and notes the seconds of every step but a round's first."""

    name = "stopwatch"

    def __init__(self, length: int) -> None:
        self.seconds: list[float] = []
        self._length = length
        self._left = 0
        self._asked: float | None = None

    def begin(self, limit: int) -> None:
        self._left, self._asked = min(limit, self._length), None

    def go_on(self) -> bool:
        now = time.perf_counter()
        if self._asked is not None:
            self.seconds.append(now - self._asked)
        self._asked = now
        return self._left > 0

    def drafted(self, confidence: float) -> None:
        self._left -= 1

    def observe(self, accepted: int, seconds: float) -> None:
        pass

    def belief(self) -> dict[str, Any]:
        return {}


def streamed_files(engine: Any) -> tuple[Path, ...]:
    """The blobs that a sweep of this engine reads, in order."""
    streamer = engine.target.bank.streamer
    return () if streamer is None else tuple(streamer._store.path(index) for index in streamer.layers)


def set_rate(engine: Any, rate: float | None) -> None:
    """From now on the engine's reader delivers no more than `rate` bytes per second."""
    streamer = engine.target.bank.streamer
    if streamer is not None:
        streamer.reader.rate = rate


def draft_step_seconds(engine: Any, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Median over some rounds on each of the first prompts."""
    engine.set_controller(f"fixed:{CALIBRATION_DRAFTS}")  # anything but off, so that the engine drafts
    watch = engine.controller = Stopwatch(CALIBRATION_DRAFTS)
    short = replace(params, max_new_tokens=min(params.max_new_tokens, CALIBRATION_TOKENS), ignore_eos=True)
    for ids in prompts[:CALIBRATION_PROMPTS]:
        engine.reset()
        for _ in engine.generate(list(ids), short):
            pass
    if not watch.seconds:
        raise EesdError(f"--throttle sweep: {short.max_new_tokens} new tokens are too few to measure a draft step")
    return statistics.median(watch.seconds)


def apply_throttle(
    asked: Throttle | None, engines: Sequence[Any], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Any]:
    """Gives every engine the same link and says which; {} without a throttle. The last engine drafts."""
    if asked is None:
        return {}
    drafting = engines[-1]
    found: dict[str, Any] = {"simulated": True, "bytes_per_second": asked.bytes_per_second}
    if asked.draft_steps_per_sweep is not None:
        sweep = drafting.plan.sweep_bytes
        if not sweep or drafting.plan.exit_layer is None:
            raise EesdError(
                "--throttle sweep=... needs drafting and layers on disk; give --resident-layers or less memory"
            )
        step = draft_step_seconds(drafting, prompts, params)
        # Once more behind a link of about that rate: reading at full speed takes a little time from drafting.
        set_rate(drafting, sweep / (asked.draft_steps_per_sweep * step))
        step = draft_step_seconds(drafting, prompts, params)
        found["bytes_per_second"] = sweep / (asked.draft_steps_per_sweep * step)
        found |= {"draft_step_seconds": step, "draft_steps_per_sweep": asked.draft_steps_per_sweep}
        found["calibrated_on_sweep_bytes"] = sweep
    for engine in engines:
        set_rate(engine, found["bytes_per_second"])
    return found
