"""What one benchmark is asked to do, validated before anything heavy is imported.

BenchSettings is plain data; `contenders` builds the list of who takes part, with plain decoding ("off") always first,
because every other figure is relative to it. Throttle is the simulated link: a rate, or a ratio to be calibrated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eesd_lite.controller import any_controller
from eesd_lite.errors import EesdError
from eesd_lite.exit_choice import AUTO, ExitWish, check_exit
from eesd_lite.params import SamplingParams
from eesd_lite.units import parse_size

PLAIN = "off"
BASELINES = ("accelerate", "llama.cpp")
_SWEEP = re.compile(r"sweep=([0-9]+(?:\.[0-9]+)?)")


@dataclass(frozen=True)
class Throttle:
    """A slower link than the machine has. Exactly one of the two is set; every contender gets the same bytes/s."""

    bytes_per_second: float | None = None
    draft_steps_per_sweep: float | None = None  # the rate at which one sweep lasts this many draft steps

    @classmethod
    def parse(cls, text: str) -> Throttle:
        """Reads "800MB", "800MB/s" or "sweep=40"."""
        value = text.strip()
        match = _SWEEP.fullmatch(value)
        if match:
            steps = float(match[1])
            if steps <= 0:
                raise EesdError(f"--throttle {text}: a sweep must last more than 0 draft steps")
            return cls(draft_steps_per_sweep=steps)
        if value.startswith("sweep"):
            raise EesdError(f"cannot read --throttle {text!r}; write for example sweep=40")
        rate = parse_size(value.removesuffix("/s"))
        if rate <= 0:
            raise EesdError(f"--throttle {text}: the rate must be above 0 bytes a second")
        return cls(bytes_per_second=float(rate))


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """All options of one run; sizes in bytes."""

    model: str
    device: str = "cpu"
    dtype: str = "bfloat16"
    threads: int | None = None
    context: int | None = None  # None: what the longest prompt and the answer need
    device_memory: int | None = None
    resident_layers: int | None = None
    exit_layer: ExitWish = None  # "auto": the exits are measured first, and the fastest is taken
    head: str | None = None
    drafter: str = "head"
    draft_vocab: int | str | None = None  # the head drafts so many of the most frequent tokens; None: all
    head_bits: int | None = None  # of the weights that only drafts read; None: the usual
    weights: str | None = None  # the file to read, where the model's folder holds several
    quantize: str | None = None  # nf4 or fp4: a 16-bit model in 4 bits
    keep_controllers: bool = False  # True: what they learned on one prompt serves the next
    controllers: tuple[str, ...] = (PLAIN, "fixed:4", "calibrated")
    throttle: Throttle | None = None
    baselines: tuple[str, ...] = ()
    baseline_prompts: int = 8
    gguf: Path | None = None
    prompts: Path | None = None
    limit_prompts: int | None = None
    raw_prompts: bool = False  # True: the text as it is, without the chat template
    params: SamplingParams = SamplingParams(max_new_tokens=128)
    repeat: int = 3
    warmup_tokens: int = 32
    own_process_memory: bool = True

    def __post_init__(self) -> None:
        if self.device_memory is not None and self.resident_layers is not None:
            raise EesdError("--device-memory and --resident-layers exclude each other: same memory, or same split")
        for name, low in (("repeat", 1), ("baseline_prompts", 1), ("warmup_tokens", 0)):
            if getattr(self, name) < low:
                raise EesdError(f"--{name.replace('_', '-')} must be at least {low}, not {getattr(self, name)}")
        unknown = [name for name in self.baselines if name not in BASELINES]
        if unknown:
            raise EesdError(f"unknown baseline {unknown[0]!r}; known: {', '.join(BASELINES)}")
        if self.baselines and self.throttle is not None:
            raise EesdError("--baseline runs on the real disk and --throttle simulates another; measure them apart")
        self._check_auto()
        for spec in self.contenders:
            any_controller(spec)  # refuses what it does not know, before minutes of loading

    def _check_auto(self) -> None:
        """Refuses a choice among exits where nothing could be compared."""
        check_exit(self.exit_layer, self.head)
        if self.exit_layer != AUTO:
            return
        if not self.drafts or self.drafter == "ngram":
            raise EesdError(
                "--exit-layer auto compares exits by drafting; name a controller and a drafter that use a head"
            )
        if self.throttle is not None and self.throttle.bytes_per_second is None:
            raise EesdError("--throttle sweep=... is a rate for one exit; with --exit-layer auto name a rate: 800MB/s")

    @property
    def contenders(self) -> tuple[str, ...]:
        """Plain decoding first, then the controllers asked for, each once."""
        return tuple(dict.fromkeys((PLAIN, *self.controllers)))

    @property
    def drafts(self) -> bool:
        """False when only plain decoding is measured: then no exit head is needed."""
        return len(self.contenders) > 1

    @property
    def same_memory(self) -> bool:
        """True when every contender gets the same bytes and its own plan; False when all share one split."""
        return self.device_memory is not None
