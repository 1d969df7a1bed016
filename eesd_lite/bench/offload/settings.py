"""What one offload benchmark is asked to do, validated before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eesd_lite.bench.settings import PLAIN
from eesd_lite.controller import any_controller, draft_limit_for
from eesd_lite.draft_weights import DraftWeights
from eesd_lite.drafter_names import NGRAM, check_drafter
from eesd_lite.errors import EesdError
from eesd_lite.units import parse_size

BASELINES = ("accelerate", "airllm", "llama.cpp")
DISK = "disk"
HEAD_MARGIN = 8 << 20  # more of it where a head is loaded, which is read before it is stored in fewer bits
MARGIN = 12 << 20  # of the allowance, for what an engine's plan does not count: Python objects, allocator slack


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """All options of one matrix; sizes in bytes, rates in bytes per second (None: the disk's own)."""

    model: str
    memories: tuple[int, ...]
    exit_layers: tuple[int, ...] = ()  # empty: plain decoding only
    controllers: tuple[str, ...] = ("calibrated",)
    head: str | None = None  # a file, "instant" or "random"; None: the one that belongs to the model
    drafters: tuple[str, ...] = ("head",)
    draft_vocab: int | str | None = None  # heads draft so many of the most frequent tokens; None: all
    head_bits: int | None = None  # of the weights that only drafts read; None: the usual
    rates: tuple[float | None, ...] = (None,)
    baselines: tuple[str, ...] = ()
    whole_process: bool = False  # the limit counts the runtime too, instead of coming on top of it
    draft_limit: int | None = None  # None: what the controllers need
    context: int = 512
    threads: int | None = None
    prompts: Path | None = None
    limit_prompts: int = 4
    max_new_tokens: int = 32
    baseline_tokens: int = 8
    repeat: int = 1
    ignore_eos: bool = True
    gguf: Path | None = None

    def __post_init__(self) -> None:
        for spec in self.controllers:
            any_controller(spec)
        unknown = [name for name in self.baselines if name not in BASELINES]
        if unknown:
            raise EesdError(f"unknown baseline {unknown[0]!r}; known: {', '.join(BASELINES)}")
        if not self.memories or min(self.memories) <= MARGIN:
            raise EesdError(f"--memory: give one size or more, each above {MARGIN >> 20} MiB")
        if not self.drafters:
            raise EesdError("--drafter: name one or more of head, ngram, both")
        for name in self.drafters:
            check_drafter(name)
        DraftWeights(8 if self.head_bits is None else self.head_bits, self.draft_vocab).check()
        if len(self.exit_layers) > 0 and self.drafting == ():
            raise EesdError("--exit-layers without a controller that drafts; name one with --controllers")
        if "both" in self.drafters and not self.exit_layers:
            raise EesdError("--drafter both needs layers to draft at; name them with --exit-layers")

    @property
    def longest_draft(self) -> int:
        """Tokens that a round may draft, trees included."""
        if self.draft_limit is not None:
            return self.draft_limit
        return max(draft_limit_for(spec) for spec in ("off", *self.controllers))

    @property
    def sources(self) -> tuple[tuple[str, int | None], ...]:
        """Who drafts, and at which layer: each once, None for n-grams, which need none."""
        found: list[tuple[str, int | None]] = []
        layers = dict.fromkeys(self.exit_layers)
        for drafter in dict.fromkeys(self.drafters):
            found += [(drafter, None)] if drafter == NGRAM else [(drafter, layer) for layer in layers]
        return tuple(found) if self.drafting else ()

    @property
    def drafting(self) -> tuple[str, ...]:
        """Controllers other than plain decoding, which always takes part."""
        return tuple(name for name in dict.fromkeys(self.controllers) if name != PLAIN)


def parse_rate(text: str) -> float | None:
    """ "disk", or a rate such as 400MB/s."""
    if text.strip().lower() == DISK:
        return None
    rate = parse_size(text.strip().removesuffix("/s"))
    if rate <= 0:
        raise EesdError(f"--link-rates: {text!r} is not a rate above 0 bytes a second")
    return float(rate)
