"""`eesd inspect` as people call it: a table, JSON, one line for mistakes, no torch, and a 70B."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import eesd
from eesd_lite.synth import SynthSettings, write_checkpoint
from models.shapes import find_shape
from tests.tiny import TinySpec, build


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(eesd, ["inspect", *arguments], prog_name="eesd")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "huge"
    write_checkpoint(folder, SynthSettings.of(find_shape("llama-2-70b"), content=False))
    return folder


def test_a_70b_folder_is_shown_in_full_lines(huge: Path) -> None:
    code, out, err = run(str(huge))
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    found = {name.strip(): value.strip() for name, value in lines.items()}
    assert (code, err) == (0, "")
    assert found["family"] == "llama" and found["layers"] == "80" and found["bits"] == "4-bit GPTQ"
    assert found["shape"] == "hidden 8192, intermediate 28672, heads 64, KV heads 8, per head 128, vocabulary 32000"
    assert found["a layer, packed"] == "434 MiB (454590464 bytes), 33.9 GiB together"
    assert found["size"].endswith("in 18 weight files")
    assert found["loads"] == "yes, as far as headers tell"


def test_json_holds_the_same(huge: Path) -> None:
    code, out, _ = run(str(huge), "--json")
    found = json.loads(out)
    assert code == 0 and found["loads"] is True and found["refusals"] == []
    assert found["weights"]["packed_layers"] == [454_590_464] * 80
    assert found["weights"]["group_sizes"] == {"128": 560}


def test_a_folder_that_does_not_load_is_no_error(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", TinySpec(layers=2)).folder
    (folder / "model.safetensors").unlink()
    code, out, err = run(str(folder))
    assert (code, err) == (0, "") and "loads" in out and " no\n" in out and "no weights" in out


def test_a_tokenizer_that_only_its_library_finds_broken_is_found(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", TinySpec(layers=2)).folder
    assert "yes, as far as headers tell" in run(str(folder))[1]
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["model"]["type"] = "Nonsense"
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    code, out, err = run(str(folder))
    assert (code, err) == (0, "") and " no\n" in out and "tokenizer.json is not a readable tokenizer" in out


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "no folder nowhere"),
        ("smollm3", "no folder or recipe named 'smollm3'"),
        ("nobody/nothing-of-this-name", "neither a folder nor in the Hub's cache"),
        ("", "the model's name is empty"),
    ],
)
def test_what_is_not_there_is_one_line(model: str, words: str) -> None:
    code, out, err = run(model)
    assert (code, out) == (1, "") and words in err and len(err.splitlines()) == 1


def test_a_recipe_that_is_not_prepared_is_not_fetched(cache_home: Path) -> None:
    code, _, err = run("smollm2-135m")
    assert code == 1 and err == "eesd inspect: error: smollm2-135m is not prepared yet; run: eesd fetch smollm2-135m\n"


def test_inspecting_imports_no_torch(huge: Path) -> None:
    code = (
        "import sys; from cli.main import eesd\n"
        f"try: eesd(['inspect', {str(huge)!r}], prog_name='eesd')\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr
