"""The subcommands of `eesd` that this folder owns, on tiny models, and their errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.chat import make_command
from cli.main import SUBCOMMANDS, eesd
from eesd_lite.errors import EesdError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(eesd, arguments, prog_name="eesd", catch_exceptions=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.cli.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_listed_command_exists(name: str) -> None:
    assert run(name, "--help").exit_code == 0


def test_version() -> None:
    assert run("--version").output == "eesd-lite, version 0.1.0\n"


def test_fetch_without_a_name_lists_the_recipes() -> None:
    result = run("fetch")
    assert result.exit_code == 0
    assert result.stdout.startswith("smollm2-135m: SmolLM2 135M Instruct, Apache-2.0, download 88.6 MiB")


def test_an_unknown_recipe_is_one_line_and_exit_code_1(cache_home: Path) -> None:
    result = run("fetch", "nothing")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("eesd fetch: error: ") and "smollm2-135m" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_cache_is_listed_and_emptied_by_name(cache_home: Path) -> None:
    assert run("cache", "ls").stderr == f"{cache_home}: empty\n"
    for name, size in (("one", 1024), ("two", 2048)):
        (cache_home / "models" / name).mkdir(parents=True)
        (cache_home / "models" / name / "file").write_bytes(bytes(size))
    result = run("cache", "ls")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["1.00", "KiB", "models", "one"], ["2.00", "KiB", "models", "two"],
    ]  # fmt: skip
    assert result.stderr == f"{cache_home}: 2 entries, 3.00 KiB\n"
    assert run("cache", "rm", "one").stderr == "removed one, 1.00 KiB freed\n"
    assert not (cache_home / "models" / "one").exists() and (cache_home / "models" / "two").exists()
    missing = run("cache", "rm", "one")
    assert missing.exit_code == 1 and "nothing named 'one'" in missing.stderr


def test_quantize_calibrates_on_a_file(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    lines = [{"text": "Hello world " * 200}, {"messages": [{"role": "user", "content": "the quick brown fox " * 100}]}]
    data.write_text("\n".join(map(json.dumps, lines)))
    result = run("quantize", str(model), str(tmp_path / "out"), "--group-size", "32", "--desc-act", "--asym",
                 "--calibration", str(data), "--calibration-rows", "2")  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'out'}\n"), result.stderr
    settings = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert (settings["bits"], settings["group_size"], settings["desc_act"], settings["sym"]) == (4, 32, True, False)


def test_quantize_calibrates_on_text_that_the_model_writes(model: Path) -> None:
    from eesd_lite.calibration import ROW_TOKENS, calibration_ids

    reports = []
    rows = calibration_ids(model, None, rows=3, seed=1, progress=lambda *report: reports.append(report))
    assert [len(row) for row in rows] == [ROW_TOKENS] * 3
    assert rows == calibration_ids(model, None, rows=3, seed=1) != calibration_ids(model, None, rows=3, seed=2)
    assert all(0 <= done <= total == 3 for _, done, total in reports)


def test_quantize_to_nearest_needs_no_calibration_and_the_format_is_the_one_asked_for(
    model: Path, tmp_path: Path
) -> None:
    options = ("--method", "rtn", "--asym", "--format", "gptq")
    assert run("quantize", str(model), str(tmp_path / "out"), *options).exit_code == 0
    settings = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert (settings["sym"], settings["checkpoint_format"]) == (False, "gptq")


@pytest.mark.parametrize("case", ["exists", "no source", "no data", "too little data"])
def test_quantize_refuses_before_it_writes(model: Path, tmp_path: Path, case: str) -> None:
    source, target, options, complaint = str(model), tmp_path / "out", [], ""
    if case == "exists":
        target.mkdir()
        complaint = f"{target} exists already"
    elif case == "no source":
        source, complaint = str(tmp_path / "nowhere"), "nowhere"
    elif case == "no data":
        options, complaint = ["--calibration", str(tmp_path / "none.jsonl")], "none.jsonl: cannot be read"
    else:
        (tmp_path / "few.jsonl").write_text('{"text": "few words"}')
        options, complaint = ["--calibration", str(tmp_path / "few.jsonl")], "too few to calibrate; 512 is the least"
    result = run("quantize", source, str(target), *options)
    assert result.exit_code == 1 and complaint in result.stderr
    assert result.stderr.splitlines()[-1].startswith("eesd quantize: error: ")
    assert not target.exists() or list(target.iterdir()) == []


def test_quantizing_twice_is_refused_before_any_calibration(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    (source / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    # The calibration file does not exist: who looked at it first would complain about that.
    result = run("quantize", str(source), str(tmp_path / "out"), "--calibration", str(tmp_path / "none.jsonl"))
    assert result.exit_code == 1 and f"{source} is quantized already" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("forced", [True, False])
def test_options_of_drafting_reach_the_engine(monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    seen: dict[str, object] = {}

    def from_pretrained(model: str, **options: object) -> object:
        seen.update(options)
        raise EesdError("enough")

    monkeypatch.setattr("eesd_lite.engine.Engine.from_pretrained", from_pretrained)
    arguments = [
        "model",
        "-p",
        "x",
        "--head",
        "file",
        "--quantize",
        "nf4",
        "--draft-vocab",
        "99",
        "--head-bits",
        "8",
        *(["--force-head"] if forced else []),
    ]
    assert CliRunner().invoke(make_command(), arguments, prog_name="eesd-chat").exit_code == 1
    assert (
        seen["force_head"] is forced
        and (seen["draft_vocab"], seen["head_bits"]) == (99, 8)
        and (seen["head"], seen["quantize"]) == ("file", "nf4")
    )


def test_train_estimates_and_then_makes_a_head_that_the_chat_takes(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    options = ["train", str(model), "--exit-layers", "1", "--instant", "--tokens", "2000"]
    only = run(*options, "--estimate")
    assert only.exit_code == 0 and "estimate: text 0 s" in only.stderr and not out.exists()
    result = run(*options, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{out / 'exit-01.safetensors'}  agreement ")
    assert f"eesd-chat {model} --head {out / 'exit-01.safetensors'}" in result.stderr
    assert (out / "exit-01.safetensors").exists()


def test_train_refuses_an_exit_layer_that_the_model_lacks(model: Path, tmp_path: Path) -> None:
    result = run("train", str(model), "--exit-layers", "2", "--out", str(tmp_path / "heads"))
    assert result.exit_code == 1 and "exit layer 2 is not possible; this model allows 1 to 1" in result.stderr
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-model"])
def test_a_model_that_does_not_exist_is_one_line(cache_home: Path, name: str) -> None:
    result = CliRunner().invoke(make_command(), [name, "-p", "x"], prog_name="eesd-chat")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("eesd-chat: error: ") and name in result.stderr
    assert "Traceback" not in result.stderr
