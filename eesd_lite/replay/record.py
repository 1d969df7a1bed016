"""Recording a trace: decode plainly, then draft from the true prefix at every position, up to k_max tokens.

Nothing is verified, since the plain ids are the truth. The drafts of all positions grow side by side in slots behind
the answer, which takes a fraction of the time. Looks behind Engine's public names, as `bench.internals` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eesd_lite.bench.prompts import load_prompts
from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError, PromptError
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress, no_progress
from eesd_lite.replay.trace import Answer, Position, Trace
from eesd_lite.sampling import Choice, Sampler
from eesd_lite.speculative import Drafter, HeadDrafter, keep_prefix
from eesd_lite.target import Target

_REPEATS = 25  # of a timed step; the smallest tells what the step takes when nobody else wants the machine


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
    answers = []
    for number, prompt in enumerate(prompts):
        progress("recording", number, len(prompts))
        answer = plain_answer(engine, prompt, params)
        answers.append(Answer(tuple(prompt), tuple(answer), chain_positions(engine, prompt, answer, params)))
    return Trace(about_trace(engine, params, engine.draft_limit, measure_steps(engine, clock)), tuple(answers))


def plain_answer(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The ids of plain decoding. Leaves the engine with an empty cache and its own controller."""
    spec = engine.controller_spec
    try:
        engine.set_controller("off")
        events = engine.generate(list(prompt), params)
        return [event.token_id for event in events if event.token_id is not None]
    finally:
        engine.reset()
        engine.set_controller(spec)


def about_trace(engine: Engine, params: SamplingParams, k_max: int, seconds: dict[str, Any]) -> dict[str, Any]:
    """What a trace says about its origin."""
    return {
        "model": engine.name,
        "exit_layer": engine.plan.exit_layer,
        "layers": engine.config.num_hidden_layers,
        "k_max": k_max,
        "params": {name: value for name, value in asdict(params).items() if name != "stop"},
        "seconds": seconds,
        **(
            {"acceptance": engine.head.prior.as_dict()} if engine.head is not None and engine.head.prior.beliefs else {}
        ),
    }


@dataclass
class _Lane:
    """The draft that hangs below position `place`; its tokens take the slots from `slot` on."""

    place: int
    slot: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    def row(self) -> tuple[int, int, int, list[int]]:
        """Position, slot, prefix and path of the lane's last token."""
        path = list(range(self.slot, self.slot + len(self.tokens)))
        position = self.place + len(self.tokens)
        return position, (path[-1] if path else position), self.place + 1, path


@torch.inference_mode()
def chain_positions(
    engine: Engine,
    prompt: Sequence[int],
    answer: Sequence[int],
    params: SamplingParams,
    k_max: int | None = None,  # None: the engine's draft_limit
) -> tuple[Position, ...]:
    """All drafts side by side, each seeing the true prefix and itself: row-invariance makes them those of a chain."""
    k_max = engine.draft_limit if k_max is None else k_max
    target, text = engine.target, [*prompt, *answer]
    sampler = Sampler(params, engine.config.vocab_size, engine.text.vocab_size if engine.text.vocab_size > 0 else None)
    assert engine.drafter_factory is not None
    drafter = engine.drafter_factory(target, sampler)
    known = Rows.chain(0, len(text) - 1, target.device)
    states = target.lower(target.embed(text[:-1]), known)
    keep_prefix(drafter, states, known)
    stop_ids = frozenset() if params.ignore_eos else engine.text.eos_token_ids
    together = (target.kv.capacity - len(text)) // k_max
    if together < 1:
        raise PromptError(f"a prompt and its answer take {len(text)} of {target.kv.capacity} tokens: no room to draft")
    lanes = []
    for index in range(len(answer) - 1):
        # The engine never drafts beyond the longest answer; nor is it known what would be right there.
        limit = max(0, min(k_max, params.max_new_tokens - index - 2))
        slot = len(text) + (index % together) * k_max
        lanes.append(_Lane(len(prompt) + index, slot, limit))
    for first in range(0, len(lanes), together):
        _grow(lanes[first : first + together], states, drafter, target, text, stop_ids)
    return tuple(_position(index, lane, answer[index + 1 :]) for index, lane in enumerate(lanes))


def _grow(
    lanes: Sequence[_Lane], states: Tensor, drafter: Drafter, target: Target, text: Sequence[int],
    stop_ids: frozenset[int],
) -> None:  # fmt: skip
    """Draft in all lanes, one token of each per step."""
    active = [lane for lane in lanes if lane.limit > 0]
    state = torch.stack([states[lane.place] for lane in active]) if active else states[:0]
    while active:
        choices = _propose(drafter, state, _rows(active), active, text)
        for lane, choice in zip(active, choices, strict=True):
            if choice is not None:
                lane.tokens.append(choice.token_id)
                lane.confidences.append(choice.confidence if choice.confidence is not None else 0.0)
        done = zip(active, choices, strict=True)
        active = [
            lane for lane, choice in done
            if choice is not None and len(lane.tokens) < lane.limit and choice.token_id not in stop_ids
        ]  # fmt: skip
        if active:
            state = target.lower(target.embed([lane.tokens[-1] for lane in active]), _rows(active))


def _rows(lanes: Sequence[_Lane]) -> Rows:
    """One row per lane: the node that was drafted last."""
    positions, slots, prefix, paths = zip(*(lane.row() for lane in lanes), strict=True)
    table = torch.tensor(paths, dtype=torch.int64).reshape(len(lanes), -1)
    return Rows(torch.tensor(positions), torch.tensor(slots), torch.tensor(prefix), table)


def _propose(
    drafter: Drafter, state: Tensor, rows: Rows, lanes: Sequence[_Lane], text: Sequence[int]
) -> list[Choice | None]:
    """What `drafter` proposes after each row; the engine's own head passes all rows together."""
    histories = [[*text[: lane.place + 1], *lane.tokens] for lane in lanes]
    if isinstance(drafter, HeadDrafter):
        return drafter.choices(state, rows, position=[len(history) for history in histories], history=histories)
    return [
        drafter.propose(state[n : n + 1], rows.slice(n, n + 1), position=len(history), history=history)
        for n, history in enumerate(histories)
    ]


def _position(index: int, lane: _Lane, truth: Sequence[int]) -> Position:
    accepted = 0
    while accepted < min(len(lane.tokens), len(truth)) and lane.tokens[accepted] == truth[accepted]:
        accepted += 1
    return Position(index, tuple(lane.tokens), tuple(lane.confidences), accepted)


def fastest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the fastest of some runs."""
    seconds = []
    for _ in range(_REPEATS):
        started = clock()
        work()
        seconds.append(clock() - started)
    return min(seconds)


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

    best = partial(fastest, clock=clock)

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


@contextmanager
def opened(
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
) -> Iterator[tuple[Engine, list[list[int]]]]:
    """A model by name with everything in memory, and the ids of the prompts, all of which fit its context."""
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
        yield engine, ids


def record_model(model: str, *, params: SamplingParams, progress: Progress = no_progress, **options: Any) -> Trace:
    """`record` for a model by name; what `eesd trace` does. Options as of `opened`."""
    with opened(model, params=params, progress=progress, **options) as (engine, ids):
        return record(engine, ids, params, progress=progress)
