"""How large a tree to draft: near the best fixed size under every cost, harmless with a bad head, what it learns."""

from __future__ import annotations

import json
import math
import random
from functools import cache

import pytest

from eesd_lite.acceptance import GENERIC_TREE
from eesd_lite.controller import LARGEST_TREE, LONGEST_CHAIN, any_controller, draft_limit_for, make_controller
from eesd_lite.controllers_tree import FixedTree, ThompsonTree, TreeController
from eesd_lite.errors import EesdError
from eesd_lite.tree_beliefs import Calibration
from eesd_lite.tree_costs import TreeCosts
from tests.eesd_lite.fake_trees import Cost, FakeHead, Outcome, decode

GOOD, OVERSURE, BAD = FakeHead(1.2), FakeHead(1.0, shift=-1.5), FakeHead(0.5, shift=-5.0)
TOKENS = 500


def multiplying(sweep: float) -> Cost:
    """The CPU multiplies: nodes cost, on the way down and on the way up."""
    return lambda nodes, steps: 0.01 * (sweep + 0.5 * steps + 0.5 * nodes)


def streaming(sweep: float) -> Cost:
    """A card: only steps cost."""
    return lambda nodes, steps: 0.01 * (sweep + steps)


COSTS = {"cpu 2": multiplying(2), "cpu 10": multiplying(10), "cpu 40": multiplying(40), "gpu 40": streaming(40)}


def tree(spec: str, seed: int = 0) -> TreeController:
    made = any_controller(spec, seed)
    assert isinstance(made, TreeController)
    return made


@cache
def fixed(nodes: int, head: FakeHead) -> Outcome:
    """Costs do not matter to a fixed tree."""
    return decode(tree(f"tree:{nodes}"), head, lambda nodes, steps: 1.0, tokens=TOKENS)


def throughput(run: Outcome, cost: Cost) -> float:
    return run.tokens / sum(cost(nodes, steps) for nodes, steps in run.log)


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("head", [GOOD, OVERSURE], ids=["good", "oversure"])
def test_the_tree_is_as_fast_as_the_best_fixed_size_that_only_hindsight_knows(name: str, head: FakeHead) -> None:
    cost = COSTS[name]
    best = max(1 / cost(0, 0), *(throughput(fixed(nodes, head), cost) for nodes in (2, 8, 32, 64)))
    run = decode(tree("tree"), head, cost, tokens=TOKENS, noise=0.03)
    assert run.throughput >= 0.93 * best  # learning included


def test_trees_are_wide_where_nodes_are_cheap_and_narrow_where_they_are_dear() -> None:
    runs = [decode(tree("tree"), GOOD, COSTS[name], tokens=TOKENS) for name in ("cpu 2", "cpu 10", "cpu 40", "gpu 40")]
    sizes = [run.nodes / run.rounds for run in runs]
    assert sizes == sorted(sizes) and sizes[0] < 4 and sizes[-1] > 32, sizes


@pytest.mark.parametrize("name", COSTS)
def test_a_bad_head_is_given_up_and_costs_little(name: str) -> None:
    run = decode(tree("tree"), BAD, COSTS[name], tokens=TOKENS, noise=0.03)
    assert run.throughput * COSTS[name](0, 0) >= 0.96


def test_many_short_conversations_with_a_bad_head_cost_little_too() -> None:
    runs = [decode(tree("tree", seed), BAD, COSTS["cpu 2"], tokens=64, seed=seed, noise=0.03) for seed in range(10)]
    plain = COSTS["cpu 2"](0, 0)
    assert sum(run.tokens for run in runs) / sum(run.seconds for run in runs) * plain >= 0.93


def test_the_same_seed_draws_the_same_trees() -> None:
    runs = [decode(tree("tree", seed), GOOD, COSTS["cpu 40"], tokens=200).log for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_first_round_is_plain_and_no_round_drafts_without_room() -> None:
    controller = ThompsonTree()
    controller.begin(64)
    assert not controller.asks(1.0, ()) and controller.take([0.9]) == 0
    controller.learn([], nodes=0, steps=0, accepted=0, seconds=1.0)
    controller.begin(0)
    assert not controller.asks(1.0, ()) and controller.take([0.9]) == 0
    controller.learn([], nodes=0, steps=0, accepted=0, seconds=1.0)
    controller.begin(64)
    assert controller.asks(1.0, ())
    assert controller.take([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]) <= 4, "the size of trees grows by steps"


@pytest.mark.parametrize(("dear", "joining"), [(1.0, 1), (0.0, 3)])
def test_unlikely_siblings_do_not_take_the_free_places_of_a_likely_nodes_descendants(dear: float, joining: int) -> None:
    costs = TreeCosts()
    for number in range(120):
        nodes = number % 12
        costs.observe(nodes, nodes > 0, 1.0 + dear * max(0, nodes - 3), 2)
    controller = ThompsonTree(costs=costs)
    controller.begin(64)
    assert controller.take([0.7, 0.1, 0.1]) == joining


def test_one_unlikely_proposal_does_not_end_drafting() -> None:
    """What a head proposes is judged by many nodes; at first by those that heads usually meet."""
    costs = TreeCosts()
    for number in range(60):
        costs.observe(number % 2, number % 2, 1.0 + 0.1 * (number % 2), 2)
    controller = ThompsonTree(costs=costs)
    for _ in range(4):
        controller.begin(64)
        assert controller.asks(1.0, ())
        assert controller.take([controller.chance(0.02)]) == 0
        controller.learn([[(0.02, False)]], nodes=0, steps=0, accepted=0, seconds=1.0)


def test_calibration_finds_out_what_confidence_is_worth() -> None:
    rng, calibration = random.Random(1), Calibration(GENERIC_TREE)
    for _ in range(4000):
        stated = rng.uniform(-4, 4)
        truth = 1 / (1 + math.exp(-(-1.0 + 0.6 * stated)))
        calibration.learn(1 / (1 + math.exp(-stated)), rng.random() < truth)
    assert calibration.mean == pytest.approx((-1.0, 0.6), abs=0.15)
    draws = [calibration.draw(rng) for _ in range(400)]
    for place in (0, 1):
        values = [draw[place] for draw in draws]
        assert sum(values) / 400 == pytest.approx(calibration.mean[place], abs=0.05)
        assert 0.005 < max(values) - min(values) < 0.6
    before = calibration.mean
    for _ in range(600):
        calibration.fade(0.98)
    calibration.learn(0.5, True)
    assert abs(calibration.mean[1] - 1.0) < abs(before[1] - 1.0), "what faded goes back to believing the head"


def test_a_confidence_of_nought_or_one_is_no_accident() -> None:
    calibration = Calibration(GENERIC_TREE)
    for _ in range(50):
        calibration.learn(0.0, True)
        calibration.learn(1.0, False)
    assert all(math.isfinite(value) for value in calibration.mean)
    controller = ThompsonTree()
    controller.begin(4)
    assert 0.0 <= controller.chance(0.0) <= controller.chance(1.0) <= 1.0


def test_times_of_rounds_are_learned_and_hiccups_are_not() -> None:
    rng, costs = random.Random(3), TreeCosts()
    truth = lambda nodes, steps: 0.4 + 0.01 * steps + 0.005 * max(0, nodes - 8)  # noqa: E731
    costs.observe(0, 0, truth(0, 0), 1)
    assert costs.seconds(30, 5) == pytest.approx(0.4), "what was never seen is tried"
    for number in range(200):
        nodes, steps = rng.randrange(40), rng.randrange(1, 7)
        costs.observe(nodes, steps, truth(nodes, steps) * rng.gauss(1, 0.02) * (6 if number % 50 == 49 else 1), 2)
    for shape in ((0, 0), (8, 3), (20, 4), (39, 6)):
        assert costs.seconds(*shape) == pytest.approx(truth(*shape), rel=0.08)
    sizes = [costs.seconds(nodes, 4) for nodes in range(64)]
    assert sizes == sorted(sizes), "more nodes never take less time"
    assert costs.throughput() == pytest.approx(2 / 0.47, rel=0.2)
    costs.observe(3, 1, 0.0, 1)  # clocks have steps
    assert math.isfinite(costs.seconds(3, 1))


def test_a_fixed_tree_asks_only_where_a_child_could_still_be_among_the_best() -> None:
    controller = FixedTree(3)
    controller.begin(64)
    assert controller.asks(1.0, ()) and controller.take([0.5, 0.4, 0.001]) == 2
    assert not controller.asks(0.3, (0.35, 0.2)), "the one place left goes to a better candidate"
    assert controller.asks(0.4, (0.35, 0.2)) and controller.take([0.39]) == 1
    assert not controller.asks(0.9, ()) and controller.take([0.9]) == 0


def test_names_of_trees_and_what_they_may_draft() -> None:
    assert tree("tree").name == "tree" and tree(" Tree:16 ").name == "tree:16"
    assert draft_limit_for("off", "fixed:4") == LONGEST_CHAIN and draft_limit_for("off", "tree:2") == LARGEST_TREE
    for spec in ("tree:", "tree:0", "tree:65", "tree:99999999999", "tree:-1", "tree:x"):
        with pytest.raises(EesdError, match="from 1 to 64"):
            any_controller(spec)
    with pytest.raises(EesdError, match="only chains"):
        make_controller("tree")
    with pytest.raises(EesdError, match="tree:NODES"):
        any_controller("oak")


def test_beliefs_are_json() -> None:
    controller = tree("tree")
    decode(controller, GOOD, COSTS["cpu 10"], tokens=100)
    belief = json.loads(json.dumps(controller.belief(), allow_nan=False))
    assert set(belief) == {"calibration", "round_seconds", "tokens_per_second"}
    assert json.dumps(tree("tree").belief()) and tree("tree:4").belief() == {}
