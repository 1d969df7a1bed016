"""Puppet drafters: whatever is drafted, the ids must be those of plain decoding. And ways to watch an engine at work.

A puppet that knows the plain ids is right or wrong on purpose. `over_head` lets the real exit head do its work (its
cache included) and replaces what it proposed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from eesd_lite import SamplingParams
from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from eesd_lite.sampling import Choice, Sampler
from eesd_lite.several_heads import SeveralHeadsDrafter
from eesd_lite.speculative import Drafter, HeadDrafter
from eesd_lite.target import Target
from eesd_lite.transformer import run_layers

Proposal = Callable[[int, int], int | None]  # (position, how many were proposed in this round) -> token or None


class Puppet:
    """Proposes what `proposal` says. `proposed` counts; `rows` is what it was asked for."""

    def __init__(self, proposal: Proposal, confidence: float = 0.9, head: Drafter | None = None) -> None:
        self._proposal, self._confidence, self._head = proposal, confidence, head
        self._before: list[int] = []
        self._in_round = 0
        self.proposed = 0

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        assert position == len(history), (position, len(history))
        assert rows.positions.tolist() == [position - 1], (rows.positions.tolist(), position)
        self._in_round = self._in_round + 1 if list(history[:-1]) == self._before and self._continues(history) else 0
        if self._head is not None:
            self._head.propose(state, rows, position=position, history=history)
        token = self._proposal(position, self._in_round)
        self._before, self._last = list(history), token
        self.proposed += token is not None
        return None if token is None else Choice(token, self._confidence)

    def _continues(self, history: Sequence[int]) -> bool:
        return history[-1] == self._last

    def keep(self, states: Tensor, first: int) -> None:
        if self._head is not None:
            self._head.keep(states, first)

    def move(self, sources: list[int], targets: list[int]) -> None:
        if self._head is not None:
            self._head.move(sources, targets)


def right(ids: Sequence[int], vocab: int = 0) -> Proposal:
    """Always the plain token (0 beyond what is known)."""
    return lambda position, _: ids[position] if position < len(ids) else 0


def wrong(ids: Sequence[int], vocab: int) -> Proposal:
    """Never the plain token."""
    return lambda position, _: (ids[position] + 1) % vocab if position < len(ids) else 0


def right_for(count: int, ids: Sequence[int], vocab: int) -> Proposal:
    """Right for the first `count` tokens of every round, wrong after them."""
    good, bad = right(ids), wrong(ids, vocab)
    return lambda position, number: good(position, number) if number < count else bad(position, number)


def nothing(ids: Sequence[int], vocab: int) -> Proposal:
    """Proposes nothing."""
    return lambda position, _: None


def at_random(seed: int, ids: Sequence[int], vocab: int) -> Proposal:
    """Right, wrong, or silent by chance."""
    rng = random.Random(seed)

    def proposal(position: int, number: int) -> int | None:
        draw = rng.random()
        if draw < 0.05:
            return None
        return right(ids)(position, number) if draw < 0.6 else rng.randrange(vocab)

    return proposal


def all_puppets(ids: Sequence[int], vocab: int) -> dict[str, Proposal]:
    """One of every kind, by name."""
    partly = {f"right for {count}": right_for(count, ids, vocab) for count in (1, 2, 3)}
    return {
        "always right": right(ids),
        "always wrong": wrong(ids, vocab),
        **partly,
        "silent": nothing(ids, vocab),
        "random": at_random(7, ids, vocab),
    }


@contextmanager
def drafting(engine: Engine, proposal: Proposal, *, confidence: float = 0.9) -> Iterator[list[Puppet]]:
    """Let a puppet draft in `engine`; over the engine's own head if it has one. Yields the puppets that were made."""
    before = engine.drafter_factory
    made: list[Puppet] = []

    def make(target: Target, sampler: Sampler) -> Drafter:
        head: Drafter | None = HeadDrafter(engine.head, target, sampler) if engine.head is not None else None
        if len(engine.heads) > 1:
            head = SeveralHeadsDrafter(engine.heads, target, sampler)
        made.append(Puppet(proposal, confidence, head))
        return made[-1]

    engine.drafter_factory = make
    try:
        yield made
    finally:
        engine.drafter_factory = before
        engine.reset()  # the prefix may lack entries of a head that did not draft


def ids_of(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The ids of one generation; the accounts must close, and drafting must have touched nothing offloaded."""
    events = list(engine.generate(list(prompt), params))
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason is not None
    assert engine.stats.balanced(), engine.stats
    assert engine.stats.draft_offloaded_bytes == 0
    return [event.token_id for event in events if event.token_id is not None]


def plain_ids(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What plain decoding with the same plan gives, from an empty cache."""
    spec = engine.controller_spec
    engine.set_controller("off")
    try:
        return ids_of(engine, prompt, params)
    finally:
        engine.set_controller(spec)


@torch.inference_mode()
def fresh_caches(engine: Engine, ids: Sequence[int]) -> list[Tensor]:
    """Keys and values [heads, tokens, size] of every layer and exit head after a fresh prefill of `ids`.

    Overwrites the engine's caches and forgets its prefix.
    """
    engine.reset()
    engine.target.bank.abandon()
    if not ids:
        return caches(engine, 0)
    target, rows = engine.target, Rows.chain(0, len(ids))
    hidden, deepest, done = target.embed(list(ids)), target.exit_layer, 0
    for head in engine.heads:  # ascending: layers between two exits, then that head's entries
        run_layers(
            target.bank, range(done, head.exit_layer), hidden, rows, kv=target.kv, reaches=target.reaches, chunk=64
        )  # fmt: skip
        head.keep(hidden.clone(), 0)
        done = head.exit_layer
    assert done == deepest, (done, deepest)
    target.upper(hidden, rows)
    return caches(engine, len(ids))


def caches(engine: Engine, tokens: int) -> list[Tensor]:
    """Copies of the first `tokens` entries of every cache: keys and values of the layers, then of heads.

    What the head has not computed yet is computed for the copy, and goes on waiting.
    """
    before = [(head.kv.read(0, head.kv.capacity), list(head.waiting._positions)) for head in engine.heads]
    for head in engine.heads:
        head.fill()
    copies = _entries(engine, tokens)
    for head, (held, positions) in zip(engine.heads, before, strict=True):
        head.kv.write(0, held)
        head.waiting._positions = positions
    return copies


def _entries(engine: Engine, tokens: int) -> list[Tensor]:
    owners = [engine.target.kv, *(head.kv for head in engine.heads)]
    pairs = [owner.layer(index) for owner in owners for index in range(owner.num_layers)]
    return [tensor[:, :tokens].clone() for pair in pairs for tensor in pair]


def assert_rounds_left_fresh_caches(
    engine: Engine, seen: Sequence[tuple[list[int], list[Tensor]]], reference: list[Tensor]
) -> None:
    """`seen` (from `watched_rounds`): every cache after every round has the beginning of `reference`, bit for bit."""
    assert seen and len(reference) == 2 * (engine.config.num_hidden_layers + len(engine.heads))
    for held, found in seen:
        for number, (a, b) in enumerate(zip(found, reference, strict=True)):
            assert torch.equal(a, b[:, : len(held)]), f"tensor {number} after {len(held)} tokens"


def assert_caches_are_those_of(engine: Engine, ids: Sequence[int], found: list[Tensor]) -> None:
    """`found` (from `caches`) equals a fresh prefill of `ids`, bit for bit."""
    fresh = fresh_caches(engine, ids)
    assert len(found) == len(fresh)
    different = [n for n, (a, b) in enumerate(zip(found, fresh, strict=True)) if not torch.equal(a, b)]
    assert not different, (
        f"{len(different)} of {len(fresh)} tensors differ after {len(ids)} tokens, first {different[0]}"
    )


@contextmanager
def watched_rounds(engine: Engine) -> Iterator[list[tuple[list[int], list[Tensor]]]]:
    """A list that grows with every round: the tokens that the cache claims to hold, and a copy of what it holds."""
    original, seen = engine._round, []

    def watched(*arguments: object, **options: object) -> object:
        result = original(*arguments, **options)  # type: ignore[arg-type]
        held = list(engine.cached_ids)
        seen.append((held, caches(engine, len(held))))
        return result

    engine._round = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del engine._round
