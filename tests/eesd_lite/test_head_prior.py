"""What is counted of a head: by hand, by fitting what was made up, and through its file."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from eesd_lite.acceptance import EDGES, GENERIC_BELIEF
from eesd_lite.controller import any_controller
from eesd_lite.head_prior import NO_PRIOR, HeadPrior, Judged, belief_of, chains, count_levels, read_prior

HEADS = Path(__file__).parents[2] / "models" / "data" / "smollm2-135m" / "heads"


def made_up(shift: float, slope: float, positions: int = 3000) -> list[Judged]:
    """A text whose head is right as log-odds(kept) = shift + slope * log-odds(confidence) says."""
    rng, text = random.Random(5), []
    for _ in range(positions):
        first = rng.uniform(0.05, 0.9)
        stated = (first, (1 - first) / 3, (1 - first) / 9)
        kept = None
        for index, confidence in enumerate(stated):
            odds = math.log(confidence / (1 - confidence))
            if kept is None and rng.random() < 1 / (1 + math.exp(-(shift + slope * odds))):
                kept = index
        text.append(Judged(stated, kept, first))
    return text


def test_chains_stand_on_the_true_text_and_end_with_their_first_wrong_token() -> None:
    right, wrong = Judged((0.9,), 0, 0.9), Judged((0.4, 0.3), 1, 0.4)
    found = [(list(stated), kept) for stated, kept in chains([[right, right, wrong], [right]])]
    assert found == [([0.9, 0.9, 0.4], 2), ([0.9, 0.4], 1), ([0.4], 0), ([0.9], 1)]
    prior = count_levels(chains([[right, right, wrong], [right]]))
    high, low = EDGES.index(0.93), EDGES.index(0.5)
    assert EDGES[high - 1] <= 0.9 < EDGES[high] and EDGES[low - 1] <= 0.4 < EDGES[low]
    assert (prior.judged[high], prior.kept[high]) == (1000, 1000)  # four of four drafts, scaled to a thousand
    assert (prior.judged[low], prior.kept[low]) == (750, 1)  # three of four; nothing is quite impossible
    assert prior.following[-1][high] == 750 and prior.following[high][low] == 500


def test_what_confidence_is_worth_is_found_again() -> None:
    tree = belief_of([made_up(-0.7, 0.8)]).tree
    # At most one proposal is kept, so that those behind the first are kept less often than the formula says.
    assert tree.slope == pytest.approx(0.8, abs=0.25) and -1.2 < tree.shift < -0.4
    sure, unsure = belief_of([[Judged((0.5,), 0, 0.5)] * 50]).tree, belief_of([[Judged((0.5,), None, 0.5)] * 50]).tree
    assert sure.shift > 2 > -2 > unsure.shift and math.isfinite(sure.slope)


def test_usual_nodes_are_averages_of_what_was_proposed() -> None:
    tree = belief_of([made_up(0.0, 1.0)]).tree
    firsts = sorted(node[0] for node in tree.nodes)
    assert len(firsts) == 12 and firsts[0] < 0.15 and firsts[-1] > 0.8
    assert sum(firsts) / 12 == pytest.approx(0.475, abs=0.02)


def test_a_prior_survives_its_json_and_the_nearest_temperature_is_believed() -> None:
    cold, warm = belief_of([made_up(0.0, 1.0, 200)]), belief_of([made_up(-1.0, 1.0, 200)])
    prior = HeadPrior({0.0: cold, 0.8: warm})
    again = read_prior(json.dumps(prior.as_dict()))
    assert again == prior
    assert [again.at(t) for t in (0.0, 0.3, 0.5, 2.0)] == [cold, cold, warm, warm]
    assert NO_PRIOR.at(0.5) == GENERIC_BELIEF == read_prior(None).at(0.0)
    assert belief_of([]) == belief_of([[]]) == GENERIC_BELIEF


def test_counts_by_other_levels_are_left_out() -> None:
    stored = HeadPrior({0.0: belief_of([made_up(0.0, 1.0, 50)])}).as_dict()
    assert HeadPrior.of({**stored, "edges": [0.5]}) == NO_PRIOR


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("temperatures", "0.0", "kept"), [1]),
        (("temperatures", "0.0", "kept", 0), 1e9),
        (("temperatures", "0.0", "kept", 0), math.nan),
        (("temperatures", "0.0", "judged", 0), 0),
        (("temperatures", "0.0", "following", 3, 3), 0),
        (("temperatures", "0.0", "following", 3), [1]),
        (("temperatures", "0.0", "judged"), [1e308] * 8),
        (("temperatures", "0.0", "following"), [[1] * 8] * 8),
        (("temperatures", "0.0", "precision"), [1, 5, 1]),
        (("temperatures", "0.0", "precision"), [1e200, 0, 1e200]),
        (("temperatures", "0.0", "precision"), [1, 2]),
        (("temperatures", "0.0", "nodes"), []),
        (("temperatures", "0.0", "nodes"), [[]]),
        (("temperatures", "0.0", "nodes", 0, 0), 1.5),
        (("temperatures", "0.0", "nodes", 0, 0), -0.1),
        (("temperatures", "0.0", "nodes", 0, 0), math.nan),
        (("temperatures", "0.0", "shift"), "x"),
        (("temperatures", "0.0", "slope"), math.inf),
        (("temperatures", "0.0"), 3),
        (("temperatures", "warm"), {}),
        (("temperatures",), []),
        (("edges",), None),
    ],
)
def test_damaged_counts_are_refused_with_one_kind_of_error(place: tuple[Any, ...], value: Any) -> None:
    stored = copy.deepcopy(HeadPrior({0.0: belief_of([made_up(0.0, 1.0, 50)])}).as_dict())
    inner: Any = stored
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match=r"^acceptance: [^\n]+$"):
        read_prior(json.dumps(stored))


@pytest.mark.parametrize("text", ["", "[", "null", "3", "[]", "{}", '"x"', "[" * 100_000])
def test_metadata_that_is_nothing_of_the_kind_is_refused_with_the_same_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"^acceptance: [^\n]+$"):
        read_prior(text)


@pytest.mark.parametrize("spec", ["calibrated", "beta", "tree"])
def test_controllers_begin_with_what_the_head_says_of_itself(spec: str) -> None:
    good, bad = belief_of([made_up(2.0, 1.0)]), belief_of([made_up(-3.0, 1.0)])
    beliefs = [any_controller(spec, belief=belief).belief() for belief in (good, bad)]
    if spec == "tree":
        assert beliefs[0]["calibration"]["shift"] > beliefs[1]["calibration"]["shift"] + 2
    else:
        first, second = ([level["acceptance"] for level in belief["levels"]] for belief in beliefs)
        assert first[len(first) // 2] > second[len(second) // 2] + 0.2


@pytest.mark.parametrize("path", sorted(HEADS.glob("*.safetensors")), ids=lambda path: path.stem)
def test_every_shipped_head_says_how_often_it_was_right(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        prior = read_prior(file.metadata()["acceptance"])
    assert set(prior.beliefs) == {0.0, 0.8}
    for belief in prior.beliefs.values():
        acceptance = belief.chain.acceptance()
        assert acceptance[-1] > 0.75 > 0.35 > acceptance[0] and belief.tree.slope > 0.5
