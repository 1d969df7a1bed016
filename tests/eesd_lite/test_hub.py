"""Models from the Hub: what is fetched, and every failure in one line. No network is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from eesd_lite.errors import ModelError, PrepareError
from eesd_lite.hub import looks_like_hub_id, snapshot
from eesd_lite.prepare import resolve_model


class Answer:
    """A stand-in for huggingface_hub.snapshot_download that records its arguments and returns or raises."""

    def __init__(self, outcome: Any) -> None:
        self.outcome, self.options = outcome, {}  # type: ignore[var-annotated]

    def __call__(self, model_id: str, **options: Any) -> str:
        self.options = {"model_id": model_id, **options}
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return str(self.outcome)


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # these want a response object that nothing here looks at
    Exception.__init__(error, "404 Client Error\nmany lines")
    return error


def test_a_hub_name_is_fetched_without_pickles_and_sub_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", answer)
    source = resolve_model("owner/some-model")
    assert (source.folder, source.recipe, source.name) == (tmp_path, None, "owner/some-model")
    assert "*.safetensors" in answer.options["allow_patterns"]
    assert not [pattern for pattern in answer.options["allow_patterns"] if "bin" in pattern or "pt" in pattern]
    assert answer.options["ignore_patterns"] == ["*/*"]


def test_downloaded_bytes_reach_the_progress_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", answer)
    reports: list[tuple[str, int, int]] = []
    snapshot("owner/m", lambda *report: reports.append(report))
    bar = answer.options["tqdm_class"](desc="Downloading bytes", total=10, unit="B")
    bar.update(4)
    bar.total = 20
    bar.update(5)
    assert reports[-2:] == [("downloading owner/m", 4, 10), ("downloading owner/m", 9, 20)]


@pytest.mark.parametrize(
    ("outcome", "error", "complaint"),
    [
        (hub_error(errors.RepositoryNotFoundError), ModelError, "no model 'owner/m' on the Hugging Face Hub"),
        (hub_error(errors.GatedRepoError), ModelError, "owner/m asks for an agreement first"),
        (errors.LocalEntryNotFoundError("x\ny"), PrepareError, "cannot get owner/m .* not in the local Hub cache"),
        (ConnectionError("no route\nto host"), PrepareError, r"check the network, .* \(no route\)"),
        (OSError(28, os.strerror(28)), PrepareError, "disk full"),
    ],
)
def test_every_failure_is_one_line_that_says_what_helps(
    outcome: Exception, error: type[Exception], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Answer(outcome))
    with pytest.raises(error, match=complaint) as caught:
        snapshot("owner/m")
    assert "\n" not in str(caught.value)


def test_offline_with_the_real_library_is_one_line(tmp_path: Path) -> None:
    code = "from eesd_lite.hub import snapshot; snapshot('owner/no-such-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stderr.splitlines()[-1].startswith(
        "eesd_lite.errors.PrepareError: cannot get owner/no-such-model from the Hugging Face Hub"
    )


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("owner/model", True), ("gpt2", True), ("a/b/c", False), ("./x", False), ("/x", False), ("x/model.gguf", False)],
)
def test_a_path_is_not_taken_for_a_hub_name(name: str, is_one: bool) -> None:
    assert looks_like_hub_id(name) is is_one
