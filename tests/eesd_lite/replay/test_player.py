"""Playing a trace: counts by hand, the same luck for all, and an oracle that nobody beats."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_lite.controller import make_controller
from eesd_lite.errors import TraceError
from eesd_lite.ngram_drafter import NgramDrafter
from eesd_lite.replay.curves import DEFAULT_CURVES, make_curve
from eesd_lite.replay.ngram import ngram_trace
from eesd_lite.replay.player import Played, oracle, play
from eesd_lite.replay.trace import Answer, Trace
from tests.eesd_lite.replay.made_traces import STEPS, drawn, made


def fixed(k: int):  # type: ignore[no-untyped-def]
    return lambda seed, costs: make_controller(f"fixed:{k}")


def test_a_fixed_length_is_counted_as_by_hand() -> None:
    trace = made([[2, 0, 0, 0, 1]])
    played = play(trace, make_curve("memory", STEPS), fixed(2))
    # Position 0: two kept, on to 3; there 0 kept, on to 4; there 1 kept, whose bonus lies behind the end.
    seconds = 3 * (0.25 + 2 * 1.0 + 3.0)
    assert (played.rounds, played.drafted, played.accepted, played.tokens) == (3, 6, 3, 5)
    assert played.seconds == pytest.approx(seconds)


def test_plain_decoding_takes_a_round_for_every_token_but_the_first() -> None:
    played = play(made([[1, 1, 0, 2], [0]]), make_curve("sweep:5", STEPS), fixed(0))
    assert played == Played(tokens=5, seconds=pytest.approx(5 * 5.25), rounds=5)


def test_nothing_is_drafted_beyond_the_longest_answer() -> None:
    played = play(made([[4, 3, 2, 1, 0]], longest=6), make_curve("memory", STEPS), fixed(4))
    assert (played.rounds, played.drafted) == (1, 4)
    played = play(made([[3, 2, 1, 0]], longest=5), make_curve("memory", STEPS), fixed(4))
    assert (played.rounds, played.drafted) == (1, 3)


def test_the_oracle_by_hand_skips_worthless_rounds() -> None:
    curve = make_curve("memory", STEPS)  # 2.25, 3.75, 5.25, 6.75, 8.25 seconds
    best = oracle(made([[2, 0, 0, 0, 1]]), curve)
    # Draft two (5.25), then plain (2.25), then one right token costs 3.75 where a plain round costs 2.25.
    assert (best.rounds, best.drafted, best.tokens) == (3, 2, 5)
    assert best.seconds == pytest.approx(5.25 + 2.25 + 2.25)


def every_way(lengths: list[int], seconds: tuple[float, ...]) -> float:
    """The fastest of all ways through a short answer, without thinking."""
    fastest = float("inf")
    for choice in product(range(5), repeat=len(lengths)):
        index, total = 0, 0.0
        while index < len(lengths):
            total += seconds[choice[index]]
            index += min(choice[index], lengths[index]) + 1
        fastest = min(fastest, total)
    return fastest


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), curve=st.sampled_from(DEFAULT_CURVES))
def test_the_oracle_is_the_fastest_of_all_ways(seed: int, curve: str) -> None:
    trace, costs = drawn(seed, answers=1, tokens=6), make_curve(curve, STEPS)
    lengths = [position.accepted for position in trace.answers[0].positions]
    assert oracle(trace, costs).seconds == pytest.approx(every_way(lengths, costs.seconds))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), spec=st.sampled_from(["off", "fixed:1", "fixed:3", "hf", "beta", "calibrated"]))
def test_nobody_beats_the_oracle(seed: int, spec: str) -> None:
    trace = drawn(seed, tokens=30)
    for name in ("memory", "sweep:10", "hidden:10:2", "cpu:5"):
        curve = make_curve(name, STEPS)
        played = play(trace, curve, lambda seed, costs: make_controller(spec, seed, costs=costs))
        assert played.seconds >= oracle(trace, curve).seconds - 1e-9
        assert played.tokens == 2 * 29


def test_the_same_seed_replays_the_same_and_noise_is_not_in_the_account() -> None:
    trace, curve = drawn(5, answers=4, tokens=60), make_curve("sweep:10", STEPS)
    runs = [
        play(trace, curve, lambda seed, costs: make_controller("calibrated", seed, costs=costs), noise=0.1, seed=3)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    noisy = play(trace, curve, fixed(2), noise=0.5, seed=1)
    assert noisy == play(trace, curve, fixed(2), seed=2)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("memory", [2.25, 3.75, 5.25, 6.75, 8.25]),
        ("sweep:3", [3.25, 4.25, 5.25, 6.75, 8.25]),
        ("hidden:10:2", [10.25, 10.25, 10.25, 11.25, 12.25]),
        ("jump:8:2", [8.25, 9.25, 10.25, 13.25, 14.25]),
        ("cpu:8", [8.25, 9.25, 10.25, 11.25, 14.25]),
    ],
)
def test_curves_by_hand(name: str, seconds: list[float]) -> None:
    assert make_curve(name, STEPS).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["", "sweep", "sweep:x", "sweep:-1", "sweep:nan", "memory:3", "hidden:10", "link:3"])
def test_an_unknown_curve_lists_the_known_ones(name: str) -> None:
    with pytest.raises(TraceError, match="memory, sweep:S, hidden:S:H"):
        make_curve(name, STEPS)


def test_look_ups_in_the_text_are_those_of_the_drafter() -> None:
    """The engine's own drafter, asked at every position, drafts what the trace of look-ups says."""
    trace = made([[0] * 29])
    answer = trace.answers[0]
    period = tuple((1, 2, 3, 4, 9)[n % 5] for n in range(30))
    trace = Trace(trace.about, (Answer((5, 6), period, answer.positions),))
    looked = ngram_trace(trace)
    drafter, right = NgramDrafter(), 0
    for position in looked.answers[0].positions:
        history = [5, 6, *period[: position.index + 1]]
        tokens: list[int] = []
        while len(tokens) < 4:
            choice = drafter.propose(None, None, position=len(history), history=history)  # type: ignore[arg-type]
            if choice is None:
                break
            tokens.append(choice.token_id)
            history = [*history, choice.token_id]
        assert position.tokens == tuple(tokens)
        assert position.accepted <= len(tokens)
        right += position.accepted
    assert looked.answers[0].positions[0].tokens == () and right > 40
    # Draft steps are free and all layers are verified: 2 rows of 2.5 seconds, and the lower layers' share of that.
    curve = make_curve("memory", looked.about["seconds"])
    assert curve.seconds[:2] == pytest.approx((2.25, 2.5 * 1.125))
    assert make_curve("sweep:40", looked.about["seconds"]).seconds == pytest.approx((40.0,) * 5)
