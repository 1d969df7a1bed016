"""No tuning needed: the recorded traces of docs/benchmarks/traces, replayed. Nothing is timed; seeds are fixed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eesd_lite.acceptance import EDGES, GENERIC, GENERIC_BELIEF
from eesd_lite.head_prior import HeadPrior
from eesd_lite.replay.compare import ReplaySettings, compare
from eesd_lite.replay.compare_trees import TreeReplaySettings, compare_trees
from eesd_lite.replay.curves import DEFAULT_CURVES
from eesd_lite.replay.ngram import ngram_trace
from eesd_lite.replay.prior import acceptance_of
from eesd_lite.replay.trace import Trace
from eesd_lite.replay.tree_trace import TreeTrace
from tests.eesd_lite.replay.made_traces import made

TRACES = Path(__file__).parents[3] / "docs" / "benchmarks" / "traces"
NAMES = ("exit10-greedy", "exit20-greedy", "exit10-sampled", "exit20-sampled")
CURVES = ("memory", "sweep:5", "sweep:10", "sweep:20", "sweep:40", "sweep:80", "sweep:120", "sweep:200", "hidden:40:6")
TREE_NAMES = ("exit10", "exit20", "exit10-sampled")
LONG = ("sweep:40", "gpu:40", "gpu:200")
TREE_POINTS = ("memory", "sweep:5", *LONG, "cpu:40")


@cache
def report(name: str, mode: str) -> dict[str, Any]:
    trace = Trace.load(TRACES / f"smollm2-135m-{name}.npz")
    assert len(trace.answers) == 40
    curves = CURVES if mode == "conversations" else CURVES[:2]
    settings = ReplaySettings(controllers=("hf", "calibrated"), curves=curves, seeds=1, mode=mode)
    return compare(trace, settings)


@pytest.mark.parametrize("name", NAMES)
def test_calibrated_is_within_three_percent_of_the_best_fixed_length_at_every_point(name: str) -> None:
    shares = {
        point["curve"]: point["controllers"]["calibrated"]["of_best_fixed"]
        for point in report(name, "conversations")["points"]
    }
    assert min(shares.values()) >= 0.97, shares


@pytest.mark.parametrize("name", NAMES)
def test_beta_is_too_on_average_over_its_luck(name: str) -> None:
    """It knows no confidence, so it gains nothing that would make up for an unlucky draw."""
    trace = Trace.load(TRACES / f"smollm2-135m-{name}.npz")
    curves = ("memory", "sweep:5", "sweep:20", "sweep:80", "hidden:40:6")
    points = compare(trace, ReplaySettings(controllers=("beta",), curves=curves, seeds=3))["points"]
    shares = {point["curve"]: point["controllers"]["beta"]["of_best_fixed"] for point in points}
    assert min(shares.values()) >= 0.97, shares


@pytest.mark.parametrize("name", NAMES)
def test_calibrated_beats_every_single_fixed_length_and_hf_over_the_whole_range(name: str) -> None:
    overall = report(name, "conversations")["overall"]
    others = {spec: figures["of_best_fixed"] for spec, figures in overall.items() if spec != "calibrated"}
    assert len(others) == 18 and overall["calibrated"]["of_best_fixed"] > max(others.values()), others
    assert overall["calibrated"]["of_oracle"] < 1.0


def test_a_single_length_is_not_enough() -> None:
    """A negative control: no fixed length, nor hf, would pass the first test."""
    for name in NAMES:
        overall = report(name, "conversations")["overall"]
        assert all(f["worst_of_best_fixed"] < 0.97 for spec, f in overall.items() if spec != "calibrated"), name


def test_without_any_known_costs_a_conversation_of_a_hundred_tokens_loses_little() -> None:
    for point in report("exit20-greedy", "cold")["points"]:
        assert point["controllers"]["calibrated"]["of_best_fixed"] >= 0.93


def test_the_generic_prior_is_what_the_prior_traces_say() -> None:
    assert acceptance_of([Trace.load(TRACES / f"prior-exit{layer}.npz") for layer in (10, 20)]) == GENERIC


def test_a_prior_is_counted_by_hand() -> None:
    # Two positions with two and no tokens kept, of four; confidence 0.5 is the fourth level; 1000 drafts are 500 each.
    prior = acceptance_of([made([[2, 0]], confidence=0.5)])
    level = 3
    assert EDGES[level - 1] <= 0.5 < EDGES[level]
    assert prior.judged[level] == 500 * 4 and prior.kept[level] == 500 * 2
    assert prior.following[-1][level] == 1000 and prior.following[level][level] == 1000
    assert prior.without_confidence().acceptance()[0] == pytest.approx(0.5, abs=0.01)


def test_the_default_curves_span_from_memory_to_a_sweep_of_200_draft_steps() -> None:
    assert len(DEFAULT_CURVES) >= 8 and DEFAULT_CURVES[0] == "memory" and "sweep:200" in DEFAULT_CURVES


@cache
def trees_report(name: str) -> list[dict[str, Any]]:
    trace = TreeTrace.load(TRACES / f"smollm2-135m-{name}-trees.npz")
    assert len(trace.trees) == (16 if "sampled" in name else 40)
    found: list[dict[str, Any]] = compare_trees(
        trace, TreeReplaySettings(controllers=("tree",), curves=TREE_POINTS, seeds=1)
    )["points"]
    return found


@pytest.mark.parametrize("name", TREE_NAMES)
def test_trees_are_within_three_percent_of_the_best_chain_and_the_best_fixed_tree_at_every_point(name: str) -> None:
    shares = {point["curve"]: point["controllers"]["tree"]["of_best_fixed"] for point in trees_report(name)}
    assert min(shares.values()) >= 0.97, shares


@pytest.mark.parametrize("name", TREE_NAMES)
def test_trees_beat_the_best_chain_behind_long_sweeps_and_no_fixed_tree_is_enough(name: str) -> None:
    points = trees_report(name)
    by_curve = {point["curve"]: point["controllers"]["tree"] for point in points}
    assert all(by_curve[name]["of_best_chain"] > 1.05 for name in LONG), by_curve
    assert all(share["of_oracle"] < 1.0 for share in by_curve.values())
    fixed = [spec for spec in points[0]["controllers"] if spec != "tree"]
    assert all(min(point["controllers"][spec]["of_best_fixed"] for point in points) < 0.97 for spec in fixed)


@pytest.mark.parametrize("path", sorted(TRACES.glob("smollm2-135m-*.npz")), ids=lambda path: path.stem)
def test_a_replay_begins_with_what_the_head_of_its_trace_said_of_itself(path: Path) -> None:
    trace = Trace.load(path)
    prior = HeadPrior.of(trace.about["acceptance"])
    assert set(prior.beliefs) == {0.0, 0.8}
    assert trace.belief == prior.beliefs[trace.about["params"]["temperature"]] != GENERIC_BELIEF
    assert ngram_trace(trace).belief == GENERIC_BELIEF, "what is counted of a head says nothing of look-ups"
