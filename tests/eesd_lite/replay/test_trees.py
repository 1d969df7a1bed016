"""Trees in replay: counts by hand, the engine's own growth, an oracle that nobody beats, files, and recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eesd_lite import SamplingParams
from eesd_lite.controller import any_controller
from eesd_lite.controllers_tree import FixedTree, ThompsonTree
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError, TraceError
from eesd_lite.replay.compare_trees import TreeReplaySettings, compare_trees
from eesd_lite.replay.player import Played
from eesd_lite.replay.record_trees import record_trees, recorded
from eesd_lite.replay.trace import Trace
from eesd_lite.replay.tree_curves import TREE_CURVES, by_rows, make_tree_curve
from eesd_lite.replay.tree_player import play_trees, regrow, tree_oracle
from eesd_lite.replay.tree_trace import RecordedTree, TreeTrace
from tests.eesd_lite.fake_trees import FakeHead
from tests.eesd_lite.replay.made_traces import made
from tests.eesd_lite.replay.made_trees import BY_HAND, ROWS, Watched, by_hand, drawn_trees, grown
from tests.puppets import at_random, drafting, ids_of, plain_ids
from tests.tiny import TinySpec

EngineOf = Callable[..., Engine]
MEMORY = make_tree_curve("memory", ROWS)


def test_a_tree_is_regrown_as_by_hand() -> None:
    draft = regrow(BY_HAND, FixedTree(3), limit=64, depth=9)
    # 0.6 and 0.3 come first; then 0.6 * 0.5 = 0.3 is ahead of 0.3 * 0.4 and of 0.1.
    assert draft.nodes == (1, 2, 3)
    assert draft.accepted == 1, "node 2 is right; node 4 below it did not join"
    assert draft.lessons[0] == ((0.6, False), (0.3, True), (0.1, False))
    assert regrow(BY_HAND, FixedTree(4), limit=64, depth=9).accepted == 2
    assert regrow(BY_HAND, FixedTree(4), limit=64, depth=1).nodes == (1, 2, 5), "one level, unjoined ones included"
    assert regrow(BY_HAND, FixedTree(4), limit=64, depth=0).groups == ()


def test_a_fixed_tree_is_counted_as_by_hand() -> None:
    played = play_trees(by_hand(), MEMORY, lambda seed, costs: FixedTree(4))
    # The first round keeps two and their bonus: all three tokens after the first.
    groups = regrow(BY_HAND, FixedTree(4), limit=64, depth=9).groups
    assert sum(joined for _, joined in groups) == 4
    assert (played.tokens, played.rounds, played.drafted, played.accepted) == (3, 1, 4, 2)
    assert played.seconds == pytest.approx(MEMORY.seconds(groups))


def test_a_rounds_seconds_by_hand() -> None:
    # The current token, two groups: asked 1, joined 2; asked 2, joined 1; verify of four rows.
    seconds = 0.25 + (0.75 + 0.375) + (0.875 + 0.25) + 4.0
    assert MEMORY.seconds([(1, 2), (2, 1)]) == pytest.approx(seconds)
    assert make_tree_curve("sweep:9", ROWS).seconds([(1, 2), (2, 1)]) == pytest.approx(seconds + 5.0)
    assert make_tree_curve("gpu:9", ROWS).seconds([(1, 2), (2, 1)]) == pytest.approx(0.25 + 1.0 + 1.0 + 9.0)
    assert make_tree_curve("cpu:8", ROWS).seconds([(1, 3), (3, 4)]) == pytest.approx(0.25 + 1.25 + 1.625 + 16.0)
    chains = MEMORY.of_chains(2)
    assert chains.draft_seconds == pytest.approx((0.25, 1.25, 2.25)) and chains.seconds[2] == pytest.approx(5.25)


def test_times_between_measured_rows_lie_on_lines_and_never_fall() -> None:
    at = by_rows([1, 2, 4], [3.0, 2.0, 4.0])
    assert [at(rows) for rows in (1, 2, 3, 4, 6)] == [2.0, 2.0, 3.0, 4.0, 6.0]
    assert by_rows([1], [3.0])(9) == 3.0


@pytest.mark.parametrize("name", ["", "oak", "sweep", "sweep:x", "gpu:-1", "memory:2", "hidden:3:4", "cpu:nan"])
def test_an_unknown_curve_lists_the_known_ones(name: str) -> None:
    with pytest.raises(TraceError, match="memory, sweep:S, gpu:S or cpu:S"):
        make_tree_curve(name, ROWS)


@pytest.mark.parametrize("spec", ["tree:1", "tree:5", "tree:16", "tree:64", "tree"])
def test_a_tree_is_regrown_as_the_engine_grows_it(spec: str) -> None:
    """The recorded tree answers for the head as long as a controller stays inside it."""
    head, text, pair = FakeHead(0.8), [1003, 1], [any_controller(spec, 5) for _ in range(2)]
    if spec == "tree":
        for controller in pair:  # knows what nodes cost, and a little about the head
            assert isinstance(controller, ThompsonTree)
            controller.costs.observe(0, 0, 1.0, 1)
            controller.costs.observe(20, 3, 1.6, 3)
    for _ in range(40):
        watched = Watched(64)
        tree = recorded(grown(watched, text, head), watched.groups, [], 10**6)
        ours, engines = pair
        drafted = grown(engines, text, head)
        again = regrow(tree, ours, limit=64, depth=64)  # type: ignore[arg-type]
        assert len(again.nodes) == len(drafted.tree) - 1
        assert sum(joined > 0 for _, joined in again.groups) == drafted.steps
        text.append(head.truth(text))


def test_nobody_beats_the_oracle_and_the_same_seed_replays_the_same() -> None:
    trace = drawn_trees(3)
    for name in ("memory", "gpu:20", "cpu:10"):
        settings = TreeReplaySettings(curves=(name,), seeds=1)
        reports = [compare_trees(trace, settings) for _ in range(2)]
        assert reports[0] == reports[1]
        figures = reports[0]["points"][0]["controllers"]
        assert {"off", "fixed:4", "tree:64", "tree", "calibrated"} <= set(figures)
        assert all(0 < entry["of_oracle"] <= 1.0 for entry in figures.values()), figures
        assert max(entry["of_best_fixed"] for spec, entry in figures.items() if ":" in spec or spec == "off") == 1.0
    played = play_trees(trace, MEMORY, lambda seed, costs: FixedTree(64))
    assert played.tokens == 2 * 29 and played.rounds < 2 * 29, "the test has no teeth"


def test_the_oracle_by_hand() -> None:
    # Two right nodes for 2.25 and a verify of three rows, or three plain rounds of 2.25.
    assert tree_oracle(by_hand(), MEMORY) == Played(
        tokens=3, seconds=pytest.approx(5.25), rounds=1, drafted=2, accepted=2
    )


def test_a_saved_trace_is_loaded_as_it_was_and_damage_is_one_line(tmp_path: Path) -> None:
    trace, path = drawn_trees(4, answers=1, tokens=9), tmp_path / "t.npz"
    trace.save(path)
    loaded = TreeTrace.load(path)
    assert loaded.chains.about == trace.chains.about and len(loaded.trees) == 1
    for ours, theirs in zip(trace.trees[0], loaded.trees[0], strict=True):
        assert (ours.parents, ours.steps, ours.kept) == (theirs.parents, theirs.steps, theirs.kept)
        assert ours.confidences == pytest.approx(theirs.confidences, abs=1e-5)
    assert Trace.load(path).about == trace.chains.about, "chains can be read alone"
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    made([[1, 0]]).save(tmp_path / "chains.npz")
    np.savez(tmp_path / "cut.npz", **{**arrays, "tree_parents": arrays["tree_parents"][:-1]})
    np.savez(tmp_path / "up.npz", **{**arrays, "tree_parents": arrays["tree_parents"] + np.uint8(200)})
    np.savez(tmp_path / "fewer.npz", **{**arrays, "tree_sizes": arrays["tree_sizes"][:-1]})
    for name in ("chains", "cut", "up", "fewer", "missing"):
        with pytest.raises(TraceError, match=f"{name}.npz") as caught:
            TreeTrace.load(tmp_path / f"{name}.npz")
        assert "\n" not in str(caught.value)


def test_a_path_with_gaps_is_refused() -> None:
    with pytest.raises(AssertionError):
        RecordedTree((0, 1), (0.5, 0.5), (1, 2), (False, True))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2}])
def test_what_is_recorded_is_what_the_engine_does(engine_of: EngineOf, sampling: dict[str, Any]) -> None:
    """The engine itself, with any fixed size, has the rounds, nodes and accepted tokens that the trace says."""
    engine = engine_of(TinySpec(layers=5), head="random", exit_layer=2, draft_limit=12)
    params, prompt = SamplingParams(max_new_tokens=16, ignore_eos=True, **sampling), list(b"Tell me more")
    text = prompt + plain_ids(engine, prompt, params)
    proposal = lambda position, _: at_random(position, text, 200)(position, 0)  # noqa: E731  by position alone
    ticks = iter(range(10**6))
    for puppet in (True, False):
        if puppet:
            with drafting(engine, proposal, confidence=0.75):
                _engine_agrees(engine, prompt, params, text, lambda: float(next(ticks)), least=3)
        else:
            _engine_agrees(engine, prompt, params, text, lambda: float(next(ticks)), least=0)


def _engine_agrees(
    engine: Engine, prompt: list[int], params: SamplingParams, text: list[int], clock: Callable[[], float], least: int
) -> None:
    trace = record_trees(engine, [prompt], params, nodes=12, clock=clock)
    assert trace.chains.answers[0].answer == tuple(text[len(prompt) :]) and trace.nodes == 12
    assert set(trace.chains.about["trees"]["seconds"]["verify"]) == {1.0}
    assert sum(tree.accepted for tree in trace.trees[0]) >= least
    spec = engine.controller_spec
    for nodes in (1, 4, 12):
        engine.set_controller(f"tree:{nodes}")
        before = engine.stats.snapshot()
        ids_of(engine, prompt, params)
        done = engine.stats.since(before)
        played = play_trees(trace, MEMORY, lambda seed, costs, nodes=nodes: FixedTree(nodes))  # type: ignore[misc]
        assert (played.rounds, played.accepted, played.drafted) == (done.rounds, done.accepted, done.drafted)
    engine.set_controller(spec)


def test_what_cannot_be_recorded_is_an_error(engine_of: EngineOf) -> None:
    with pytest.raises(EesdError, match="needs an exit head"):
        record_trees(engine_of(TinySpec()), [[1]], SamplingParams(max_new_tokens=3))
    engine = engine_of(TinySpec(layers=5), head="random", exit_layer=2, draft_limit=6)
    with pytest.raises(EesdError, match="trees of 7 nodes"):
        record_trees(engine, [[1]], SamplingParams(max_new_tokens=3), nodes=7)


def test_the_default_curves_span_from_memory_to_a_sweep_of_200_draft_steps() -> None:
    assert TREE_CURVES[0] == "memory" and {"sweep:5", "sweep:200", "gpu:40", "cpu:10"} <= set(TREE_CURVES)
