"""The exit head's cache filled lazily: no work for it in rounds that do not draft, and the same bits when it is needed.

`caches` of `tests.puppets` computes what waits for a copy only, so that looking at an engine does not fill its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eesd_lite.cache import Rows
from eesd_lite.controller import FixedController
from eesd_lite.controllers_tree import FixedTree
from eesd_lite.engine import Engine
from eesd_lite.sizing import WAITING_ROWS
from eesd_lite.waiting_states import WaitingStates
from tests.eesd_lite.test_interruptions import Countdown, check_aftermath, interrupted_run, params
from tests.eesd_lite.test_trees import branching
from tests.puppets import (
    all_puppets,
    assert_caches_are_those_of,
    assert_rounds_left_fresh_caches,
    at_random,
    caches,
    drafting,
    fresh_caches,
    ids_of,
    plain_ids,
    right_for,
    watched_rounds,
)
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5)
OPTIONS: dict[str, Any] = {"head": "random", "exit_layer": 2, "resident_layers": 2}
PROMPT = list(b"Once upon")  # that of test_interruptions
EngineOf = Callable[..., Engine]


class ByRound(FixedController):
    """Drafts so many tokens in each round, over and over."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(0)
        self._lengths, self._round = list(lengths), -1
        self.confidences: list[float] = []

    def begin(self, limit: int) -> None:
        self._round += 1
        self._left = min(limit, self._lengths[self._round % len(self._lengths)])

    def drafted(self, confidence: float) -> None:
        super().drafted(confidence)
        self.confidences.append(confidence)


class TreesByRound(FixedTree):
    """The same with nodes of trees."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(0)
        self._sizes, self._round = list(sizes), -1

    def begin(self, limit: int) -> None:
        self._round += 1
        self._room = min(limit, self._sizes[self._round % len(self._sizes)])


@contextmanager
def filled_rows(engine: Engine) -> Iterator[list[int]]:
    """A list that grows by the rows of every pass that only writes the head's keys and values."""
    assert engine.head is not None
    layer, rows = engine.head._layer, []
    original = layer.write_kv

    def write_kv(hidden: Any, *rest: Any) -> None:
        rows.append(len(hidden))
        original(hidden, *rest)

    layer.write_kv = write_kv  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del layer.write_kv


def test_rounds_without_a_draft_do_no_work_for_the_head(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    engine.set_controller("fixed:3")
    engine.controller = ByRound([0])
    with filled_rows(engine) as rows:
        ids = ids_of(engine, PROMPT, params())
        assert rows == [] and engine.head is not None
        held = list(engine.cached_ids)
        assert len(engine.head.waiting) == len(held) == len(PROMPT + ids) - 1
        engine.controller = ByRound([2])  # drafting begins again: everything at once
        ids_of(engine, [*PROMPT, *ids, 65], params(max_new_tokens=4))
        assert rows == [len(PROMPT) + len(ids) + 1]
    assert_caches_are_those_of(engine, held, caches(engine, len(held)))


def test_a_full_buffer_is_computed_in_one_batch(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params(max_new_tokens=100))
    engine.set_controller("fixed:3")
    engine.controller = ByRound([0])
    with filled_rows(engine) as rows:
        assert ids_of(engine, PROMPT, params(max_new_tokens=100)) == expected
    assert rows == [WAITING_ROWS]
    held = list(engine.cached_ids)
    assert_caches_are_those_of(engine, held, caches(engine, len(held)))


def test_a_long_prompt_does_not_wait(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    prompt = [(7 * n) % 200 for n in range(WAITING_ROWS + 20)]
    with filled_rows(engine) as rows:
        next(iter(engine.generate(prompt, params())))
    assert rows == [len(prompt)]
    engine.reset()


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=7), seed=st.integers(0, 99), sampled=st.booleans())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_every_round_and_fill_the_cache_is_that_of_a_fresh_prefill(
    engine_of: EngineOf, lengths: list[int], seed: int, sampled: bool
) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    chosen = params(max_new_tokens=24, **({"temperature": 1.0, "seed": seed} if sampled else {}))
    expected = plain_ids(engine, PROMPT, chosen)
    reference = fresh_caches(engine, (PROMPT + expected)[:-1])
    engine.set_controller("fixed:4")
    engine.controller = ByRound(lengths)
    with drafting(engine, at_random(seed, PROMPT + expected, engine.config.vocab_size)), watched_rounds(engine) as seen:
        assert ids_of(engine, PROMPT, chosen) == expected
    assert_rounds_left_fresh_caches(engine, seen, reference)


def test_what_is_drafted_does_not_depend_on_when_the_cache_was_filled(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    assert engine.head is not None
    drafts: dict[bool, list[float]] = {}
    for at_once in (False, True):
        engine.set_controller("fixed:3")
        engine.controller = controller = ByRound([0, 0, 3, 0, 1])
        for _ in engine.generate(PROMPT, params(max_new_tokens=24)):
            if at_once:
                engine.head.fill()
        drafts[at_once] = controller.confidences
    assert drafts[False] == drafts[True] and len(set(drafts[True])) > 10


@pytest.mark.parametrize("seed", range(4))
def test_trees_between_plain_rounds_find_the_cache_of_a_fresh_prefill(engine_of: EngineOf, seed: int) -> None:
    engine = engine_of(SPEC, **{**OPTIONS, "draft_limit": 64})
    expected = plain_ids(engine, PROMPT, params(max_new_tokens=30))
    reference = fresh_caches(engine, (PROMPT + expected)[:-1])
    engine.set_controller("tree:7")
    engine.controller = TreesByRound([0, 9, 0, 0, 5, 20, 0])
    with branching(engine, seed, PROMPT + expected), watched_rounds(engine) as seen:
        assert ids_of(engine, PROMPT, params(max_new_tokens=30)) == expected
    assert_rounds_left_fresh_caches(engine, seen, reference)


@pytest.mark.parametrize("controller", ["fixed:3", "tree:5"])
def test_look_ups_beside_the_head_leave_the_cache_of_a_fresh_prefill(engine_of: EngineOf, controller: str) -> None:
    engine = engine_of(SPEC, **OPTIONS, drafter="both")
    prompt = list(b"abcabdabcabdabcab")
    expected = plain_ids(engine, prompt, params(max_new_tokens=30))
    reference = fresh_caches(engine, (prompt + expected)[:-1])
    engine.set_controller(controller)
    with watched_rounds(engine) as seen:
        assert ids_of(engine, prompt, params(max_new_tokens=30)) == expected
    assert_rounds_left_fresh_caches(engine, seen, reference)


@pytest.mark.parametrize("operation", ["attention", "rms_norm"])
def test_ctrl_c_while_the_head_catches_up_leaves_what_was_emitted(engine_of: EngineOf, operation: str) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params())
    assert engine.head is not None
    for place in range(1, 6):  # the head's own operations: filling, drafting, filling again
        for after in (False, True):
            engine.set_controller("fixed:3")
            engine.controller = ByRound([0, 0, 3, 0])
            with drafting(engine, right_for(1, PROMPT + expected, engine.config.vocab_size)):
                ops = _Stopping(engine.target.ops, operation, place, after)
                engine.head._layer.ops = ops  # type: ignore[assignment]
                try:
                    emitted = interrupted_run(engine, params())
                finally:
                    engine.head._layer.ops = engine.target.ops
                check_aftermath(engine, emitted, expected)


class _Stopping:
    """Operations that raise KeyboardInterrupt at one call of one of them."""

    def __init__(self, ops: Any, operation: str, place: int, after: bool) -> None:
        self._ops = ops
        setattr(self, operation, Countdown(getattr(ops, operation), place, after))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_closing_the_iterator_while_states_wait_leaves_what_was_emitted(engine_of: EngineOf, count: int) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params())
    for lengths in ([0], [0, 0, 2], [3, 0]):
        engine.set_controller("fixed:3")
        engine.controller = ByRound(lengths)
        with drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
            generation = engine.generate(PROMPT, params())
            emitted = [next(generation).token_id or 0 for _ in range(count)]
            generation.close()
            check_aftermath(engine, emitted, expected)


def test_a_stop_string_across_waiting_tokens_takes_them_away(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params())
    whole = engine.text.decode(expected)
    engine.set_controller("fixed:3")
    for lengths in ([0], [0, 2]):
        engine.controller = ByRound(lengths)
        stop = whole[4:8]
        events = list(engine.generate(PROMPT, params(stop=(stop,))))
        assert events[-1].finish_reason == "stop"
        emitted = [event.token_id for event in events if event.token_id is not None]
        check_aftermath(engine, emitted, expected)
        engine.set_controller("fixed:3")


@pytest.mark.parametrize("shared", [1, 5, 12])
def test_another_ending_of_the_prompt_drops_what_waited_behind_it(engine_of: EngineOf, shared: int) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    engine.set_controller("fixed:3")
    engine.controller = ByRound([0])
    first = PROMPT + ids_of(engine, PROMPT, params())
    other = [*first[:shared], *b"!other words"]
    expected = plain_ids(engine, other, params())
    engine.set_controller("fixed:3")
    for lengths in ([0], [2], [0, 0, 1]):
        engine.reset()
        engine.controller = ByRound([0])
        ids_of(engine, PROMPT, params())
        engine.controller = ByRound(lengths)
        before = engine.stats.prefilled_tokens
        assert ids_of(engine, other, params()) == expected
        assert engine.stats.prefilled_tokens - before == len(other) - shared
        held = list(engine.cached_ids)
        assert_caches_are_those_of(engine, held, caches(engine, len(held)))


def test_a_saved_prefix_holds_what_waited(
    tiny_of: Callable[[TinySpec], Tiny], engine_of: EngineOf, tmp_path: Path
) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    engine.set_controller("fixed:3")
    engine.controller = ByRound([0])
    ids_of(engine, PROMPT, params())
    held, path = list(engine.cached_ids), tmp_path / "talk.cache"
    engine.save_prefix(path)
    with tiny_of(SPEC).engine(**OPTIONS) as other:
        assert other.load_prefix(path) == len(held)
        assert_caches_are_those_of(other, held, caches(other, len(held)))


def test_the_end_of_the_context_with_waiting_states(tiny_of: Callable[[TinySpec], Tiny], engine_of: EngineOf) -> None:
    expected = plain_ids(engine_of(SPEC, **OPTIONS), PROMPT, params(max_new_tokens=40))
    for name, proposal in all_puppets(PROMPT + expected, engine_of(SPEC, **OPTIONS).config.vocab_size).items():
        with tiny_of(SPEC).engine(**OPTIONS, context=len(PROMPT) + 11, controller="fixed:4") as engine:
            engine.controller = ByRound([0, 0, 4])
            with drafting(engine, proposal):
                events = list(engine.generate(PROMPT, params(max_new_tokens=40)))
                assert events[-1].finish_reason == "context", name
                held = list(engine.cached_ids)
                assert_caches_are_those_of(engine, held, caches(engine, len(held)))


def test_waiting_states_are_replaced_forgotten_and_given_back_in_order() -> None:
    waiting = WaitingStates(4)
    states = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    waiting.add(states[:3], 10)
    waiting.add(states[3:4], 13)
    waiting.add(states[4:6], 12)  # tokens 12 and 13 became others
    found, rows = waiting.taken()
    assert torch.equal(found, states[[0, 1, 4, 5]]) and len(waiting) == 4 and waiting.room == WAITING_ROWS - 4
    expected = Rows.chain(10, 4)
    assert all(torch.equal(getattr(rows, n), getattr(expected, n)) for n in ("positions", "slots", "prefix", "paths"))
    waiting.forget_from(11)
    assert torch.equal(waiting.taken()[0], states[:1])
    waiting.forget_from(0)
    assert len(waiting) == 0
