"""The engine as its callers see it: prompts, events, ends, what it refuses, several generations on one engine."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from eesd_lite import Engine as PublicEngine
from eesd_lite import SamplingParams
from eesd_lite.emitter import TokenEvent
from eesd_lite.engine import Engine
from eesd_lite.errors import BudgetError, EesdError, HeadError, ModelError, PromptError, StreamError
from tests.puppets import (
    assert_caches_are_those_of,
    caches,
    drafting,
    ids_of,
    nothing,
    plain_ids,
    right,
    right_for,
    wrong,
)
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5)
OFFLOADED: dict[str, Any] = {"head": "random", "exit_layer": 2, "resident_layers": 2}
PROMPT = list(b"Hello there")
EngineOf = Callable[..., Engine]
TinyOf = Callable[[TinySpec], Tiny]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, **settings})


def test_the_public_name_is_this_engine() -> None:
    assert PublicEngine is Engine


def test_a_text_prompt_is_its_ids_with_one_bos(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    ids = engine.text.encode("Hello there")
    from_text = [event.token_id for event in engine.generate("Hello there", params())]
    engine.reset()
    assert from_text == [event.token_id for event in engine.generate(ids, params())]


def test_events_say_which_tokens_had_been_drafted_and_only_the_last_has_a_reason(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:2")
    with drafting(engine, right(PROMPT + expected)):
        events = list(engine.generate(PROMPT, params()))
    # The first token is the prompt's; then blocks of two accepted drafts and a bonus; 11 = 3 + 3 + 3 + 2.
    assert [event.drafted for event in events[:-1]] == [False] + [True, True, False] * 3 + [True, False]
    assert events[-1] == TokenEvent(None, "", False, "length")
    assert all(event.finish_reason is None for event in events[:-1])
    assert "".join(event.text for event in events) == engine.text.decode(expected)


def test_the_account_of_tokens_closes_with_hand_counted_numbers(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:3")
    before = engine.stats.snapshot()
    with drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
        ids_of(engine, PROMPT, params())
    stats = engine.stats.since(before)
    # 11 tokens of rounds: three rounds draft 3 and emit 3, the last may draft 1 and emits 2.
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (4, 3 + 3 + 3 + 1, 2 + 2 + 2 + 1, 12)
    assert (stats.prefill_emitted, stats.cut, stats.accepted_length_histogram) == (1, 0, [0, 1, 3])
    assert stats.tau == pytest.approx(11 / 4) and stats.acceptance_rate == pytest.approx(0.7)
    assert (stats.prompt_tokens, stats.prefilled_tokens) == (len(PROMPT), len(PROMPT))


@pytest.mark.parametrize(("confidence", "threshold_lets"), [(0.999, True), (0.5, True), (0.3, False), (0.0, False)])
def test_the_confidence_threshold_shows_in_drafted_not_in_the_text(
    engine_of: EngineOf, confidence: float, threshold_lets: bool
) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("hf")
    before = engine.stats.snapshot()
    with drafting(engine, right(PROMPT + expected), confidence=confidence):
        assert ids_of(engine, PROMPT, params()) == expected
    stats = engine.stats.since(before)
    if threshold_lets:
        assert stats.rounds == 1 and stats.drafted == 10
    else:
        assert stats.drafted == 5 and stats.accepted == 5 and stats.rounds == 6


@pytest.mark.parametrize("controller", ["calibrated", "beta"])
def test_a_liar_is_soon_asked_less_and_costs_no_extra_passes(engine_of: EngineOf, controller: str) -> None:
    engine = engine_of(SPEC, context=400, **OFFLOADED)
    prompt, settings = [1, 2], params(max_new_tokens=120)
    expected = plain_ids(engine, prompt, settings)
    engine.set_controller(controller)
    forwards = engine.target.bank.forwards
    passes = forwards[-1]
    # A clock of passes, so that this machine has no say: a sweep takes 100 ms, a drafted token 20 ms more.
    clock, engine.clock = engine.clock, lambda: 0.1 * forwards[-1] + 0.02 * forwards[0]
    before = engine.stats.snapshot()
    try:
        with drafting(engine, wrong(prompt + expected, engine.config.vocab_size), confidence=0.6):
            generation = engine.generate(prompt, settings)
            early = [next(generation).token_id for _ in range(33)]
            after_32 = engine.stats.snapshot()
            assert early + [event.token_id for event in generation][:-1] == expected
    finally:
        engine.clock = clock
    assert forwards[-1] - passes == 1 + engine.stats.since(before).rounds == len(expected)
    late = engine.stats.since(after_32)
    assert late.rounds == 87 and late.drafted < 0.25 * late.rounds, late.drafted


def test_the_same_prompt_twice_in_one_process_gives_the_same_rounds(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    engine.set_controller("fixed:3")
    counts = []
    for _ in range(2):
        engine.reset()
        before = engine.stats.snapshot()
        ids_of(engine, PROMPT, params())
        stats = engine.stats.since(before)
        counts.append((stats.rounds, stats.drafted, stats.accepted, stats.prefilled_tokens))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([5, 9999], "token id 9999 is outside the model's vocabulary of 288"),
        ([-1], "token id -1"),
        ([[1, 2], [3, 4]], "batches are not supported"),
        (["one", "two"], "batches are not supported"),
        ([1] * 128, "the prompt has 128 tokens and the context holds 128"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_before_anything_runs(
    engine_of: EngineOf, prompt: Any, message: str
) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    forwards = list(engine.target.bank.forwards)
    if prompt == "":
        engine = _without_bos(engine)
    with pytest.raises(PromptError, match=message):
        engine.generate(prompt, params())
    assert engine.target.bank.forwards == forwards


def _without_bos(engine: Engine) -> Engine:
    assert engine.text.encode("") == [], "an empty text has no ids in this model"
    return engine


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_an_error_only_where_one_is_used(
    tiny_of: TinyOf, tmp_path: Path
) -> None:
    tiny = tiny_of(SPEC)
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<extra{n}>" for n in range(40)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with Tiny(folder, tiny.spec, tiny.weights).engine() as engine:
        assert engine.text.vocab_size > engine.config.vocab_size
        with pytest.raises(PromptError, match=r"token id 3\d\d is outside the model's vocabulary of 288"):
            engine.generate("Hello <extra39>", params())
        assert max(ids_of(engine, PROMPT, params(max_new_tokens=30))) < engine.config.vocab_size


def test_events_name_the_drafts_that_a_correction_put_an_end_to(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    vocab = engine.config.vocab_size
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:3")
    with drafting(engine, right_for(1, PROMPT + expected, vocab)):
        events = [event for event in engine.generate(PROMPT, params()) if event.token_id is not None]
    assert [event.token_id for event in events] == expected
    for place, event in enumerate(events[:9]):  # first token, then one kept draft and a correction a round
        wrong_ones = [(token + 1) % vocab for token in expected[place : place + 2]]
        assert event.drafted == (place % 2 == 1)
        assert list(event.rejected) == (wrong_ones if place and place % 2 == 0 else [])


def test_a_prompt_reports_every_layer_that_it_has_passed(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    reports: list[tuple[str, int, int]] = []
    list(engine.generate(PROMPT, params(), lambda *report: reports.append(report)))
    assert reports == [(f"reading {len(PROMPT)} tokens, layer", layer, 5) for layer in (1, 2, 3, 4, 5)]
    reports.clear()
    list(engine.generate([*PROMPT, 65], params(), lambda *report: reports.append(report)))
    assert reports[0] == ("reading 1 token, layer", 1, 5), "only what is new is read"


def test_padding_rows_are_never_chosen_though_their_logits_are_the_largest(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    known = engine.text.vocab_size
    assert known < engine.config.vocab_size
    for settings in ({}, {"temperature": 2.0}):
        assert max(ids_of(engine, PROMPT, params(max_new_tokens=30, **settings))) < known
    rows: list[Any] = []
    original = engine.target.logits
    engine.target.logits = lambda hidden: rows.append(original(hidden)) or rows[-1]  # type: ignore[method-assign]
    try:
        ids_of(engine, PROMPT, params(max_new_tokens=30))
    finally:
        del engine.target.logits
    assert any(int(row.argmax()) >= known for logits in rows for row in logits), "the test has no teeth"


def test_numbers_that_are_not_finite_are_an_error_with_a_hint_and_the_engine_goes_on(engine_of: EngineOf) -> None:
    engine = engine_of(TinySpec(layers=5, seed=7), **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    norm = engine.target.norm.clone()
    generation = engine.generate(PROMPT, params())
    emitted = [next(generation).token_id for _ in range(3)]
    try:
        engine.target.norm.fill_(float("inf"))
        with pytest.raises(ModelError, match="final norm or the lm_head; dtype float32 helps"):
            list(generation)
    finally:
        engine.target.norm.copy_(norm)
    assert emitted == expected[:3] and engine.stats.balanced()
    held = list(engine.cached_ids)
    assert_caches_are_those_of(engine, held, caches(engine, len(held)))
    assert ids_of(engine, PROMPT, params()) == expected


def test_a_temperature_next_to_zero_is_greedy(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    assert ids_of(engine, PROMPT, params(temperature=1e-6)) == plain_ids(engine, PROMPT, params())


# One cache, several generations.


def test_beginning_a_generation_ends_an_earlier_one_as_if_it_had_been_closed(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    other = list(b"Something else")
    expected, expected_other = plain_ids(engine, PROMPT, params()), plain_ids(engine, other, params())
    engine.set_controller("fixed:3")
    first = engine.generate(PROMPT, params())
    emitted = [next(first).token_id for _ in range(4)]
    second = engine.generate(other, params())
    assert [next(second).token_id for _ in range(2)] == expected_other[:2]
    assert list(first) == [], "it must not go on with the other one's cache"
    rest = [event.token_id for event in second if event.token_id is not None]
    assert emitted == expected[:4] and rest == expected_other[2:]
    assert engine.stats.balanced()


def test_an_iterator_that_is_dropped_is_closed_and_the_next_one_continues_from_it(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    for count, event in enumerate(engine.generate(PROMPT, params()), start=1):
        assert event.token_id == expected[count - 1]
        if count == 5:
            break
    gc.collect()
    assert engine.stats.balanced()
    before = engine.stats.prefilled_tokens
    assert ids_of(engine, PROMPT + expected[:5], params(max_new_tokens=7)) == expected[5:]
    assert engine.stats.prefilled_tokens - before == 1


@pytest.mark.parametrize("spec", ["off", "fixed:2"])
def test_changing_the_controller_in_the_middle_ends_the_answer_and_forgets_the_prefix(
    engine_of: EngineOf, spec: str
) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    generation = engine.generate(PROMPT, params())
    next(generation)
    engine.set_controller(spec)
    assert list(generation) == [] and engine.cached_ids == ()
    expected = plain_ids(engine, PROMPT, params())
    assert ids_of(engine, PROMPT, params()) == expected
    held = list(engine.cached_ids)
    if spec != "off":
        assert_caches_are_those_of(engine, held, caches(engine, len(held)))


def test_a_prompt_that_is_cached_whole_is_read_from_its_last_token_on(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = ids_of(engine, PROMPT, params())
    before = engine.stats.snapshot()
    assert ids_of(engine, PROMPT, params()) == expected
    stats = engine.stats.since(before)
    assert (stats.prompt_tokens, stats.prefilled_tokens) == (len(PROMPT), 1)


# Loading: what is refused, and what is said.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"controller": "sometimes"}, EesdError, "no controller 'sometimes'"),
        ({"draft_limit": 0}, EesdError, "draft_limit must be from 1 to 64"),
        ({"threads": 0}, EesdError, "threads must be from 1 to 1024, not 0"),
        ({"threads": 100_000}, EesdError, "threads must be from 1 to 1024, not 100000"),
        ({"dtype": "float16"}, EesdError, "bfloat16 or float32, not 'float16'"),
        ({"device": "tpu"}, EesdError, "tpu"),
        ({"context": 9999}, EesdError, "context must be from 8 to 512"),
        ({"head": "random", "exit_layer": 5}, HeadError, "exit layer 5: the model allows 1 to 4"),
        ({"head": "random", "exit_layer": 0}, HeadError, "exit layer 0"),
        ({"head": "/no/such/head"}, HeadError, "no such head file"),
        ({"resident_layers": 9}, BudgetError, "this model has 5 layers"),
        ({"head": "random", "exit_layer": 3, "resident_layers": 2}, BudgetError, "needs 3 resident layers"),
        ({"device_memory": "10kB"}, BudgetError, "too small"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused_in_one_line(
    tiny_of: TinyOf, options: dict[str, Any], error: type[EesdError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        tiny_of(SPEC).engine(**options)
    assert "\n" not in str(caught.value)


def test_cuda_without_a_device_is_refused_with_a_hint(tiny_of: TinyOf) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(EesdError, match="use --device cpu"):
        tiny_of(SPEC).engine(device="cuda")


def test_without_a_head_decoding_is_plain_and_a_notice_says_how_to_get_one(tiny_of: TinyOf) -> None:
    with tiny_of(SPEC).engine(head=None) as engine:
        assert engine.head is None and engine.plan.exit_layer is None
        assert any("no exit head for this model" in notice for notice in engine.notices)
        expected = ids_of(engine, PROMPT, params())
        assert engine.stats.drafted == 0 and len(expected) == 12


def test_a_closed_engine_says_so_and_closing_twice_is_harmless(tiny_of: TinyOf) -> None:
    engine = tiny_of(SPEC).engine(**OFFLOADED)
    generation = engine.generate(PROMPT, params())
    next(generation)
    engine.close()
    engine.close()
    with pytest.raises(EesdError, match="closed"):
        engine.generate(PROMPT)
    with pytest.raises(StreamError, match="closed"):
        list(generation)


def test_a_silent_drafter_costs_nothing_but_its_silence(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:4")
    before = engine.stats.snapshot()
    with drafting(engine, nothing(expected, 0)):
        assert ids_of(engine, PROMPT, params()) == expected
    stats = engine.stats.since(before)
    assert (stats.rounds, stats.drafted, stats.target_rows) == (11, 0, 11)
