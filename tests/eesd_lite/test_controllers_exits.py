"""Where to draft, on a decoder without a model: the exit that acceptance and costs speak for is found and kept to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import pytest

from eesd_lite.acceptance import GENERIC, GENERIC_BELIEF
from eesd_lite.controller import PlanCosts, make_controller, plan_controller
from eesd_lite.controllers_exits import ChoosesExit, ExitsController
from eesd_lite.costs import RoundCosts
from tests.eesd_lite.fake_decoding import BAD, GOOD, MIDDLING, Cost, Head, Outcome, decode

AT = 10, 20  # exit layers


def decode_at(
    heads: Mapping[int, Head | Callable[[int], Head]], costs: Mapping[int, Cost], *, name: str = "calibrated",
    tokens: int = 3000, skip: int = 0, seed: int = 0, noise: float = 0.02,
) -> tuple[Outcome, Counter[int]]:  # fmt: skip
    """What a run gives, and rounds by exit (0: plain) from position `skip` on."""
    controller = ExitsController(name, dict.fromkeys(heads, GENERIC), rng_seed=seed)
    rounds: Counter[int] = Counter()

    def head(position: int) -> Head:
        chosen = heads[controller.choose_exit(16)]
        return chosen(position) if callable(chosen) else chosen

    def cost(drafted: int) -> float:
        return costs[controller.exit_layer](drafted)

    def counted(drafted: int) -> float:
        rounds[controller.exit_layer if drafted else 0] += 1
        return cost(drafted)

    decode(controller, head=head, cost=cost, tokens=skip, seed=seed, noise=noise)
    rounds.clear()
    return decode(controller, head=head, cost=counted, tokens=tokens, seed=seed + 7, noise=noise), rounds


def linear(start: float, step: float) -> Cost:
    return lambda drafted: start + step * drafted


@pytest.mark.parametrize("name", ["calibrated", "beta"])
@pytest.mark.parametrize("seed", range(2))
def test_behind_a_long_sweep_the_head_that_is_right_more_often_drafts(name: str, seed: int) -> None:
    costs = {10: linear(40.0, 0.6), 20: linear(40.0, 1.0)}
    _, rounds = decode_at({10: MIDDLING, 20: GOOD}, costs, name=name, skip=1500, seed=seed)
    assert rounds[20] > 0.85 * rounds.total(), rounds


@pytest.mark.parametrize("name", ["calibrated", "beta"])
@pytest.mark.parametrize("seed", range(2))
def test_of_two_equal_heads_the_cheaper_one_drafts(name: str, seed: int) -> None:
    costs = {10: linear(4.0, 0.5), 20: linear(4.0, 2.5)}
    _, rounds = decode_at({10: GOOD, 20: GOOD}, costs, name=name, skip=1500, seed=seed)
    assert rounds[10] > 0.85 * rounds.total(), rounds


def test_a_shallow_head_that_beats_the_deep_one_is_found(seed: int = 1) -> None:
    costs = {10: linear(20.0, 0.5), 20: linear(20.0, 1.0)}
    _, rounds = decode_at({10: GOOD, 20: BAD}, costs, skip=1500, seed=seed)
    assert rounds[10] > 0.9 * rounds.total(), rounds


@pytest.mark.parametrize("start", [2.0, 40.0])
def test_both_heads_together_decode_about_as_fast_as_the_better_alone(start: float) -> None:
    heads, costs = {10: MIDDLING, 20: GOOD}, {10: linear(start, 0.4), 20: linear(start, 1.6)}
    together = [decode_at(heads, costs, skip=1000, seed=seed)[0] for seed in range(2)]
    alone = {
        at: [
            decode(make_controller("calibrated", seed), head=heads[at], cost=costs[at], tokens=4000, skip=1000,
                   noise=0.02, seed=seed)
            for seed in range(2)
        ]
        for at in AT
    }  # fmt: skip
    speed = {at: sum(one.throughput for one in runs) for at, runs in alone.items()}
    assert sum(one.throughput for one in together) >= 0.96 * max(speed.values()), speed


def test_bad_heads_cost_no_more_together_than_one_alone() -> None:
    costs = {10: linear(1.0, 0.5), 20: linear(1.0, 0.8)}
    for seed in range(2):
        outcome, rounds = decode_at({10: BAD, 20: BAD}, costs, tokens=2000, seed=seed)
        assert outcome.throughput >= 0.95, (outcome, rounds)
        assert rounds[0] > 0.93 * rounds.total(), rounds


def test_when_the_better_head_changes_the_choice_follows() -> None:
    heads: dict[int, Head | Callable[[int], Head]] = {
        10: lambda position: GOOD if position > 3000 else BAD,
        20: lambda position: BAD if position > 3000 else GOOD,
    }
    costs = {10: linear(20.0, 1.0), 20: linear(20.0, 1.0)}
    _, before = decode_at(heads, costs, tokens=3000)
    assert before[20] > 0.85 * before.total(), before
    _, whole = decode_at(heads, costs, tokens=8000)
    later = whole - before
    assert later[10] > 0.6 * later.total(), later


def test_a_plain_round_is_known_at_every_exit_and_a_drafting_one_only_at_its_own() -> None:
    costs: defaultdict[int, RoundCosts] = defaultdict(RoundCosts)
    controller = ExitsController("calibrated", dict.fromkeys(AT, GENERIC), costs=costs)
    assert controller.choose_exit(16) == 20, "of equals the deepest"
    controller.begin(16)
    assert controller.go_on()
    controller.drafted(0.9)
    controller.observe(1, 10.0)
    assert (costs[20].seen(1), costs[10].longest_seen()) == (1, -1)
    assert costs[10].throughput() == costs[20].throughput() == 0.2
    controller.begin(0)
    assert not controller.go_on()
    controller.observe(0, 8.0)
    assert costs[10].seen(0) == costs[20].seen(0) == 1
    assert controller.choose_exit(16) == 10, "an exit at which nothing was drafted yet is tried"


def test_a_round_that_was_never_observed_is_forgotten() -> None:
    controller = ExitsController("calibrated", dict.fromkeys(AT, GENERIC))
    for _ in range(3):
        controller.choose_exit(16)
        controller.begin(16)
        assert controller.go_on()
        controller.drafted(0.5)
    controller.begin(16)
    controller.observe(0, 1.0)


def test_only_those_that_learn_choose_among_exits() -> None:
    exits = dict.fromkeys(AT, GENERIC_BELIEF)
    for spec in ("calibrated", "beta"):
        chosen = plan_controller(spec, PlanCosts(), exits)
        assert isinstance(chosen, ChoosesExit) and chosen.name == spec
        assert set(chosen.belief()["exits"]) == set(AT)
        assert not isinstance(plan_controller(spec, PlanCosts(), {20: GENERIC_BELIEF}), ChoosesExit)
    for spec in ("off", "fixed:3", "hf", "tree", "tree:8"):
        assert not isinstance(plan_controller(spec, PlanCosts(), exits), ChoosesExit)
