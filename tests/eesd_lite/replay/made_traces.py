"""Traces made by hand or by lot, for tests of replaying."""

from __future__ import annotations

import random
from typing import Any

from eesd_lite.replay.trace import Answer, Position, Trace

STEPS: dict[str, Any] = {"lower": 0.25, "head": 0.75, "verify": [2.0, 2.5, 3.0, 3.5, 4.0]}  # k_max 4, a draft step is 1


def made(accepted: list[list[int]], *, k_max: int = 4, longest: int = 100, confidence: float = 0.5) -> Trace:
    """One answer per list; every position drafts k_max tokens, so many of them rightly."""
    answers = []
    for lengths in accepted:
        text = tuple(range(len(lengths) + 1))
        positions = []
        for index, right in enumerate(lengths):
            truth = text[index + 1 : index + 1 + right]
            tokens = (*truth, *[999] * (k_max - right))
            positions.append(Position(index, tokens, (confidence,) * k_max, right))
        answers.append(Answer((7, 8), text, tuple(positions)))
    about = {
        "model": "made",
        "exit_layer": 1,
        "layers": 2,
        "k_max": k_max,
        "params": {"max_new_tokens": longest, "temperature": 0.0},
        "seconds": {**STEPS, "verify": [2.0 + 0.5 * k for k in range(k_max + 1)]},
    }
    return Trace(about, tuple(answers))


def drawn(seed: int, *, answers: int = 2, tokens: int = 12, k_max: int = 4) -> Trace:
    """Acceptance by lot, never beyond the end."""
    rng = random.Random(seed)
    return made(
        [[min(rng.choice((0, 0, 1, 2, 4)), tokens - 1 - i, k_max) for i in range(tokens - 1)] for _ in range(answers)],
        k_max=k_max,
    )
