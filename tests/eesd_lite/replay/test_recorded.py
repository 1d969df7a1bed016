"""No tuning needed: the recorded traces of docs/benchmarks/traces, replayed. Nothing is timed; seeds are fixed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eesd_lite.acceptance import EDGES, GENERIC
from eesd_lite.replay.compare import ReplaySettings, compare
from eesd_lite.replay.compare_trees import TreeReplaySettings, compare_trees
from eesd_lite.replay.curves import DEFAULT_CURVES
from eesd_lite.replay.prior import acceptance_of
from eesd_lite.replay.trace import Trace
from eesd_lite.replay.tree_trace import TreeTrace
from tests.eesd_lite.replay.made_traces import made

TRACES = Path(__file__).parents[3] / "docs" / "benchmarks" / "traces"
NAMES = ("exit10-greedy", "exit20-greedy", "exit10-sampled", "exit20-sampled")
CURVES = ("memory", "sweep:5", "sweep:10", "sweep:20", "sweep:40", "sweep:80", "sweep:120", "sweep:200", "hidden:40:6")


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


@pytest.mark.parametrize(("layer", "worst"), [(10, 0.85), (20, 0.8)])
def test_trees_of_the_recorded_heads_beat_the_best_chain_behind_long_sweeps(layer: int, worst: float) -> None:
    """0.97 of the best fixed shape is not reached everywhere (docs/controller.md): these are the floors held so far."""
    trace = TreeTrace.load(TRACES / f"smollm2-135m-exit{layer}-trees.npz")
    curves = ("memory", "sweep:40", "gpu:40", "gpu:200")
    points = compare_trees(trace, TreeReplaySettings(controllers=("tree",), curves=curves, seeds=1))["points"]
    shares = [point["controllers"]["tree"] for point in points]
    assert min(share["of_best_fixed"] for share in shares) >= worst
    assert all(share["of_best_chain"] > 1.05 for share in shares[1:]), shares
    assert all(share["of_oracle"] < 1.0 for share in shares)
