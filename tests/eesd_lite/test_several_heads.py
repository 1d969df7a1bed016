"""Several resident heads: wherever each round drafts, ids are the plain ones and every cache is a fresh one's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eesd_lite.allocated import allocated_bytes
from eesd_lite.engine import Engine
from eesd_lite.errors import BudgetError, EesdError, HeadError
from tests.eesd_lite.test_interruptions import Countdown, check_aftermath, interrupted_run, params
from tests.eesd_lite.test_trees import branching
from tests.eesd_lite.test_waiting_states import ByRound, TreesByRound
from tests.puppets import (
    assert_caches_are_those_of,
    assert_rounds_left_fresh_caches,
    at_random,
    caches,
    drafting,
    fresh_caches,
    ids_of,
    plain_ids,
    right,
    watched_rounds,
)
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=6)
EXITS = (1, 2, 4)
OPTIONS: dict[str, Any] = {"head": "random", "exit_layer": EXITS, "resident_layers": 4}
PROMPT = list(b"Once upon")  # that of test_interruptions
EngineOf = Callable[..., Engine]


class Switching:
    """For every round an exit, and so many tokens or nodes, over and over; what those are says the class beside it."""

    _round: int

    def __init__(self, rounds: Sequence[tuple[int, int]]) -> None:
        super().__init__([size for _, size in rounds])  # type: ignore[call-arg]
        self._exits = [exit_layer for exit_layer, _ in rounds]

    def choose_exit(self, limit: int) -> int:
        return self._exits[(self._round + 1) % len(self._exits)]


class SwitchingExits(Switching, ByRound):
    """Chains."""


class SwitchingTrees(Switching, TreesByRound):
    """Trees."""


SWITCHES = st.lists(st.tuples(st.sampled_from(EXITS), st.integers(0, 4)), min_size=1, max_size=7)


@given(rounds=SWITCHES, seed=st.integers(0, 99), sampled=st.booleans())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_switching_exits_between_rounds_changes_neither_ids_nor_caches(
    engine_of: EngineOf, rounds: list[tuple[int, int]], seed: int, sampled: bool
) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    chosen = params(max_new_tokens=24, **({"temperature": 1.0, "seed": seed} if sampled else {}))
    expected = plain_ids(engine, PROMPT, chosen)
    reference = fresh_caches(engine, (PROMPT + expected)[:-1])
    engine.set_controller("fixed:4")
    engine.controller = SwitchingExits(rounds)
    with drafting(engine, at_random(seed, PROMPT + expected, engine.config.vocab_size)), watched_rounds(engine) as seen:
        assert ids_of(engine, PROMPT, chosen) == expected
    assert_rounds_left_fresh_caches(engine, seen, reference)


@pytest.mark.parametrize("seed", range(4))
def test_trees_at_switching_exits_change_neither_ids_nor_caches(engine_of: EngineOf, seed: int) -> None:
    engine = engine_of(SPEC, **{**OPTIONS, "draft_limit": 64})
    chosen = params(max_new_tokens=30, **({"temperature": 1.0, "seed": seed} if seed % 2 else {}))
    expected = plain_ids(engine, PROMPT, chosen)
    reference = fresh_caches(engine, (PROMPT + expected)[:-1])
    engine.set_controller("tree:7")
    engine.controller = SwitchingTrees([(1, 9), (4, 5), (2, 0), (2, 20), (4, 0), (1, 6)])
    with branching(engine, seed, PROMPT + expected), watched_rounds(engine) as seen:
        assert ids_of(engine, PROMPT, chosen) == expected
    assert_rounds_left_fresh_caches(engine, seen, reference)


@pytest.mark.parametrize("drafter", ["head", "both"])
@pytest.mark.parametrize("controller", ["calibrated", "beta", "fixed:3", "tree", "tree:6"])
def test_every_controller_gives_the_plain_ids_with_several_heads(
    engine_of: EngineOf, controller: str, drafter: str
) -> None:
    engine = engine_of(SPEC, **OPTIONS, drafter=drafter)
    prompt = list(b"abcabdabcabdabcab")
    for chosen in (params(max_new_tokens=30), params(max_new_tokens=30, temperature=1.0, seed=3)):
        expected = plain_ids(engine, prompt, chosen)
        reference = fresh_caches(engine, (prompt + expected)[:-1])
        engine.set_controller(controller)
        with watched_rounds(engine) as seen:
            assert ids_of(engine, prompt, chosen) == expected
        assert_rounds_left_fresh_caches(engine, seen, reference)


@pytest.mark.parametrize(("exit_layer", "length"), [(1, 3), (2, 3), (4, 3), (1, 0)])
def test_a_round_runs_layers_below_its_own_exit_once_per_token_and_the_others_once(
    engine_of: EngineOf, exit_layer: int, length: int
) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:4")
    engine.controller = SwitchingExits([(exit_layer, length)])
    bank, before = engine.target.bank, engine.stats.snapshot()
    forwards = list(bank.forwards)
    with drafting(engine, right(PROMPT + expected)):
        ids_of(engine, PROMPT, params())
    stats = engine.stats.since(before)
    passes = [now - then for now, then in zip(bank.forwards, forwards, strict=True)]
    assert passes[:exit_layer] == [1 + stats.rounds + stats.drafted] * exit_layer
    assert passes[exit_layer:] == [1 + stats.rounds] * (SPEC.layers - exit_layer)
    assert stats.draft_offloaded_bytes == 0
    assert stats.verify_offloaded_bytes == stats.rounds * engine.plan.sweep_bytes > 0
    assert stats.prefill_offloaded_bytes == engine.plan.sweep_bytes


@pytest.mark.parametrize("phase", ["layer", "done"])
def test_ctrl_c_between_any_two_layers_leaves_every_head_with_what_was_emitted(engine_of: EngineOf, phase: str) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params())
    bank = engine.target.bank
    for place in range(1, 40, 4):
        engine.set_controller("fixed:3")
        engine.controller = SwitchingExits([(1, 2), (4, 0), (2, 3)])
        with drafting(engine, right(PROMPT + expected)):
            setattr(bank, phase, Countdown(getattr(bank, phase), place, after=place % 8 == 1))
            try:
                emitted = interrupted_run(engine, params())
            finally:
                delattr(bank, phase)
            assert engine.target.exit_layer == 4 and engine.target.passed is None
            check_aftermath(engine, emitted, expected)


def test_what_an_interruption_left_set_for_a_round_does_not_last_into_plain_decoding(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params())
    engine.controller = SwitchingExits([(1, 2)])
    engine._several.begin_round(engine.controller, 4)  # and then Ctrl-C, once more while the first was dealt with
    assert engine.target.exit_layer == 1
    assert plain_ids(engine, PROMPT, params()) == expected
    assert engine.target.exit_layer == 4 and engine.target.passed is None


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_generation_that_ends_early_leaves_every_head_with_what_was_emitted(engine_of: EngineOf, count: int) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:3")
    engine.controller = SwitchingExits([(1, 2), (2, 0), (4, 3)])
    with drafting(engine, at_random(count, PROMPT + expected, engine.config.vocab_size)):
        generation = engine.generate(PROMPT, params())
        emitted = [next(generation).token_id or 0 for _ in range(count)]
        generation.close()
        check_aftermath(engine, emitted, expected)


def test_a_saved_prefix_holds_the_entries_of_every_head(
    tiny_of: Callable[[TinySpec], Tiny], engine_of: EngineOf, tmp_path: Path
) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    engine.set_controller("fixed:3")
    engine.controller = SwitchingExits([(1, 2), (2, 0), (4, 3)])
    ids_of(engine, PROMPT, params())
    held, path = list(engine.cached_ids), tmp_path / "talk.cache"
    engine.save_prefix(path)
    with tiny_of(SPEC).engine(**OPTIONS) as other:
        assert other.load_prefix(path) == len(held)
        assert_caches_are_those_of(other, held, caches(other, len(held)))
    with tiny_of(SPEC).engine(**{**OPTIONS, "exit_layer": (2, 4)}) as other:
        assert other.load_prefix(path) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("draft_vocab", [None, 32])
def test_what_several_heads_take_is_planned(engine_of: EngineOf, dtype: str, draft_vocab: int | None) -> None:
    one = engine_of(SPEC, **{**OPTIONS, "exit_layer": 4}, dtype=dtype, draft_vocab=draft_vocab)
    single = dict(one.plan.items)
    engine = engine_of(SPEC, **OPTIONS, dtype=dtype, draft_vocab=draft_vocab)
    planned = dict(engine.plan.items)
    assert engine.plan.exit_layer == 4 and engine.plan.other_exits == (1, 2)
    names = ("exit head", "exit head KV cache", "exit head states")
    assert all(planned[name] == len(EXITS) * single[name] for name in names)
    assert {name: size for name, size in planned.items() if name not in names} == {
        name: size for name, size in single.items() if name not in names
    }
    found = allocated_bytes(engine)["device"]
    assert found == {name: size for name, size in planned.items() if name != "scratch"}


def test_exits_that_cannot_be_are_refused_in_one_line(tiny_of: Callable[[TinySpec], Tiny]) -> None:
    tiny = tiny_of(SPEC)
    with pytest.raises(EesdError, match=r"^exit layer 2 is named twice; name every exit once$"):
        tiny.engine(**{**OPTIONS, "exit_layer": (2, 1, 2)})
    with pytest.raises(BudgetError, match="drafting at exit layer 4 needs 4 resident layers, but 3 were asked for"):
        tiny.engine(**{**OPTIONS, "resident_layers": 3})
    with pytest.raises(HeadError, match="exit layer 6"):
        tiny.engine(**{**OPTIONS, "exit_layer": (2, 6), "resident_layers": 6})
    with pytest.raises(EesdError, match="no exit layer is named"):
        tiny.engine(**{**OPTIONS, "exit_layer": ()})


def test_several_heads_that_do_not_fit_leave_plain_decoding_and_say_what_would(
    tiny_of: Callable[[TinySpec], Tiny], engine_of: EngineOf
) -> None:
    single = engine_of(SPEC, **{**OPTIONS, "exit_layer": 4}).plan.total_bytes
    with tiny_of(SPEC).engine(head="random", exit_layer=EXITS, device_memory=single) as engine:
        assert engine.plan.exit_layer is None and engine.heads == ()
        assert any("exit layer 4 alone" in notice for notice in engine.notices), engine.notices
        ids_of(engine, PROMPT, params())
