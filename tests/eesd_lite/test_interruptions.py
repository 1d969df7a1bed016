"""However a generation ends, cache and history are what was emitted, and the engine goes on from there.

Ctrl-C at every place, closing the iterator, stop strings, EOS anywhere in a block, a failing disk, the end of the
context: after each of them the caches equal a fresh prefill, and the next answer equals that of a fresh engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eesd_lite import SamplingParams
from eesd_lite.engine import Engine
from eesd_lite.errors import StreamError
from tests.puppets import (
    assert_caches_are_those_of,
    at_random,
    caches,
    drafting,
    ids_of,
    plain_ids,
    right,
    right_for,
)
from tests.readers import WatchedReader, fail_at, interrupt_at
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5)
EXIT = 2
OFFLOADED: dict[str, Any] = {"head": "random", "exit_layer": EXIT, "resident_layers": EXIT}
PROMPT = list(b"Once upon")
EngineOf = Callable[..., Engine]
TinyOf = Callable[[TinySpec], Tiny]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 14, "ignore_eos": True, **settings})


def check_aftermath(engine: Engine, emitted: list[int], expected: list[int]) -> None:
    """What was emitted is a prefix of the plain ids, the caches are those of it, and the next turn is a fresh one's."""
    assert emitted == expected[: len(emitted)]
    assert engine.stats.balanced(), engine.stats
    visible, held = PROMPT + emitted, list(engine.cached_ids)
    assert held == visible[: len(held)]
    found = caches(engine, len(held))
    follow_up = [*visible, *b" so?"]
    before = engine.stats.prefilled_tokens
    answer = ids_of(engine, follow_up, params(max_new_tokens=6))
    assert engine.stats.prefilled_tokens - before == len(follow_up) - len(held), "the kept prefix was not used"
    assert_caches_are_those_of(engine, held, found)
    assert answer == plain_ids(engine, follow_up, params(max_new_tokens=6))


class Countdown:
    """Raises KeyboardInterrupt at call number `left` of the wrapped function, before or after its work."""

    def __init__(self, inner: Callable[..., Any], left: int, after: bool) -> None:
        self.inner, self.left, self.after = inner, left, after

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise KeyboardInterrupt
        result = self.inner(*arguments, **options)
        if self.left == 0:
            raise KeyboardInterrupt
        return result


def interrupted_run(engine: Engine, settings: SamplingParams) -> list[int]:
    """Generate until KeyboardInterrupt comes out; the ids that were emitted before."""
    emitted: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        for event in engine.generate(PROMPT, settings):
            if event.token_id is not None:
                emitted.append(event.token_id)
        pytest.fail("the interruption never came")
    return emitted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_closing_the_iterator_after_any_token_leaves_what_was_emitted(engine_of: EngineOf, dtype: str) -> None:
    engine = engine_of(SPEC, dtype=dtype, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:4")
    for count in range(1, 12):
        with drafting(engine, right_for(3, PROMPT + expected, engine.config.vocab_size)):
            generation = engine.generate(PROMPT, params())
            emitted = [next(generation).token_id or 0 for _ in range(count)]
            generation.close()
            check_aftermath(engine, emitted, expected)


def test_an_iterator_that_was_never_begun_changes_nothing(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    ids_of(engine, PROMPT, params())
    held, stats = engine.cached_ids, engine.stats.snapshot()
    engine.generate(list(b"Other"), params()).close()
    assert engine.cached_ids == held and engine.stats == stats


# `silu_mul` runs in the middle of every layer and of the head, after keys and values were written.
@pytest.mark.parametrize("operation", ["silu_mul", "attention", "logits"])
def test_ctrl_c_inside_any_layer_leaves_what_was_emitted(engine_of: EngineOf, operation: str) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    ops = engine.target.ops
    engine.set_controller("fixed:3")
    places = range(1, 50, 4) if operation != "logits" else range(1, 12)
    for place in places:
        with drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
            setattr(ops, operation, Countdown(getattr(ops, operation), place, after=place % 2 == 0))
            try:
                emitted = interrupted_run(engine, params())
            finally:
                delattr(ops, operation)
            check_aftermath(engine, emitted, expected)


@pytest.mark.parametrize("phase", ["layer", "done"])
def test_ctrl_c_between_any_two_layers_leaves_what_was_emitted(engine_of: EngineOf, phase: str) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    bank = engine.target.bank
    engine.set_controller("fixed:3")
    for place in range(1, 26, 2):
        with drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
            setattr(bank, phase, Countdown(getattr(bank, phase), place, after=place % 4 == 1))
            try:
                emitted = interrupted_run(engine, params())
            finally:
                delattr(bank, phase)
            check_aftermath(engine, emitted, expected)


@pytest.mark.parametrize("read", [1, 3, 4, 7, 11])
def test_ctrl_c_while_waiting_for_the_disk_leaves_what_was_emitted(
    tiny_of: TinyOf, engine_of: EngineOf, read: int
) -> None:
    expected = plain_ids(engine_of(SPEC, **OFFLOADED), PROMPT, params())
    reader = WatchedReader(before=interrupt_at(read))
    with tiny_of(SPEC).engine(**OFFLOADED, controller="fixed:2", reader=reader) as engine:
        check_aftermath(engine, interrupted_run(engine, params()), expected)


@pytest.mark.parametrize("read", [1, 2, 3, 4, 6, 7])
def test_a_failing_read_surfaces_at_once_and_the_engine_goes_on(
    tiny_of: TinyOf, engine_of: EngineOf, read: int
) -> None:
    expected = plain_ids(engine_of(SPEC, **OFFLOADED), PROMPT, params())
    reader = WatchedReader(before=fail_at(read))
    with tiny_of(SPEC).engine(**OFFLOADED, controller="fixed:2", reader=reader) as engine:
        emitted: list[int] = []
        with drafting(engine, right(PROMPT + expected)):
            with pytest.raises(StreamError, match=f"read {read} failed on purpose"):
                for event in engine.generate(PROMPT, params()):
                    emitted += [event.token_id] if event.token_id is not None else []
                pytest.fail("the failure was swallowed")
            passes = sum(engine.target.bank.forwards[EXIT:])
            assert passes <= read, f"{passes} offloaded layers were asked for, read {read} failed"
        check_aftermath(engine, emitted, expected)


def test_a_disk_that_keeps_failing_fails_every_generation_and_never_hangs(tiny_of: TinyOf) -> None:
    reader = WatchedReader(before=fail_at(*range(1, 100)))
    with tiny_of(SPEC).engine(**OFFLOADED, reader=reader) as engine:
        for _ in range(3):
            with pytest.raises(StreamError):
                list(engine.generate(PROMPT, params()))
            assert engine.stats.balanced() and engine.cached_ids == ()


@pytest.mark.parametrize("offset", range(9))
def test_eos_at_any_place_of_a_block_ends_there(engine_of: EngineOf, offset: int) -> None:
    """Offset 0 is the first token of the block that the first round verifies; later tokens must leave no trace."""
    engine = engine_of(SPEC, **OFFLOADED)
    eos, place = engine.text.eos_token_ids, offset + 1  # token 0 comes from the prompt's own pass
    sampled = [params(temperature=1.5, seed=seed, ignore_eos=False) for seed in range(20)]
    engine.text.eos_token_ids = frozenset()  # type: ignore[misc]
    texts = [(settings, plain_ids(engine, PROMPT, settings)) for settings in sampled]
    # The test needs a token that is new at its place.
    settings, known = next((settings, ids) for settings, ids in texts if ids[place] not in ids[:place])
    engine.set_controller("fixed:8")
    try:
        engine.text.eos_token_ids = frozenset({known[place]})  # type: ignore[misc]
        before = engine.stats.snapshot()
        with drafting(engine, right(PROMPT + known)):
            events = list(engine.generate(PROMPT, settings))
            emitted = [event.token_id for event in events]
            assert emitted == known[: place + 1] and events[-1].finish_reason == "eos"
            assert engine.stats.since(before).emitted == place + 1
            assert set(engine.cached_ids) <= set(PROMPT + known[: place + 1])
            engine.text.eos_token_ids = eos  # type: ignore[misc]
            check_aftermath(engine, [token for token in emitted if token is not None], known)
        engine.text.eos_token_ids = frozenset({known[place]})  # type: ignore[misc]
        assert plain_ids(engine, PROMPT, settings) == known[: place + 1]
    finally:
        engine.text.eos_token_ids = eos  # type: ignore[misc]


def test_eos_as_the_very_first_token_ends_the_answer(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    known, eos = plain_ids(engine, PROMPT, params()), engine.text.eos_token_ids
    try:
        engine.text.eos_token_ids = frozenset({known[0]})  # type: ignore[misc]
        events = list(engine.generate(PROMPT, params(ignore_eos=False)))
        assert [(event.token_id, event.finish_reason) for event in events] == [(known[0], "eos")]
    finally:
        engine.text.eos_token_ids = eos  # type: ignore[misc]
    check_aftermath(engine, [known[0]], known)


def test_nothing_is_drafted_after_a_drafted_eos(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    known, eos = plain_ids(engine, PROMPT, params()), engine.text.eos_token_ids
    engine.set_controller("fixed:8")
    try:
        engine.text.eos_token_ids = frozenset({known[2]})  # type: ignore[misc]
        before = engine.stats.snapshot()
        with drafting(engine, right(PROMPT + known)):
            ids_of(engine, PROMPT, params(ignore_eos=False))
        assert engine.stats.since(before).drafted == known.index(known[2])
    finally:
        engine.text.eos_token_ids = eos  # type: ignore[misc]


@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_the_end_of_the_context_ends_the_answer_there(tiny_of: TinyOf, engine_of: EngineOf, length: int) -> None:
    expected = plain_ids(engine_of(SPEC, **OFFLOADED), PROMPT, params(max_new_tokens=40))
    context = len(PROMPT) + 11
    with tiny_of(SPEC).engine(**OFFLOADED, context=context, controller=f"fixed:{length}") as engine:
        with drafting(engine, at_random(5, PROMPT + expected, engine.config.vocab_size)):
            events = list(engine.generate(PROMPT, params(max_new_tokens=40)))
            emitted = [event.token_id for event in events if event.token_id is not None]
            assert events[-1].finish_reason == "context"
            assert emitted == expected[:11] and len(PROMPT + emitted) == context
            assert engine.stats.balanced()
            held = list(engine.cached_ids)
            assert_caches_are_those_of(engine, held, caches(engine, len(held)))


@pytest.mark.parametrize("length", range(1, 9))
def test_the_cap_on_new_tokens_is_exact(engine_of: EngineOf, length: int) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller(f"fixed:{length}")
    for cap in range(1, 11):
        before = engine.stats.snapshot()
        with drafting(engine, right(PROMPT + expected)):
            events = list(engine.generate(PROMPT, params(max_new_tokens=cap)))
        assert [event.token_id for event in events if event.token_id is not None] == expected[:cap]
        assert events[-1].finish_reason == "length"
        stats = engine.stats.since(before)
        assert stats.balanced() and stats.emitted == cap and stats.cut == 0
        assert stats.drafted <= max(0, cap - 1)
