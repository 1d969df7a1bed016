"""`eesd bench offload` on a tiny model under a real limit, what is said of a contender that fails, and the report."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.main import eesd
from eesd_lite.baselines import peer as peer_module
from eesd_lite.baselines.peer import Peer, PeerSpec
from eesd_lite.bench.limits import memory_group
from eesd_lite.bench.offload import plots
from eesd_lite.bench.offload import run as run_module
from eesd_lite.bench.offload.report import markdown
from eesd_lite.bench.offload.run import run_offload
from eesd_lite.bench.offload.settings import OffloadSettings, parse_rate
from eesd_lite.errors import EesdError
from eesd_lite.params import SamplingParams
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=6)
MEMORY = 64 << 20
SOURCES = ("exit 2", "ngram", "exit 2 and n-grams")

GREEDY_FOR_MEMORY = """
import json, sys
say = lambda value: print(json.dumps(value), flush=True)
say({"imported": True})
json.loads(sys.stdin.readline())
say({"ready": {}})
for line in sys.stdin:
    block = bytearray(json.loads(line)["ids"][0] << 20)
    block[::4096] = b"x" * len(block[::4096])
    say({"ids": [1, 2], "prefill_seconds": 0.1, "decode_seconds": 0.2, "disk_bytes_per_pass": 5, "peak_rss_bytes": 6})
"""


@pytest.fixture(scope="module")
def report(tiny_of: Callable[[TinySpec], Tiny], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real run: plain decoding and two controllers; and the same point again as if behind a slower link."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EESD_HOME", str(tmp_path_factory.mktemp("home")))
        found = run_offload(
            OffloadSettings(
                model=str(tiny_of(SPEC).folder), memories=(MEMORY,), exit_layers=(2,), head="random", context=256,
                drafters=("head", "ngram", "both"), draft_vocab=32, controllers=("off", "fixed:2", "calibrated"),
                rates=(None,), threads=1, limit_prompts=2, max_new_tokens=8,
            )
        )  # fmt: skip
    slower = copy.deepcopy(found["points"][0]) | {"link_bytes_per_second": 5e6, "simulated": True}
    return found | {"points": [found["points"][0], slower]}


def test_every_point_has_every_contender_with_the_ids_of_plain_decoding_under_a_real_limit(
    report: dict[str, Any],
) -> None:
    drafting = [f"{who}, {how}" for who in SOURCES for how in ("fixed:2", "calibrated")]
    for point in report["points"]:
        assert list(point["contenders"]) == ["off", *drafting] and not point["skipped"]
        for name, figures in point["contenders"].items():
            assert figures["identical"] is True, name
            assert figures["limit_method"] in ("cgroup v1", "cgroup v2", "rlimit")
            if figures["limit_bytes"] is not None:
                assert 0 < figures["peak_bytes"] <= figures["limit_bytes"]
            assert figures["draft_offloaded_bytes"] == 0 and figures["tokens"] == 16
            assert sum(figures["draft_length_histogram"]) == figures["rounds"]
        drafted = {name: figures["drafted"] for name, figures in point["contenders"].items()}
        assert drafted["exit 2, fixed:2"] > 0 and drafted["exit 2 and n-grams, fixed:2"] > 0 == drafted["off"]


def test_n_grams_take_part_without_an_exit_layer_and_each_once() -> None:
    settings = OffloadSettings(model="x", memories=(MEMORY,), drafters=("ngram", "head", "ngram"))
    assert settings.sources == (("ngram", None),)
    assert replace(settings, exit_layers=(2, 4, 2)).sources == (("ngram", None), ("head", 2), ("head", 4))
    assert replace(settings, controllers=("off",)).sources == ()


def test_a_contender_that_its_limit_kills_is_reported_and_the_reason_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY_FOR_MEMORY)
    monkeypatch.setattr(peer_module, "CHILD", script)
    with ExitStack() as stack:
        group = stack.enter_context(memory_group())
        if group.folder is None:
            pytest.skip("no cgroups here; an rlimit is the child's own doing")
        spec = PeerSpec("greedy", sys.executable, {}, (), 2, 4)
        running = stack.enter_context(Peer(spec, group, MEMORY))
        assert running.run([16], SamplingParams(max_new_tokens=4)).ids == (1, 2)
        with pytest.raises(EesdError, match="greedy ended with code -9: killed by SIGKILL"):
            running.run([256], SamplingParams(max_new_tokens=4))


def test_the_page_shows_every_contender_and_why_one_is_missing(report: dict[str, Any]) -> None:
    changed = copy.deepcopy(report)
    changed["points"][0]["skipped"]["airllm"] = "airllm is not installed"
    changed["points"][1]["contenders"]["exit 2, fixed:2"] = {
        "failed": "killed by SIGKILL", "limit_method": None, "peak_bytes": None,
    }  # fmt: skip
    page = markdown(changed, "eesd bench offload x")
    assert page.count("| off |") == 2 and "* airllm: airllm is not installed" in page
    assert "| exit 2, fixed:2 | failed: killed by SIGKILL |" in page
    assert "MiB, the disk's own rate" in page and "a link of 4.77 MiB/s (simulated)" in page


def test_pictures_are_drawn_from_the_report_alone(report: dict[str, Any], tmp_path: Path) -> None:
    streamed = copy.deepcopy(report)
    for point in streamed["points"]:  # the tiny model fits; a link belongs to one that does not
        point["disk"] = {"raw_bytes_per_second": {"mean": 1e9}}
    drawn = plots.draw(json.loads(json.dumps(streamed)), tmp_path)
    assert [path.name for path in drawn] == ["speedup.png", "controllers.png", "rounds.png", "lengths.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1MiB"], "--memory: give one size or more, each above 12 MiB"),
        (["--memory", "64MiB", "--controllers", "clever"], "there is no controller 'clever'"),
        (["--memory", "64MiB", "--baseline", "vllm"], "unknown baseline 'vllm'"),
        (["--memory", "64MiB", "--link-rates", "0MB/s"], "not a rate above 0"),
        (["--memory", "64MiB", "--exit-layers", "ten"], "'ten' is not a layer number"),
        (["--memory", "64MiB", "--exit-layers", "2", "--controllers", "off"], "without a controller that drafts"),
        (["--memory", "64MiB", "--drafter", "head,tail"], "drafter must be one of head, ngram, both, not 'tail'"),
        (["--memory", "64MiB", "--draft-vocab", "all", "--head-bits", "16"], "set head_bits 8 or 4 with it"),
        (["--memory", "64MiB", "--drafter", ""], "--drafter: name one or more of head, ngram, both"),
        (["--memory", "64MiB", "--drafter", "both"], "--drafter both needs layers to draft at"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_loaded(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(eesd, ["bench", "offload", "nowhere", *arguments], prog_name="eesd")
    assert result.exit_code != 0 and message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(("flag", "goes_on"), [([], True), (["--stop-at-eos"], False)])
def test_answers_go_on_to_the_last_token_unless_they_may_end(
    flag: list[str], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[OffloadSettings] = []

    def record(settings: OffloadSettings, progress: Any) -> dict[str, Any]:
        asked.append(settings)
        return {"points": []}

    monkeypatch.setattr(run_module, "run_offload", record)
    arguments = ["bench", "offload", "model", "--memory", "64MiB", "--drafter", "ngram", "--draft-vocab", "99", *flag]
    assert CliRunner().invoke(eesd, arguments).exit_code == 0
    assert (asked[0].ignore_eos, asked[0].drafters, asked[0].draft_vocab) == (goes_on, ("ngram",), 99)


def test_a_rate_is_the_disks_own_or_a_number() -> None:
    assert parse_rate(" Disk") is None and parse_rate("400MB/s") == 4e8
