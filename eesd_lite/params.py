"""What one generation is asked to do: lengths, sampling settings, stop strings.

SamplingParams is the second of the two public names. It is validated once, here, so that nothing downstream checks it
again. Sampling is a function of (logits, seed, position), see eesd_lite/sampling.py, hence the seed lives here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eesd_lite.errors import PromptError

GREEDY_TEMPERATURE = 1e-5  # at or below this, dividing by the temperature says nothing that argmax does not say


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one generation; the defaults decode greedily."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit
    repetition_penalty: float = 1.0  # 1: none; above 1 makes tokens already in the text less likely
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for name, low in (("max_new_tokens", 1), ("top_k", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise PromptError(f"{name} must be a whole number of at least {low}, not {value!r}")
        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise PromptError(f"{name} must be a finite number, not {value!r}")
        # The upper bounds keep logits finite; nobody means more.
        if not 0 <= self.temperature <= 100:
            raise PromptError(f"temperature must be from 0 (greedy) to 100, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise PromptError(f"top_p must be above 0 and at most 1 (1 turns it off), not {self.top_p}")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise PromptError(f"repetition_penalty must be from 0.01 to 100 (1: off), not {self.repetition_penalty}")
        if self.seed >= 2**64:
            raise PromptError(f"seed must be below 2**64, not {self.seed}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise PromptError(f"a stop string must be a non-empty text, not {text!r}")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken, whatever the seed."""
        return self.temperature <= GREEDY_TEMPERATURE
