"""Round costs: robust, monotone, optimistic where nothing was seen."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_lite.costs import RoundCosts


def costs_of(*rounds: tuple[int, float], repeat: int = 1) -> RoundCosts:
    costs = RoundCosts()
    for _ in range(repeat):
        for k, seconds in rounds:
            costs.observe(k, seconds, 1)
    return costs


def test_before_the_first_round_everything_is_zero() -> None:
    costs = RoundCosts()
    assert (costs.seconds(5), costs.throughput(), costs.longest_seen(), costs.seen(0)) == (0.0, 0.0, -1, 0)


def test_a_seen_length_costs_its_median() -> None:
    costs = costs_of((0, 1.0), (2, 3.0), (0, 1.2), (2, 3.2), (0, 1.1), (2, 3.1))
    assert costs.seconds(0) == 1.1
    assert costs.seconds(2) == 3.1


def test_hiccups_do_not_move_the_estimate() -> None:
    costs = RoundCosts()
    chance = random.Random(0)
    for _ in range(200):
        costs.observe(3, 2.0 * (50 if chance.random() < 0.2 else 1), 4)
    assert costs.seconds(3) == 2.0
    # Throughput counts a hiccup as three usual rounds at most: 1.4 usual rounds on average.
    assert 4 / 2.0 / 1.8 < costs.throughput() <= 4 / 2.0


def test_of_two_samples_the_one_without_a_hiccup_counts() -> None:
    assert costs_of((1, 90.0), (1, 2.0)).seconds(1) == 2.0


def test_lengths_between_seen_ones_lie_on_a_line() -> None:
    costs = costs_of((0, 1.0), (4, 3.0))
    assert [costs.seconds(k) for k in range(5)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0])


def test_lengths_beyond_the_longest_are_guessed_with_half_the_slope() -> None:
    costs = costs_of((0, 1.0), (4, 3.0))
    assert costs.seconds(6) == pytest.approx(3.0 + 0.5 * 0.5 * 2)


def test_a_single_length_guesses_that_longer_drafts_are_free_and_that_shorter_ones_save_their_share() -> None:
    costs = costs_of((3, 4.0))
    assert costs.seconds(10) == 4.0
    assert costs.seconds(0) == pytest.approx(1.0)


def test_the_time_of_drafting_alone_tells_what_shorter_and_longer_drafts_take() -> None:
    costs = RoundCosts()
    costs.observe(3, 10.0, 1, draft_seconds=3.5)  # a step of 1, half of one to begin with, and 6.5 of verifying
    assert costs.step() == pytest.approx(1.0)
    # Verifying one row is guessed to take 0.6 of that; lengths beyond are guessed at half a step each.
    assert costs.seconds(0) == pytest.approx(0.5 + 0.6 * 6.5)
    assert costs.seconds(7) == pytest.approx(10.0 + 0.5 * 4)
    costs.observe(0, 7.0, 1, draft_seconds=0.5)
    assert costs.seconds(0) == 7.0, "what was seen counts, not a guess"


def test_a_conversation_keeps_the_costs_and_forgets_the_throughput() -> None:
    costs = costs_of((0, 1.0), (2, 3.0), repeat=4)
    costs.begin_conversation()
    assert (costs.throughput(), costs.seconds(2)) == (0.0, 3.0)
    assert costs.throughput(6.0, 2.0) == 3.0  # what is promised, until something was seen


def test_a_jump_and_a_plateau_are_kept_as_they_are() -> None:
    shape = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    costs = costs_of(*enumerate(shape), repeat=3)
    assert [costs.seconds(k) for k in range(6)] == shape


def test_lengths_in_the_wrong_order_share_their_mean() -> None:
    costs = costs_of((0, 1.0), (1, 3.0), (2, 2.0), (3, 4.0), repeat=5)
    assert [costs.seconds(k) for k in range(4)] == pytest.approx([1.0, 2.5, 2.5, 4.0], rel=0.02)


def test_a_length_not_seen_for_long_is_unseen_again() -> None:
    costs = costs_of((0, 1.0), (8, 9.0))
    for _ in range(600):
        costs.observe(0, 2.0, 1)
    assert costs.seconds(0) == 2.0
    assert (costs.longest_seen(), costs.seconds(8)) == (0, 2.0)


def test_estimates_follow_costs_that_grow_with_the_context() -> None:
    costs = RoundCosts()
    for step in range(300):
        costs.observe(step % 3, (1 + step % 3) * (1 + step / 300), 2)
    for k in range(3):
        # The window of 31 rounds of each length spans the last 93 of 300: on average half of that behind.
        assert costs.seconds(k) == pytest.approx((1 + k) * 2.0, rel=0.1)


def test_throughput_is_recent_tokens_over_recent_seconds() -> None:
    costs = RoundCosts()
    for _ in range(500):
        costs.observe(2, 0.5, 1)
    assert costs.throughput() == pytest.approx(2.0)
    for _ in range(500):
        costs.observe(2, 0.5, 3)
    assert costs.throughput() == pytest.approx(6.0, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.0, 100.0), st.floats(0.0, 120.0)), min_size=1, max_size=80))
def test_longer_drafts_never_seem_cheaper_and_nothing_is_negative(rounds: list[tuple[int, float, float]]) -> None:
    costs = RoundCosts()
    for k, seconds, drafting in rounds:
        costs.observe(k, seconds, 1, drafting)
    curve = [costs.seconds(k) for k in range(30)]
    assert curve[0] >= 0
    for shorter, longer in zip(curve, curve[1:], strict=False):
        assert longer >= shorter * (1 - 1e-9)
    assert costs.throughput() > 0
