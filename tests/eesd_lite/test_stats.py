"""Counters close, and differences of snapshots are what happened in between."""

import json

import pytest

from eesd_lite.stats import Stats


def three_rounds() -> Stats:
    stats = Stats(prompt_tokens=12, prefilled_tokens=7, prefill_emitted=1, prefill_seconds=0.5, decode_seconds=2.0)
    for drafted, accepted in ((4, 2), (4, 0), (5, 5)):
        stats.count_round(drafted=drafted, accepted=accepted)
    stats.cut = 3
    stats.emitted = 1 + (3 + 1 + 6) - 3
    return stats


def test_emitted_equals_prefill_plus_accepted_plus_rounds_minus_cut() -> None:
    stats = three_rounds()
    assert stats.balanced()
    stats.emitted += 1
    assert not stats.balanced()


def test_the_histogram_counts_rounds_by_accepted_length() -> None:
    assert three_rounds().accepted_length_histogram == [1, 0, 1, 0, 0, 1]


def test_tau_and_rates_are_those_of_the_definitions() -> None:
    stats = three_rounds()
    assert stats.tau == pytest.approx(10 / 3)
    assert stats.acceptance_rate == pytest.approx(7 / 13)
    assert stats.tokens_per_second == pytest.approx(7 / 2.0)
    assert stats.prefill_tokens_per_second == pytest.approx(14.0)


def test_rates_without_rounds_are_zero() -> None:
    stats = Stats()
    assert (stats.tau, stats.acceptance_rate, stats.tokens_per_second) == (0.0, 0.0, 0.0)
    assert stats.balanced()


def test_a_snapshot_does_not_follow_and_a_difference_holds_what_came_after() -> None:
    stats = three_rounds()
    before = stats.snapshot()
    stats.count_round(drafted=3, accepted=2)
    stats.emitted += 3
    assert before.rounds == 3
    after = stats.since(before)
    assert (after.rounds, after.drafted, after.accepted, after.emitted) == (1, 3, 2, 3)
    assert after.accepted_length_histogram == [0, 0, 1]
    assert after.balanced()


def test_the_dictionary_is_json_and_does_not_share_the_histogram() -> None:
    stats = three_rounds()
    values = stats.as_dict()
    values["accepted_length_histogram"].append(99)
    assert stats.balanced()
    assert json.loads(json.dumps(stats.as_dict()))["tau"] == pytest.approx(stats.tau)


def test_more_accepted_than_drafted_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Stats().count_round(drafted=1, accepted=2)
