"""`eesd synth` as people call it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import eesd


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(eesd, ["synth", *arguments], prog_name="eesd")
    return result.exit_code, result.stdout, result.stderr


def test_a_synthetic_model_is_written_and_its_folder_printed(tmp_path: Path) -> None:
    code, out, _ = run("--shape", "llama-2-70b", "--out", str(tmp_path / "model"), "--headers-only")
    assert (code, out) == (0, f"{tmp_path / 'model'}\n")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 18


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--shape", "llama-9", "--out", "{new}"), 1, "no shape named 'llama-9'; known: smollm2-135m"),
        (("--shape", "llama-2-7b", "--out", "{there}"), 1, "exists already"),
        (("--shape", "llama-2-7b", "--out", "{new}", "--layers", "33"), 1, "llama-2-7b has 32 layers"),
        (("--shape", "llama-2-7b", "--out", "{new}", "--group-size", "100"), 1, "group size 100 does not divide"),
        (("--shape", "llama-2-7b", "--out", "{new}", "--packed", "--headers-only"), 2, "exclude each other"),
        (("--shape", "llama-2-7b"), 2, "Missing option '--out'"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    given = [word.format(new=tmp_path / "new", there=tmp_path) for word in arguments]
    found, out, err = run(*given)
    assert (found, out) == (code, "") and words in err and "Traceback" not in err
    assert not (tmp_path / "new").exists()
