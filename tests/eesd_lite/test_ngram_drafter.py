"""Drafting from repeated text: look-ups and beliefs by hand; ids, caches and accounts in an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_lite import SamplingParams
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError
from eesd_lite.ngram_drafter import NgramDrafter, NgramIndex
from eesd_lite.sampling import Choice
from tests.puppets import assert_caches_are_those_of, ids_of, plain_ids, watched_rounds
from tests.tiny import Tiny, TinySpec

EngineOf = Callable[..., Engine]
SPEC = TinySpec(layers=5)
PROMPT = list(b"one two three one two three one two")
PLANS: dict[str, dict[str, Any]] = {
    "no head": {"drafter": "ngram"},
    "no head, layers on disk": {"drafter": "ngram", "resident_layers": 1},
    "both, layers on disk": {"drafter": "both", "head": "random", "exit_layer": 2, "resident_layers": 2},
    "both without a head": {"drafter": "both"},
}


def params(**sampling: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 40, "ignore_eos": True, **sampling})


def index_of(ids: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.learn(ids)
    return index


def test_the_longest_match_wins_then_the_latest() -> None:
    assert index_of([1, 2, 3, 9, 1, 2, 3]).matches()[0].token == 9
    assert index_of([1, 2, 3, 9, 1, 2, 3]).matches()[0].length == 3
    assert index_of([5, 1, 2, 7, 1, 2, 8, 1, 2]).matches()[0].token == 8  # two matches of one length: the later
    assert index_of([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]).matches()[0].token == 7  # a longer one before a later one
    assert [match.token for match in index_of([5, 1, 2, 7, 1, 2, 8, 1, 2]).matches(4)] == [8, 7]


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 1], [1, 2, 3, 4], [3, 1, 2, 1]])
def test_without_an_earlier_pair_nothing_matches(ids: list[int]) -> None:
    assert index_of(ids).matches() == []


def test_a_run_that_overlaps_itself_goes_on() -> None:
    assert index_of([4, 4, 4, 4]).matches()[0].token == 4


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.lists(st.integers(0, 3), max_size=14), min_size=1, max_size=6))
def test_following_other_texts_leaves_no_trace(texts: list[list[int]]) -> None:
    index, fresh = NgramIndex(), NgramIndex()
    for text in texts:
        index.follow(text)
    fresh.follow(texts[-1])
    assert (index.ids, index._ends) == (fresh.ids, fresh._ends)
    assert index.matches(3) == fresh.matches(3), "a draft taught beliefs"


def test_belief_grows_with_what_was_right_and_falls_with_what_was_wrong() -> None:
    before = NgramIndex().belief(6)
    assert index_of([1, 2, 3, 4, 5, 6, 7] * 8).belief(6) > before > 0.5
    # After 1 2 comes another token each time: matches of two tokens are never right.
    assert index_of([token for n in range(30) for token in (1, 2, 10 + n)]).belief(2) < 0.1


class Told:
    """A head that says what it is told; `kept` are the positions it only kept."""

    def __init__(self, tokens: dict[int, int]) -> None:
        self.tokens, self.kept, self.asked = tokens, 0, 0

    def propose(self, state: Any, rows: Any, *, position: int, history: Any) -> Choice:
        self.asked += 1
        return Choice(self.tokens.get(position, 0), 0.5)

    def keep(self, states: Any, first: Any) -> None:
        self.kept += 1

    def move(self, sources: list[int], targets: list[int]) -> None: ...


def test_of_two_sources_the_one_believed_more_proposes() -> None:
    head = Told({})
    drafter = NgramDrafter(head)  # type: ignore[arg-type]
    repeated = [1, 2, 3, 4, 5, 6, 7] * 6
    choice = drafter.propose(None, None, position=len(repeated), history=repeated)  # type: ignore[arg-type]
    assert choice is not None and choice.token_id == 1 and (head.asked, head.kept) == (0, 1)
    unique = list(range(100, 140))
    assert drafter.propose(None, None, position=40, history=unique) == Choice(0, 0.5)  # type: ignore[arg-type]
    assert head.asked == 1


def test_tokens_that_the_text_drafted_and_the_target_took_are_believed_more_not_forgotten() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    visible = text + text[:3]
    drafted = list(visible)
    for _ in range(3):  # three right tokens of one draft
        choice = drafter.propose(None, None, position=len(drafted), history=drafted)  # type: ignore[arg-type]
        assert choice is not None and choice.token_id == text[len(drafted) - 8]
        drafted.append(choice.token_id)
    judged = NgramIndex()
    judged.learn(visible)
    judged.learn(drafted + [7])
    drafter.propose(None, None, position=len(drafted) + 1, history=[*drafted, 7])  # type: ignore[arg-type]
    for length in range(2, 7):
        assert drafter.index.belief(length) == judged.belief(length), length
    assert drafter.index.belief(3) > NgramIndex().belief(3)


def test_the_head_is_judged_by_what_became_visible_and_only_up_to_its_first_error() -> None:
    head = Told({3: 50, 4: 51, 5: 52})
    drafter = NgramDrafter(head)  # type: ignore[arg-type]
    text = [10, 11, 12]
    for _ in range(3):  # one draft of three tokens
        choice = drafter.propose(None, None, position=len(text), history=text)  # type: ignore[arg-type]
        text = [*text, choice.token_id]  # type: ignore[union-attr]
    before = drafter.head_belief
    drafter.propose(None, None, position=5, history=[10, 11, 12, 50, 99])  # type: ignore[arg-type]
    # 50 was right, 51 was not, 52 was never judged.
    assert (drafter._head_right, drafter._head_weight) == (pytest.approx(0.95), pytest.approx(1.95))
    assert drafter.head_belief == pytest.approx(1.45 / 2.95) and before == 0.5


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_k": 4, "seed": 2, "repetition_penalty": 1.1}], ids=["greedy", "sampled"]
)
def test_repeated_text_is_drafted_and_the_ids_are_those_of_plain_decoding(
    engine_of: EngineOf, plan: str, sampling: dict[str, Any]
) -> None:
    engine = engine_of(SPEC, **PLANS[plan])
    expected = plain_ids(engine, PROMPT, params(**sampling))
    for spec in ("fixed:1", "fixed:5", "calibrated", "beta"):
        engine.set_controller(spec)
        before = engine.stats.snapshot()
        assert ids_of(engine, PROMPT, params(**sampling)) == expected, spec
        done = engine.stats.since(before)
        assert not spec.startswith("fixed") or done.drafted > 0


def test_a_model_without_a_head_gains_where_it_repeats_itself(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, drafter="ngram")
    period = [33, 44, 55]
    prompt = period * 8
    expected = plain_ids(engine, prompt, params())
    engine.set_controller("fixed:4")
    before = engine.stats.snapshot()
    # A model that would say the period for ever: its choice is replaced, everything else runs.
    engine._choose = lambda sampler: lambda logits, position, history: period[position % 3]  # type: ignore[method-assign]
    try:
        said = ids_of(engine, prompt, params())
    finally:
        del engine._choose
    done = engine.stats.since(before)
    assert said != expected and said == [period[(24 + n) % 3] for n in range(40)]
    assert done.tau > 4.5 and done.target_rows == done.drafted + done.rounds and engine.plan.exit_layer is None


@pytest.mark.parametrize("plan", ["no head, layers on disk", "both, layers on disk"])
def test_after_every_round_the_caches_are_those_of_a_fresh_prefill(engine_of: EngineOf, plan: str) -> None:
    engine = engine_of(SPEC, **PLANS[plan])
    engine.set_controller("fixed:4")
    with watched_rounds(engine) as rounds:
        ids_of(engine, PROMPT, params(max_new_tokens=16))
    assert len(rounds) > 3
    for held, found in rounds:
        assert_caches_are_those_of(engine, held, found)
    engine.reset()


def test_an_unknown_drafter_is_refused_before_anything_is_loaded(tiny_of: Callable[[TinySpec], Tiny]) -> None:
    with pytest.raises(EesdError, match="head, ngram, both, not 'guess'"):
        tiny_of(SPEC).engine(drafter="guess")
