"""Controllers against a fake decoder with injected costs: close to the best fixed length, harmless with a bad head."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_lite.controller import Controller, make_controller
from eesd_lite.costs import RoundCosts
from eesd_lite.errors import EesdError
from tests.eesd_lite.fake_decoding import BAD, GOOD, MIDDLING, Cost, Head, decode

NOISE = 0.03  # of a round's seconds, besides one round in a hundred that takes five times as long
TOKENS = 3000
STEADY = Head(1.4, spread=0.0)  # every token is kept with probability 0.8, and confidence says nothing more
SEEDS = (1, 2, 3)
LEARNING = ("calibrated", "beta")


def linear(sweep: float) -> Cost:
    """A sweep lasts so many draft steps."""
    return lambda k: 0.01 * (sweep + k)


def step(sweep: float) -> Cost:
    """Beyond four drafted tokens the verify takes a quarter longer, as when the stream ring is outgrown."""
    return lambda k: 0.01 * (sweep * (1.25 if k >= 4 else 1.0) + 0.2 * k)


def hidden(sweep: float) -> Cost:
    """Up to six draft steps disappear behind the fetching of the coming sweep."""
    return lambda k: 0.01 * (sweep + max(0, k - 6))


COSTS: dict[str, Cost] = {
    "sweep 2": linear(2),
    "sweep 10": linear(10),
    "sweep 40": linear(40),
    "sweep 200": linear(200),
    "step 10": step(10),
    "step 40": step(40),
    "hidden 10": hidden(10),
    "hidden 40": hidden(40),
}
HEADS = {"good": GOOD, "middling": MIDDLING, "steady": STEADY}


@cache
def rounds_at(head: str, length: int, seed: int) -> tuple[int, int]:
    """Tokens and rounds of a fixed length; costs do not matter for those."""
    done = decode(make_controller(f"fixed:{length}"), head=HEADS[head], cost=lambda k: 1.0, tokens=TOKENS, seed=seed)
    return done.tokens, done.rounds


def best_fixed(head: str, cost: Cost, seed: int) -> float:
    """Throughput of the best fixed length on the same text and luck."""
    runs = [(rounds_at(head, k, seed), cost(k)) for k in (*range(9), 10, 12, 14, 16)]
    return max(tokens / (rounds * seconds) for (tokens, rounds), seconds in runs)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", COSTS)
def test_calibrated_reaches_the_best_fixed_length_that_only_hindsight_knows(name: str, head: str) -> None:
    shares = []
    for seed in SEEDS:
        controller = make_controller("calibrated", seed)
        done = decode(controller, head=HEADS[head], cost=COSTS[name], tokens=TOKENS, noise=NOISE, seed=seed)
        shares.append(done.throughput / best_fixed(head, COSTS[name], seed))
    # Without informative confidence nothing makes up for learning, and hindsight picks the luckiest of 13 lengths.
    assert sum(shares) / len(shares) >= (0.93 if head == "steady" else 0.95), shares


@pytest.mark.parametrize("name", COSTS)
def test_beta_reaches_nine_tenths_of_the_best_fixed_length(name: str) -> None:
    done = decode(make_controller("beta"), head=GOOD, cost=COSTS[name], tokens=TOKENS, noise=NOISE, seed=1)
    assert done.throughput >= 0.9 * best_fixed("good", COSTS[name], 1)


def test_confidence_is_worth_something() -> None:
    cost = linear(10)
    runs = [decode(make_controller(name), head=GOOD, cost=cost, tokens=TOKENS, seed=1) for name in LEARNING]
    assert runs[0].throughput > 1.05 * runs[1].throughput


@pytest.mark.parametrize("spec", LEARNING)
@pytest.mark.parametrize("name", COSTS)
def test_a_bad_head_is_given_up_and_costs_little(name: str, spec: str) -> None:
    cost = COSTS[name]
    done = decode(make_controller(spec), head=BAD, cost=cost, tokens=5000, noise=NOISE, seed=1)
    assert done.throughput * cost(0) >= 0.95
    late = decode(make_controller(spec), head=BAD, cost=cost, tokens=5000, noise=NOISE, seed=1, skip=1000)
    # Where a draft step costs what a bad head's tokens are worth (2 %), either decision is right.
    assert late.drafting_rounds <= 0.08 * late.rounds
    assert late.drafted <= 0.1 * late.rounds


@pytest.mark.parametrize("name", COSTS)
def test_many_short_conversations_with_a_bad_head_cost_little_too(name: str) -> None:
    """Each begins anew, as a benchmark's prompts do: learning itself must be cheap."""
    cost, tokens, seconds = COSTS[name], 0, 0.0
    for seed in range(40):
        done = decode(make_controller("calibrated", seed), head=BAD, cost=cost, tokens=128, noise=NOISE, seed=seed)
        tokens, seconds = tokens + done.tokens, seconds + done.seconds
    assert tokens / seconds * cost(0) >= 0.95


@pytest.mark.parametrize("sweep", [2, 10, 40])
def test_a_head_that_becomes_good_is_noticed(sweep: float) -> None:
    cost = linear(sweep)
    shares = []
    for seed in SEEDS:
        done = decode(
            make_controller("calibrated", seed),
            head=lambda position: BAD if position < 3000 else GOOD,
            cost=cost,
            tokens=7000,
            noise=NOISE,
            seed=seed,
            skip=5000,
        )
        shares.append(done.throughput / best_fixed("good", cost, seed))
    assert sum(shares) / len(shares) >= 0.95, shares


def test_costs_that_double_while_the_context_grows_are_followed() -> None:
    cost = linear(10)

    def throughput(spec: str) -> float:
        run = decode(make_controller(spec), head=GOOD, cost=cost, tokens=4000, growth=1.0, noise=NOISE, seed=1)
        return run.throughput

    assert throughput("calibrated") >= 0.95 * max(throughput(f"fixed:{k}") for k in range(2, 8))


def play(controller: Controller, limit: int, confidences: list[float], accepted: int, seconds: float) -> int:
    """One round; how much was drafted."""
    controller.begin(limit)
    drafted = 0
    while controller.go_on():
        controller.drafted(confidences[drafted % len(confidences)])
        drafted += 1
    controller.observe(min(accepted, drafted), seconds)
    return drafted


def test_the_first_draft_is_short_and_those_after_it_grow_no_faster_than_their_costs_are_known() -> None:
    """Nobody knows yet what a draft costs, so the first ones are not the longest possible."""
    controller = make_controller("calibrated")
    lengths = [play(controller, 64, [0.99], 64, 1.0) for _ in range(3)]
    assert lengths[0] == 3
    assert lengths[1] <= 4 * 3 + 1
    assert play(make_controller("calibrated"), 64, [0.1], 0, 1.0) <= 1, "a head that is not sure of itself"


def test_costs_of_the_plan_are_known_to_the_next_conversation_and_beliefs_are_not() -> None:
    costs = RoundCosts()
    first = make_controller("beta", costs=costs)
    for _ in range(60):
        play(first, 16, [0.9], 0, 1.0)
    second = make_controller("beta", costs=costs)
    assert second.belief()["levels"] == make_controller("beta").belief()["levels"] != first.belief()["levels"]
    assert second.belief()["round_seconds"] == first.belief()["round_seconds"] != []
    assert second.belief()["tokens_per_second"] == 0.0


def test_tokens_after_the_first_rejected_one_teach_nothing() -> None:
    controller = make_controller("beta")
    play(controller, 16, [0.9], 0, 1.0)
    for _ in range(40):
        play(controller, 16, [0.9], 1, 1.0)
    level = controller.belief()["levels"][0]
    # One kept and one lost in every round that drafted two or more, whatever else was drafted.
    assert level["acceptance"] == pytest.approx(0.5, abs=0.1)


def test_confidence_levels_are_calibrated_by_observation() -> None:
    """A head that says 0.99 and is right every fourth time; that says 0.6 and is always right."""
    controller = make_controller("calibrated")
    for index in range(400):
        confident = index % 2 == 0
        kept = 16 if not confident or index % 8 == 0 else 0
        play(controller, 16, [0.99 if confident else 0.6], kept, 1.0 + 0.001 * index / 400)
    levels = {level["up_to"]: level["acceptance"] for level in controller.belief()["levels"]}
    assert levels[0.7] > 0.9
    assert levels[1.0] < levels[0.7]


@pytest.mark.parametrize("spec", ["calibrated", "beta", "fixed:4", "hf", "off"])
def test_no_controller_drafts_beyond_the_limit(spec: str) -> None:
    controller = make_controller(spec)
    for limit in (0, 1, 3, 0, 16, 2) * 10:
        assert play(controller, limit, [0.99], 16, 1.0) <= limit


@settings(deadline=None, max_examples=60)
@given(
    spec=st.sampled_from(["calibrated", "beta"]),
    rounds=st.lists(
        st.tuples(st.integers(0, 20), st.floats(0, 1), st.integers(0, 20), st.floats(0, 1e4)), min_size=1, max_size=60
    ),
)
def test_whatever_happens_a_controller_decides_and_its_belief_is_json(
    spec: str, rounds: list[tuple[int, float, int, float]]
) -> None:
    controller = make_controller(spec)
    for limit, confidence, accepted, seconds in rounds:
        assert play(controller, limit, [confidence], accepted, seconds) <= limit
    assert all(0 <= level["acceptance"] <= 1 for level in json.loads(json.dumps(controller.belief()))["levels"])


def test_the_same_seed_and_the_same_seconds_decide_the_same() -> None:
    def lengths(seed: int) -> list[int]:
        controller = make_controller("calibrated", seed)
        return [play(controller, 16, [0.9, 0.5, 0.97], index % 5, 1.0) for index in range(60)]

    assert lengths(3) == lengths(3)


def test_a_round_that_was_not_observed_is_forgotten() -> None:
    controller = make_controller("calibrated")
    for _ in range(5):
        play(controller, 16, [0.99], 16, 1.0)
    controller.begin(16)
    while controller.go_on():
        controller.drafted(0.99)
    controller.begin(0)  # Ctrl-C came in between
    assert not controller.go_on()
    controller.observe(0, 1.0)


def test_a_fixed_length_is_kept_and_off_never_drafts() -> None:
    assert [play(make_controller("fixed:4"), limit, [0.1], 0, 1.0) for limit in (16, 4, 2, 0)] == [4, 4, 2, 0]
    assert play(make_controller("off"), 16, [0.99], 0, 1.0) == 0
    assert (make_controller("fixed:4").name, make_controller("fixed:0").name) == ("fixed:4", "off")


def test_hf_stops_after_the_first_token_below_its_threshold() -> None:
    controller = make_controller("hf")
    assert play(controller, 16, [0.9, 0.41, 0.39, 0.9], 0, 1.0) == 3
    assert play(controller, 64, [0.9], 0, 1.0) == 20
    assert play(controller, 1, [0.9], 0, 1.0) == 1


@pytest.mark.parametrize("spec", ["calibrated", "beta", "fixed:7", "hf", "off"])
def test_a_name_makes_the_controller_of_that_name(spec: str) -> None:
    assert make_controller(spec).name == spec
    assert make_controller(f" {spec.upper()} ").name == spec


def test_hf_takes_another_threshold_too() -> None:
    assert play(make_controller("hf:0.95"), 16, [0.99, 0.94], 0, 1.0) == 2
    assert play(make_controller("hf:0"), 16, [0.0], 0, 1.0) == 16
    assert (make_controller("hf:0.4").name, make_controller("hf:.5").name) == ("hf", "hf:0.5")


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "hf:",
        "hf:2",
        "hf:-0.1",
        "hf:x",
        "fast",
        "fixed",
        "fixed:",
        "fixed:-1",
        "fixed:x",
        "fixed:4.5",
        "off:",
        "beta:2",
    ],
)
def test_an_unknown_name_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(EesdError, match="calibrated, beta, fixed:K, hf, off"):
        make_controller(spec)


def test_a_source_that_is_silent_is_not_a_decision_against_drafting() -> None:
    """With look-ups in the text most rounds propose nothing; what was learned of the others stays."""
    controller = make_controller("calibrated")
    for _ in range(30):
        play(controller, 16, [0.99], 16, 1.0)
    before = controller.belief()["levels"]
    for _ in range(400):
        controller.begin(16)
        assert controller.go_on()
        controller.observe(0, 1.0)
    assert controller.belief()["levels"] == before
    assert play(controller, 16, [0.99], 16, 1.0) > 3
