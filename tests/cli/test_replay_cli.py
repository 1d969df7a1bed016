"""`eesd trace` and `eesd replay` as programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import eesd
from tests.eesd_lite.replay.made_traces import drawn


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
