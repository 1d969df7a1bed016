"""Recording a trace: decode plainly, then draft from the true prefix at every position, up to k_max tokens.

Nothing is verified, since the plain ids are the truth. Lower-layer keys of a draft are overwritten by the next
position's, which is why positions go in order. Looks behind Engine's public names, as `bench.internals` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eesd_lite.bench.prompts import load_prompts
from eesd_lite.cache import Rows
from eesd_lite.controller import FixedController
from eesd_lite.engine import Engine, keep_prefix
from eesd_lite.errors import EesdError, PromptError
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress, no_progress
from eesd_lite.replay.trace import Answer, Position, Trace
from eesd_lite.sampling import Sampler
from eesd_lite.speculative import Drafter, draft

_REPEATS = 25  # of a timed step; the smallest tells what the step takes when nobody else wants the machine


class _Noting(FixedController):
    """Drafts as many as it may and notes the confidences."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.confidences: list[float] = []

    def begin(self, limit: int) -> None:
        super().begin(limit)
        self.confidences = []

    def drafted(self, confidence: float) -> None:
        super().drafted(confidence)
        self.confidences.append(confidence)


def record(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.perf_counter,
) -> Trace:
    """A trace of the answers to `prompts`; k_max is the engine's draft_limit. Leaves the engine with an empty cache."""
    if engine.head is None or engine.drafter_factory is None:
        raise EesdError(f"{engine.name}: a trace needs an exit head; see eesd train, or --head instant")
    answers, spec = [], engine.controller_spec
    try:
        for number, prompt in enumerate(prompts):
            progress("recording", number, len(prompts))
            engine.set_controller("off")
            events = engine.generate(list(prompt), params)
            answer = [event.token_id for event in events if event.token_id is not None]
            engine.reset()
            answers.append(Answer(tuple(prompt), tuple(answer), _positions(engine, prompt, answer, params)))
    finally:
        engine.set_controller(spec)
    about = {
        "model": engine.name,
        "exit_layer": engine.plan.exit_layer,
        "layers": engine.config.num_hidden_layers,
        "k_max": engine.draft_limit,
        "params": {name: value for name, value in asdict(params).items() if name != "stop"},
        "seconds": measure_steps(engine, clock),
    }
    return Trace(about, tuple(answers))


@torch.inference_mode()
def _positions(
    engine: Engine, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> tuple[Position, ...]:
    target, text = engine.target, engine.text
    sampler = Sampler(params, engine.config.vocab_size, text.vocab_size if text.vocab_size > 0 else None)
    assert engine.drafter_factory is not None
    drafter = engine.drafter_factory(target, sampler)
    rows = Rows.chain(0, len(prompt), target.device)
    keep_prefix(drafter, target.lower(target.embed(list(prompt)), rows), rows)
    stop_ids = frozenset() if params.ignore_eos else text.eos_token_ids
    found = []
    for index in range(len(answer) - 1):
        # The engine never drafts beyond the longest answer; nor is it known what would be right there.
        limit = min(engine.draft_limit, params.max_new_tokens - index - 2)
        noting, visible = _Noting(engine.draft_limit), [*prompt, *answer[: index + 1]]
        tree = draft(target, drafter, noting, visible=visible, limit=max(limit, 0), stop_ids=stop_ids).tree
        _keep_last(drafter, engine, visible, limit)
        tokens, truth = tree.tokens[1:], answer[index + 1 :]
        accepted = 0
        while accepted < min(len(tokens), len(truth)) and tokens[accepted] == truth[accepted]:
            accepted += 1
        found.append(Position(index, tuple(tokens), tuple(noting.confidences), accepted))
    return tuple(found)


def _keep_last(drafter: Drafter, engine: Engine, visible: Sequence[int], limit: int) -> None:
    """Where nothing was proposed, the head's entry of the current token is still missing."""
    if limit <= 0:
        target, place = engine.target, len(visible) - 1
        row = Rows.chain(place, 1, target.device)
        drafter.keep(target.lower(target.embed([visible[-1]]), row), row)


@torch.inference_mode()
def measure_steps(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Seconds of one pass through the layers below the exit, of the head with lm_head, and of a verify by rows.

    Leaves the engine with an empty cache. `verify[n]` is that of n + 1 rows, n = 0 .. draft_limit.
    """
    target, head = engine.target, engine.head
    assert head is not None
    place = min(128, engine.plan.context - 1)
    state = target.embed([0])
    row = Rows.chain(place, 1, target.device)

    def best(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(_REPEATS):
            started = clock()
            work()
            seconds.append(clock() - started)
        return min(seconds)

    def verify(rows: int) -> Callable[[], object]:
        chain = Rows.chain(place, rows, target.device)
        states = target.embed([0] * rows)
        return lambda: target.logits(target.upper(states.clone(), chain))

    found = {
        "lower": best(lambda: target.lower(state.clone(), row)),
        "head": best(lambda: target.ops.logits(head.forward(state, row), target.lm_head)),
        "verify": [best(verify(rows)) for rows in range(1, engine.draft_limit + 2)],
    }
    engine.reset()
    target.bank.abandon()
    return found


def record_model(
    model: str,
    *,
    params: SamplingParams,
    prompts: Path | None = None,
    limit_prompts: int | None = None,
    exit_layer: int | None = None,
    head: str | None = None,
    draft_limit: int = 16,
    threads: int | None = None,
    progress: Progress = no_progress,
) -> Trace:
    """`record` for a model by name, with everything in memory; what `eesd trace` does."""
    texts = load_prompts(prompts, limit_prompts)
    with Engine.from_pretrained(
        model, exit_layer=exit_layer, head=head, draft_limit=draft_limit, threads=threads, progress=progress
    ) as engine:
        ids = [engine.text.render_chat([{"role": "user", "content": prompt.text}]) for prompt in texts]
        for prompt, tokens in zip(texts, ids, strict=True):
            if len(tokens) + params.max_new_tokens > engine.plan.context:
                raise PromptError(
                    f"prompt {prompt.id} and its answer take {len(tokens) + params.max_new_tokens} tokens, "
                    f"the context holds {engine.plan.context}"
                )
        return record(engine, ids, params, progress=progress)
