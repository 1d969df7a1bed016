"""`eesd bench` and `eesd eval` as programs: what goes to which stream, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.main import eesd
from eesd_lite.bench.run import Field, measure
from eesd_lite.bench.settings import BenchSettings
from eesd_lite.bench.turns import Course
from eesd_lite.progress import no_progress
from tests.eesd_lite.fake_engine import FakeEngine

Bench = Callable[..., tuple[Result, BenchSettings]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command on a fake engine; also returns the settings that it arrived at."""

    def run(*arguments: str, lies: bool = False) -> tuple[Result, BenchSettings]:
        seen: list[BenchSettings] = []

        def says(controller: str, prompt: Any, position: int) -> int:
            return position + (lies and controller == "fixed:4")

        def fake(settings: BenchSettings, progress: Any) -> dict[str, Any]:
            seen.append(settings)
            engine = FakeEngine(says)
            course = Course([[1], [2]], settings.params, settings.repeat, 0)
            report = measure(settings, course, Field(engine, engine, {"plain": {}}), no_progress)
            return {"benchmark": "eesd bench", "model": {"name": settings.model}, **report}

        monkeypatch.setattr("eesd_lite.bench.run.run_bench", fake)
        arguments = ("bench", *arguments, "--no-memory", "--max-new-tokens", "6")
        result = CliRunner().invoke(eesd, arguments, prog_name="eesd")
        return result, (seen or [None])[0]  # type: ignore[return-value]

    return run


def test_the_last_stdout_line_is_one_json_object_and_the_table_is_on_stderr(bench: Bench) -> None:
    result, _ = bench("some-model")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    report = json.loads(result.stdout.splitlines()[-1])
    assert list(report["controllers"]) == ["off", "fixed:4", "calibrated"]
    assert "tokens/s" in result.stderr and "calibrated" in result.stderr


def test_json_alone_leaves_stderr_empty(bench: Bench) -> None:
    result, _ = bench("some-model", "--json")
    assert result.stderr == "" and json.loads(result.stdout)["model"] == {"name": "some-model"}


def test_a_controller_that_differs_from_plain_decoding_is_an_error_with_the_place(bench: Bench) -> None:
    result, _ = bench("some-model", lies=True)
    assert result.exit_code == 1
    assert "fixed:4 differs from plain decoding at prompt 1, token 1" in result.stderr.splitlines()[-1]
    assert json.loads(result.stdout)["controllers"]["fixed:4"]["identical"] is False


def test_options_arrive_as_settings(bench: Bench) -> None:
    _, settings = bench(
        *"m --resident-layers 10 --exit-layer 10 --controllers off,beta --throttle sweep=40 --repeat 1".split(),
        *"--limit-prompts 4 --temperature 0.8 --seed 5 --ignore-eos --threads 2 --keep-controllers".split(),
        *"--quantize nf4".split(),
    )
    assert settings.quantize == "nf4"
    assert settings.contenders == ("off", "beta")
    assert (settings.resident_layers, settings.exit_layer, settings.repeat, settings.limit_prompts) == (10, 10, 1, 4)
    assert settings.throttle is not None and settings.throttle.draft_steps_per_sweep == 40
    assert (settings.params.temperature, settings.params.seed, settings.params.ignore_eos) == (0.8, 5, True)
    assert settings.keep_controllers and settings.threads == 2


def test_sizes_and_rates_are_read_as_people_write_them(bench: Bench) -> None:
    _, settings = bench("m", "--device-memory", "192MiB", "--throttle", "800MB/s")
    assert settings.device_memory == 192 << 20
    assert settings.throttle is not None and settings.throttle.bytes_per_second == 8e8


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--controllers", "sometimes"], 1, "sometimes"),
        (["--controllers", ""], 2, "--controllers names nobody; 'off' measures plain decoding alone"),
        (["--controllers", " , "], 2, "--controllers names nobody"),
        (["--baseline", "vllm"], 1, "vllm"),
        (["--device-memory", "1GiB", "--resident-layers", "3"], 1, "exclude each other"),
        (["--baseline", "accelerate", "--throttle", "1GB"], 1, "measure them apart"),
        (["--temperature", "-1"], 1, "temperature"),
        (["--throttle", "fast"], 2, "fast"),
        (["--repeat", "0"], 2, "repeat"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_loaded(
    bench: Bench, arguments: list[str], code: int, says: str
) -> None:
    result, settings = bench("m", *arguments)
    assert result.exit_code == code and settings is None
    assert says in result.stderr.splitlines()[-1] and result.stdout == ""


def test_a_model_that_does_not_exist_is_one_line(cache_home: Path) -> None:
    for command in ("bench", "eval"):
        result = CliRunner().invoke(eesd, [command, "./no-such-folder", "--json"], prog_name="eesd")
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1 and "no-such-folder" in result.stderr


def test_a_bad_prompts_file_is_named_before_the_model_is_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": 1}\n')
    result = CliRunner().invoke(eesd, ["bench", "./no-such-folder", "--prompts", str(path), "--json"], prog_name="eesd")
    assert result.exit_code == 1 and "line 1" in result.stderr


def test_eval_prints_figures_for_people_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        "tokens": 10, "sequences": 2, "perplexity": 12.5, "reference_perplexity": 12.0, "kld": 0.02, "kld_median": 0.01,
        "kld_99": 0.2, "kld_max": 0.5, "agreement": 0.9,
    }  # fmt: skip
    monkeypatch.setattr("eesd_lite.evaluate_folders.evaluate_folders", lambda settings, progress: figures)
    shown = CliRunner().invoke(eesd, ["eval", "m", "--reference", "r"], prog_name="eesd")
    assert shown.exit_code == 0 and "perplexity 12.5" in shown.stderr and "0.020000" in shown.stderr
    assert len(shown.stdout.splitlines()) == 1 and json.loads(shown.stdout) == figures
    raw = CliRunner().invoke(eesd, ["eval", "m", "--json"], prog_name="eesd")
    assert json.loads(raw.stdout) == figures and raw.stderr == ""


def test_an_infinite_divergence_is_still_json(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"tokens": 10, "perplexity": 12.5, "kld": float("inf")}
    monkeypatch.setattr("eesd_lite.evaluate_folders.evaluate_folders", lambda settings, progress: figures)
    raw = CliRunner().invoke(eesd, ["eval", "m", "--json"], prog_name="eesd")
    found = json.loads(raw.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert float(found["kld"]) == float("inf")


def test_exits_may_be_measured_unless_the_throttle_is_a_ratio_of_one_exit(bench: Bench) -> None:
    _, settings = bench("m", "--exit-layer", "AUTO", "--throttle", "20MB")
    assert settings.exit_layer == "auto"
    result, settings = bench("m", "--exit-layer", "auto", "--throttle", "sweep=40")
    assert settings is None and result.exit_code == 1 and "name a rate: 800MB/s" in result.stderr
    result, _ = bench("m", "--exit-layer", "deep")
    assert result.exit_code == 2 and "'deep' is neither auto nor a number of layers from 1 on" in result.stderr
