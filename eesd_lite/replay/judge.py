"""What a head proposes at every position of plainly decoded answers, and which proposal the target chose.

One head pass per position: a draft that was right so far stands on the true text, so drafts need not be grown to know
what its confidences are worth. Used by scripts/head_prior.py and `eesd train`; looks behind Engine's public names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError
from eesd_lite.head_prior import HeadPrior, Judged, belief_of
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress, no_progress
from eesd_lite.replay.record import plain_answer
from eesd_lite.sampling import Sampler
from eesd_lite.speculative import HeadDrafter, keep_prefix
from eesd_lite.tree_growth import WIDTH

TEMPERATURES = (0.0, 0.8)


def measure_prior(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    progress: Progress = no_progress,
) -> HeadPrior:
    """The engine's head on its answers to `prompts`, decoded anew at every temperature. Leaves an empty cache."""
    beliefs = {}
    for temperature in temperatures:
        texts = []
        for number, prompt in enumerate(prompts):
            progress(f"judging the head at temperature {temperature:g}, prompt", number, len(prompts))
            texts.append(judge(engine, prompt, replace(params, temperature=temperature)))
        beliefs[temperature] = belief_of(texts)
    return HeadPrior(beliefs)


def judge(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[Judged]:
    """All positions of the answer to `prompt` but its last; the engine's head must be its only drafter."""
    answer = plain_answer(engine, prompt, params)
    with torch.inference_mode():
        found = _positions(engine, prompt, answer, params)
    engine.reset()
    engine.target.bank.abandon()
    return found


def _positions(engine: Engine, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams) -> list[Judged]:
    target, text = engine.target, [*prompt, *answer]
    if engine.head is None:
        raise EesdError(f"{engine.name}: there is no exit head to judge")
    if len(answer) < 2:
        return []
    sampler = Sampler(params, engine.config.vocab_size, engine.text.vocab_size if engine.text.vocab_size > 0 else None)
    drafter = HeadDrafter(engine.head, target, sampler)
    states = target.lower(target.embed(text[:-1]), Rows.chain(0, len(text) - 1, target.device))
    begin = len(prompt)
    keep_prefix(drafter, states[:begin], Rows.chain(0, begin, target.device))
    found = []
    for place in range(begin, len(text) - 1):
        history, row = text[: place + 1], Rows.chain(place, 1, target.device)
        position = [len(history)]
        state = states[place : place + 1]
        proposals = drafter.branches(state, row, position=position, history=[history], count=WIDTH)[0]
        chain = drafter.choices(state, row, position=position, history=[history])[0]
        kept = next((n for n, choice in enumerate(proposals) if choice.token_id == text[place + 1]), None)
        stated = chain.confidence if chain is not None and chain.confidence is not None else 0.0
        found.append(Judged(tuple(choice.confidence or 0.0 for choice in proposals), kept, stated))
    return found
