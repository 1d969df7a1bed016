"""The benchmark on real engines: a tiny model always, the demo model where it is prepared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eesd_lite.bench.run import all_identical, run_bench
from eesd_lite.bench.settings import BenchSettings, Throttle
from eesd_lite.engine import Engine
from eesd_lite.params import SamplingParams
from tests.eesd_lite.tiny_model import four_bit

CONTROLLERS = ("fixed:1", "fixed:4", "hf", "calibrated")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return four_bit(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def budget(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Just enough to draft at layer 2: every further layer is on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EESD_HOME", str(tmp_path_factory.mktemp("home")))
        engine = Engine.from_pretrained(tiny, exit_layer=2, head="random", resident_layers=2, context=256)
        engine.close()
    return engine.plan.total_bytes


def bench(model: Path, *, tokens: int, temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=7, ignore_eos=True)
    options = {"repeat": 1, "warmup_tokens": 2, "own_process_memory": False, **changes}
    report = run_bench(BenchSettings(model=str(model), params=params, **options))
    json.dumps(report, allow_nan=False)
    return report


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("placement", ["resident", "split", "memory"])
def test_every_controller_says_what_plain_decoding_says(
    tiny: Path, budget: int, cache_home: Path, placement: str, temperature: float
) -> None:
    chosen = {"resident": {}, "split": {"resident_layers": 2}, "memory": {"device_memory": budget}}[placement]
    report = bench(
        tiny,
        tokens=24,
        temperature=temperature,
        exit_layer=2,
        head="random",
        controllers=CONTROLLERS,
        limit_prompts=2,
        **chosen,
    )
    assert all_identical(report)
    for name, figures in report["controllers"].items():
        assert figures["tokens_compared"] == 2 * 24, name
        assert figures["draft_offloaded_bytes"] == 0, name
        assert figures["accepted"] + figures["rounds"] - figures["cut"] == 2 * 23, name
    assert report["controllers"]["fixed:4"]["drafted"] > 0
    if placement != "resident":
        plain = report["controllers"]["off"]
        assert plain["verify_offloaded_bytes"] == plain["rounds"] * report["plans"]["plain"]["sweep_bytes"] > 0
        assert report["disk"]["raw_bytes_per_second"]["median"] > 0


def test_with_the_same_memory_plain_decoding_keeps_more_layers(tiny: Path, budget: int, cache_home: Path) -> None:
    report = bench(
        tiny, tokens=8, exit_layer=2, head="random", controllers=("fixed:2",), limit_prompts=1, device_memory=budget
    )
    plain, drafting = report["plans"]["plain"], report["plans"]["drafting"]
    assert plain["exit_layer"] is None and drafting["exit_layer"] == 2
    assert plain["resident_layers"] > drafting["resident_layers"]
    assert max(plain["total_bytes"], drafting["total_bytes"]) <= budget


def test_a_calibrated_throttle_is_in_the_report_and_labelled_simulated(tiny: Path, cache_home: Path) -> None:
    report = bench(
        tiny,
        tokens=16,
        exit_layer=2,
        head="random",
        controllers=("fixed:2",),
        limit_prompts=1,
        resident_layers=2,
        throttle=Throttle(draft_steps_per_sweep=2.0),
    )
    throttle, sweep = report["throttle"], report["plans"]["plain"]["sweep_bytes"]
    assert throttle["simulated"] is True
    assert sweep / throttle["bytes_per_second"] == pytest.approx(2.0 * throttle["draft_step_seconds"])


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(tiny: Path, cache_home: Path) -> None:
    report = bench(tiny, tokens=4, controllers=(), limit_prompts=1, own_process_memory=True)
    plain = report["controllers"]["off"]
    assert plain["peak_rss_bytes"] > plain["start_rss_bytes"] > 0


@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("exit_layer", [10, 20])
def test_the_demo_model_says_the_same_with_every_controller_resident_and_from_disk(
    demo_model: Path, exit_layer: int, temperature: float
) -> None:
    for placement in ({}, {"resident_layers": exit_layer}):
        report = bench(
            demo_model,
            tokens=32,
            temperature=temperature,
            exit_layer=exit_layer,
            controllers=("fixed:4", "calibrated"),
            limit_prompts=3,
            **placement,
        )
        assert all_identical(report), report["controllers"]
        assert report["controllers"]["fixed:4"]["accepted"] > 0
