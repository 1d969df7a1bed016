"""Peers: the protocol with their processes, what happens when they are missing or die, the comparison's arithmetic."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from eesd_lite.baselines import accelerate, llama_cpp, peer
from eesd_lite.baselines.child import decode
from eesd_lite.baselines.peer import Peer, PeerMissing, PeerSpec
from eesd_lite.bench.contenders import Run
from eesd_lite.bench.report import baseline_figures
from eesd_lite.errors import EesdError
from eesd_lite.params import SamplingParams
from eesd_lite.prepare import ModelSource
from eesd_lite.progress import no_progress
from tests.eesd_lite.tiny_model import LAYERS, four_bit

PARROT = """
import json, sys
say = lambda value: print(json.dumps(value), flush=True)
say({"ready": {"versions": {"parrot": "1"}, "got": json.loads(sys.argv[2])}})
for line in sys.stdin:
    request = json.loads(line)
    if request["ids"] == [13]:
        sys.exit("RuntimeError: out of seeds")
    ids = request["ids"][: request["max_new_tokens"]] + request["eos"]
    say({"ids": ids, "prefill_seconds": 0.1, "decode_seconds": 0.2, "disk_bytes_per_pass": 5, "peak_rss_bytes": 6})
"""


def spec(**changes: Any) -> PeerSpec:
    return PeerSpec(
        **{
            "name": "parrot",
            "python": sys.executable,
            "settings": {"a": 1},
            "eos": (2,),
            "prompts": 3,
            "max_new_tokens": 4,
        }
        | changes
    )


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "parrot.py"
    script.write_text(PARROT)
    monkeypatch.setattr(peer, "CHILD", script)


def test_a_peer_answers_in_its_own_process_within_both_limits(parrot: None) -> None:
    with Peer(spec()) as running:
        assert running.info["got"] == {"a": 1}
        answer = running.run([7, 8, 9], SamplingParams(max_new_tokens=2))
        assert answer == Run((7, 8, 2), prefill_seconds=0.1, decode_seconds=0.2)
        assert running.run([7] * 9, SamplingParams(max_new_tokens=99, ignore_eos=True)).ids == (7,) * 4
        figures = running.figures()
    assert figures["peak_rss_bytes"] == 6 and figures["disk_bytes_per_pass"] == 5


def test_a_peer_that_dies_is_reported_with_its_last_words(parrot: None) -> None:
    with (
        Peer(spec()) as running,
        pytest.raises(EesdError, match="parrot ended with code 1: RuntimeError: out of seeds"),
    ):
        running.run([13], SamplingParams())


def test_an_interpreter_that_does_not_exist_means_missing_not_failed() -> None:
    with pytest.raises(PeerMissing, match="no/such/python"):
        Peer(spec(python="/no/such/python"))


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed here")
def test_a_peer_that_is_not_installed_says_so_and_names_the_python() -> None:
    with pytest.raises(PeerMissing, match="llama-cpp-python is not installed"):
        Peer(spec(name="llama.cpp", settings={}))


def test_decoding_stops_at_the_limit_or_after_an_end_token() -> None:
    fed: list[list[int]] = []

    def step(ids: list[int]) -> int:
        fed.append(ids)
        return 10 + len(fed)

    assert decode(step, [1, 2], 3, frozenset())["ids"] == [11, 12, 13]
    assert fed == [[1, 2], [11], [12]]
    fed.clear()
    assert decode(step, [1, 2], 9, frozenset({12}))["ids"] == [11, 12]


def test_accelerate_keeps_the_same_layers_on_disk() -> None:
    placed = accelerate.device_map(("device", "disk"))
    assert placed["model.layers.0"] == "cpu" and placed["model.layers.1"] == "disk"
    assert placed["model.embed_tokens"] == placed["lm_head"] == placed["model.norm"] == "cpu"


def test_a_speedup_is_split_into_fewer_bytes_and_the_rest() -> None:
    figures = {"plain_speedup_over_it": 14.0, "sweep_bytes": 700}
    assert accelerate.owed_to_bytes(figures, sweep_bytes=200) == {
        "speedup_owed_to_4bit_bytes": 3.5,
        "speedup_owed_to_the_rest": 4.0,
    }
    assert accelerate.owed_to_bytes(figures, sweep_bytes=0) == {}


def test_a_peer_is_compared_on_the_prompts_that_it_answered() -> None:
    slow, fast = Run((1,) * 11, 0.0, 10.0), Run((1,) * 11, 0.0, 1.0)
    results = {"off": [[fast, slow, slow]], "parrot": [[Run((1, 1, 3), 0.0, 1.0)]]}
    figures = baseline_figures("parrot", results)
    assert figures["prompts"] == 1 and figures["tokens"] == 2
    assert figures["plain_tokens_per_second"]["median"] == 10.0
    assert figures["plain_speedup_over_it"] == 5.0
    assert figures["equal_ids_before_first_difference"] == [2]


def test_llama_cpp_takes_the_named_file_or_the_one_beside_the_model(tmp_path: Path) -> None:
    source = ModelSource(folder=tmp_path, recipe=None, name="m")
    with pytest.raises(PeerMissing, match="--gguf"):
        llama_cpp.find_gguf(None, source, no_progress)
    with pytest.raises(PeerMissing, match="gone.gguf"):
        llama_cpp.find_gguf(tmp_path / "gone.gguf", source, no_progress)
    beside = tmp_path / "model.gguf"
    beside.touch()
    assert llama_cpp.find_gguf(None, source, no_progress) == beside


@pytest.mark.slow
def test_accelerate_really_runs_with_the_layers_on_disk_and_the_copy_is_removed(
    tmp_path: Path, cache_home: Path
) -> None:
    model = four_bit(tmp_path / "model")
    tiers = ("device",) * 2 + ("disk",) * (LAYERS - 2)
    with accelerate.sixteen_bit_copy(model, no_progress) as folder:
        asked = accelerate.peer_spec(folder, tiers=tiers, threads=1, eos=(2,), prompts=1)
        assert asked.facts["sweep_bytes"] == (LAYERS - 2) * 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64)
        with Peer(asked) as running:
            answer = running.run([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
            assert len(answer.ids) == 4 and running.info["layers_on_disk"] == LAYERS - 2
    assert not folder.exists()


@pytest.mark.peers
def test_llama_cpp_really_runs() -> None:
    python, gguf = os.environ.get(llama_cpp.PYTHON_VARIABLE), os.environ.get("EESD_TEST_GGUF")
    if not python or not gguf:
        pytest.skip(f"set {llama_cpp.PYTHON_VARIABLE} and EESD_TEST_GGUF to run llama.cpp")
    asked = llama_cpp.peer_spec(Path(gguf), context=128, threads=1, eos=(2,), prompts=1, max_new_tokens=8)
    with Peer(asked) as running:
        answers = [running.run([1, 50, 60], SamplingParams(ignore_eos=True)) for _ in range(2)]
    assert answers[0].ids == answers[1].ids and len(answers[0].ids) == 8
