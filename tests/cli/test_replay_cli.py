"""`eesd trace` and `eesd replay` as programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import eesd
from tests.eesd_lite.replay.made_traces import drawn
from tests.eesd_lite.replay.made_trees import drawn_trees


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    drawn(2, answers=3, tokens=40).save(tmp_path / "t.npz")
    return tmp_path / "t.npz"


def test_replay_prints_a_table_and_the_same_json_every_time(trace: Path) -> None:
    command = ["replay", str(trace), "--costs", "memory,sweep:40", "--controllers", "calibrated,fixed:2"]
    first, second = (CliRunner().invoke(eesd, command, prog_name="eesd") for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == second.stdout and len(first.stdout.splitlines()) == 1
    assert "sweep:40" in first.stderr and "calibrated/oracle" in first.stderr
    report = json.loads(first.stdout)
    assert [point["curve"] for point in report["points"]] == ["memory", "sweep:40"]
    figures = report["points"][0]["controllers"]
    assert set(figures) == {"off", "fixed:1", "fixed:2", "fixed:3", "fixed:4", "calibrated"}
    assert max(figures[name]["of_best_fixed"] for name in figures if name != "calibrated") == 1.0
    assert all(entry["of_oracle"] <= 1.0 for entry in figures.values())


def test_json_alone_leaves_stderr_empty(trace: Path) -> None:
    result = CliRunner().invoke(eesd, ["replay", str(trace), "--json", "--costs", "sweep:5", "--seeds", "1"])
    assert result.exit_code == 0 and result.stderr == ""
    assert json.loads(result.stdout)["trace"]["positions"] == 3 * 39


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--costs", "link:4"], "sweep:S"),
        (["--controllers", "sometimes"], "calibrated, beta"),
    ],
)
def test_wrong_names_are_one_line(trace: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(eesd, ["replay", str(trace), *arguments], prog_name="eesd")
    assert result.exit_code == 1 and result.stdout == ""
    assert says in result.stderr.splitlines()[-1]


def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_text("no")
    for name in ("x.npz", "missing.npz"):
        result = CliRunner().invoke(eesd, ["replay", str(tmp_path / name), "--json"], prog_name="eesd")
        assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1 and name in result.stderr


def test_recording_for_a_model_that_does_not_exist_is_one_line(tmp_path: Path, cache_home: Path) -> None:
    command = ["trace", "./no-such-folder", "--out", str(tmp_path / "t.npz")]
    result = CliRunner().invoke(eesd, command, prog_name="eesd")
    assert result.exit_code == 1 and "no-such-folder" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "t.npz").exists()


def test_a_folder_that_does_not_exist_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    command = ["trace", "./no-such-model", "--out", str(tmp_path / "nowhere" / "t.npz")]
    result = CliRunner().invoke(eesd, command, prog_name="eesd")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1 and "nowhere" in result.stderr


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    drawn_trees(2, answers=1, tokens=12, nodes=8).save(tmp_path / "trees.npz")
    return tmp_path / "trees.npz"


def test_a_trace_of_trees_is_shown_with_trees_and_chains(trees: Path) -> None:
    command = ["replay", str(trees), "--costs", "memory,gpu:40", "--seeds", "1"]
    result = CliRunner().invoke(eesd, command, prog_name="eesd")
    assert result.exit_code == 0, result.stderr
    assert "best chain" in result.stderr and "gpu:40" in result.stderr and "tree/oracle" in result.stderr
    report = json.loads(result.stdout)
    assert {"tree", "calibrated", "tree:8", "fixed:4"} <= set(report["points"][1]["controllers"])
    chains = CliRunner().invoke(eesd, ["replay", str(trees), "--json", "--drafter", "ngram", "--costs", "sweep:5"])
    assert "best_fixed" in json.loads(chains.stdout)["points"][0]


def test_true_scale_is_called_simulated_and_states_what_it_assumes(trees: Path) -> None:
    command = ["replay", str(trees), "--scale", "llama-2-70b@24gb", "--seeds", "1"]
    result = CliRunner().invoke(eesd, command, prog_name="eesd")
    assert result.exit_code == 0, result.stderr
    assert "SIMULATED, llama-2-70b@24gb" in result.stderr and "public, not run here: 8.6 tokens/s" in result.stderr
    report = json.loads(result.stdout)
    assumed = report["assumptions"]
    assert report["simulated"] and (assumed["exit_layer"], assumed["layers"]) == (40, 80), "half the depth, as recorded"
    assert assumed["sweep_seconds"] == pytest.approx(assumed["offloaded_bytes"] / 25e9, abs=1e-4)
    faster = CliRunner().invoke(eesd, [*command, "--link-rate", "50GB", "--json"], prog_name="eesd")
    assert json.loads(faster.stdout)["assumptions"]["sweep_seconds"] == pytest.approx(
        assumed["sweep_seconds"] / 2, 1e-3
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scale", "llama-2-70b"], "SHAPE@PRESET"),
        (["--scale", "llama-2-70b@9gb"], "8gb, 12gb"),
        (["--scale", "oak@8gb"], "oak"),
        (["--scale", "llama-2-70b@8gb"], "does not fit"),
        (["--scale", "llama-2-13b@8gb", "--costs", "memory"], "leave out --costs"),
        (["--link-rate", "5GB"], "go with --scale"),
        (["--costs", "hidden:4:2"], "gpu:S"),
    ],
)
def test_wrong_scales_are_one_line(trees: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(eesd, ["replay", str(trees), "--json", *arguments], prog_name="eesd")
    assert result.exit_code != 0 and result.stdout == "" and says in result.stderr.splitlines()[-1]


def test_a_scale_needs_trees(trace: Path) -> None:
    result = CliRunner().invoke(eesd, ["replay", str(trace), "--scale", "llama-2-13b@8gb"], prog_name="eesd")
    assert result.exit_code == 2 and "eesd trace --trees" in result.stderr


def test_options_of_trees_go_with_trees(tmp_path: Path) -> None:
    for extra in (["--nodes", "8"], ["--trees", "--draft-limit", "4"]):
        result = CliRunner().invoke(eesd, ["trace", "./none", "--out", str(tmp_path / "t.npz"), *extra])
        assert result.exit_code == 2 and "--trees" in result.stderr
