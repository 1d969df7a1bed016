"""Controllers at work in an engine: state per conversation, thresholds by hand, and ids that no timing can change."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor

from eesd_lite import SamplingParams
from eesd_lite.cache import Rows
from eesd_lite.controller import make_controller
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError
from eesd_lite.sampling import Choice
from tests.puppets import Puppet, at_random, drafting, ids_of, plain_ids, right, right_for, wrong
from tests.readers import WatchedReader
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5)
OFFLOADED: dict[str, Any] = {"head": "random", "exit_layer": 2, "resident_layers": 2}
PROMPT = list(b"Hello there")
EngineOf = Callable[..., Engine]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, **settings})


def counted(engine: Engine, prompt: list[int], settings: SamplingParams) -> dict[str, Any]:
    """The counters of one generation, without its seconds."""
    before = engine.stats.snapshot()
    ids_of(engine, prompt, settings)
    done = engine.stats.since(before).as_dict()
    return {name: value for name, value in done.items() if "seconds" not in name and "per_second" not in name}


class PassClock:
    """Seconds from passes through the layers, so that this machine has no say: a sweep 0.1, a drafted token 0.02."""

    def __init__(self, engine: Engine) -> None:
        self._forwards = engine.target.bank.forwards

    def __call__(self) -> float:
        return 0.1 * self._forwards[-1] + 0.02 * self._forwards[0]


class Doubting(Puppet):
    """A puppet whose confidence falls along its draft: 0.9, 0.6, then 0.3."""

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        choice = super().propose(state, rows, position=position, history=history)
        return None if choice is None else Choice(choice.token_id, (0.9, 0.6, 0.3)[min(self._in_round, 2)])


# C16: a threshold shows in what is drafted, not in a flattering rate.


@pytest.mark.parametrize(
    ("spec", "drafted", "accepted", "rounds"),
    [
        # Two are right in every round; 23 tokens come from rounds. Limits are 16, 16, 16, 13, 10, 7, 4, 1.
        ("hf:0", 83, 15, 8),
        ("hf:0.5", 7 * 3 + 1, 15, 8),
        ("hf:0.999", 11, 11, 12),  # one a round, and none where a single token is left
    ],
)
def test_drafted_accepted_and_rounds_are_told_apart_for_every_threshold(
    engine_of: EngineOf, spec: str, drafted: int, accepted: int, rounds: int
) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller(spec)
    before, factory = engine.stats.snapshot(), engine.drafter_factory
    proposal = right_for(2, PROMPT + expected, engine.config.vocab_size)
    engine.drafter_factory = lambda target, sampler: Doubting(proposal)
    try:
        assert ids_of(engine, PROMPT, params()) == expected
    finally:
        engine.drafter_factory = factory
        engine.reset()
    stats = engine.stats.since(before)
    assert (stats.drafted, stats.accepted, stats.rounds) == (drafted, accepted, rounds)
    assert stats.emitted == 24 == 1 + stats.accepted + stats.rounds - stats.cut
    assert stats.acceptance_rate == pytest.approx(accepted / drafted)


# C19: what was learned of the text belongs to a conversation; what a round takes belongs to the plan.


@pytest.mark.parametrize("spec", ["calibrated", "beta", "hf", "fixed:3"])
def test_the_same_prompt_twice_in_one_process_gives_the_same_rounds_and_figures(engine_of: EngineOf, spec: str) -> None:
    engine = engine_of(SPEC, context=300, **OFFLOADED)
    settings = params(max_new_tokens=100)
    text = PROMPT + plain_ids(engine, PROMPT, settings)
    proposal = lambda position, _: at_random(position, text, 200)(position, 0)  # noqa: E731  by position alone
    engine.set_controller(spec)
    clock, engine.clock = engine.clock, PassClock(engine)
    try:
        for known in (right(text), wrong(text, 200)):  # so that what long drafts and none take is known to the plan
            with drafting(engine, known):
                counted(engine, PROMPT, settings)
        with drafting(engine, proposal):
            first, second = counted(engine, PROMPT, settings), counted(engine, PROMPT, settings)
            engine.reset()
            third = counted(engine, PROMPT, settings)
    finally:
        engine.clock = clock
    assert first["drafted"] > 0
    for name in ("rounds", "drafted", "accepted", "accepted_length_histogram", "cut", "target_rows", "draft_forwards"):
        assert first[name] == second[name] == third[name], name


def test_a_conversation_goes_on_learning_and_another_one_begins_anew(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    first = engine.controller
    answer = ids_of(engine, PROMPT, params())
    assert engine.controller is first, "the first prompt begins with the controller that is there"
    ids_of(engine, [*PROMPT, *answer, 65, 66], params())
    assert engine.controller is first, "the next turn"
    ids_of(engine, [*PROMPT, 70], params())
    assert engine.controller is not first, "another conversation"
    second = engine.controller
    engine.reset()
    assert engine.controller is not second, "forgotten on purpose"


def test_a_controller_that_is_handed_over_stays_until_another_is_asked_for(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    warm = engine.controller = make_controller("calibrated")
    for prompt in (PROMPT, PROMPT, [1, 2, 3]):
        ids_of(engine, prompt, params())
        engine.reset()
        assert engine.controller is warm
    engine.set_controller("calibrated")
    assert engine.controller is not warm
    mine = engine.controller
    ids_of(engine, PROMPT, params())
    engine.reset()
    assert engine.controller is not mine


def test_a_controller_that_does_not_exist_changes_nothing(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    engine.set_controller("fixed:2")
    before = engine.controller
    with pytest.raises(EesdError, match="nonsense"):
        engine.set_controller("nonsense")
    assert (engine.controller_spec, engine.controller) == ("fixed:2", before)


def test_an_explicit_length_is_kept_whatever_was_learned_before(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("calibrated")
    with drafting(engine, wrong(PROMPT + expected, engine.config.vocab_size)):
        ids_of(engine, PROMPT, params())  # learns that drafting is worth nothing
    engine.set_controller("fixed:3")
    before = engine.stats.snapshot()
    with drafting(engine, wrong(PROMPT + expected, engine.config.vocab_size)):
        assert ids_of(engine, PROMPT, params()) == expected
    stats = engine.stats.since(before)
    assert (stats.rounds, stats.drafted) == (23, 20 * 3 + 2 + 1)


# Timing decides how much is drafted, never what is said.


class WildClock:
    """Seconds that jump about."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._random.choice((0.0, 1e-6, 0.01, 0.3, 5.0)) * self._random.random()
        return self._now


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 20, "seed": 5}], ids=["greedy", "sampled"])
def test_twenty_runs_under_random_delays_say_the_same(tiny_of: Callable[[TinySpec], Tiny], sampling: Any) -> None:
    delays = random.Random(1)
    reader = WatchedReader(before=lambda number: time.sleep(delays.choice((0.0, 0.0, 0.0005, 0.002))))
    settings = params(max_new_tokens=40, **sampling)
    seen = set()
    with tiny_of(SPEC).engine(reader=reader, **OFFLOADED) as engine:
        expected = plain_ids(engine, PROMPT, settings)
        proposal = right_for(2, PROMPT + expected, engine.config.vocab_size)
        for run in range(20):
            engine.set_controller(("calibrated", "beta")[run % 2])
            engine.clock = WildClock(run)
            before = engine.stats.snapshot()
            with drafting(engine, proposal) if run % 4 < 3 else nullcontext():
                assert ids_of(engine, PROMPT, settings) == expected, f"run {run}"
            seen.add(engine.stats.since(before).drafted)
    assert len(seen) > 5, "the delays changed nothing, so the test has no teeth"
