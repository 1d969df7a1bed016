"""Where `eesd-chat` gets its settings from, in which order, and what it says about mistakes; shell completion."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.chat import make_command
from tests.cli.conftest import LIMIT, ROOT, Scripted

Make = Callable[..., Scripted]
DOCS = ROOT / "docs" / "chat.md"


def configured(chat: Scripted, text: str) -> dict[str, str]:
    """Write a configuration file; the environment that finds it."""
    path = chat.folder / "config" / "eesd-lite" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return {"XDG_CONFIG_HOME": str(chat.folder / "config")}


def params(chat: Scripted) -> dict[str, Any]:
    return chat.turns()[-1]["params"]


def test_command_line_then_variable_then_session_then_model_then_file_then_default(scripted: Make) -> None:
    chat = scripted()
    env = configured(
        chat, 'top-k = 1\ntop-p = 0.1\nseed = 1\nmax-new-tokens = 11\nrepetition-penalty = 1.1\n'
        '[models.model]\ntop-k = 2\ntop-p = 0.2\nseed = 2\nmax-new-tokens = 12\n[models.other]\ntemperature = 0\n'
    )  # fmt: skip
    chat.run("-p", "x", "--session", "s", "--top-k", "3", "--top-p", "0.3", "--seed", "3")
    env |= {"EESD_CHAT_TOP_K": "4", "EESD_CHAT_TOP_P": "0.4"}
    result = chat.run("-p", "x", "--session", "s", "--top-k", "5", env=env)
    assert result.returncode == 0, result.stderr
    assert params(chat) == {
        "top_k": 5, "top_p": 0.4, "seed": 3, "max_new_tokens": 12, "repetition_penalty": 1.1, "temperature": 0.7,
        "stop": [], "ignore_eos": False,
    }  # fmt: skip


def test_the_file_may_name_the_model_and_a_list_of_stops(scripted: Make) -> None:
    chat = scripted(answers=["one two three"])
    env = configured(chat, 'model = "mine"\nstop = ["thr", "END"]\nsystem = "Be brief."\nplain = true\n')
    command = [*chat.command, "-p", "x"]
    result = subprocess.run(
        command, cwd=ROOT, env=chat.environment(**env), capture_output=True, text=True, timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "one two \n"), result.stderr
    assert "loading mine" in result.stderr and params(chat)["stop"] == ["thr", "END"]


def test_what_is_typed_replaces_its_opposite_in_the_file(scripted: Make) -> None:
    chat = scripted()
    env = configured(chat, "resident-layers = 3\n")
    assert chat.run("-p", "x", "--device-memory", "1GB", env=env).returncode == 0
    assert "exclude" in chat.run("-p", "x", "--device-memory", "1GB", "--resident-layers", "3", env=env).stderr


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("temprature = 1\n", "there is no option 'temprature'; did you mean temperature?"),
        ("prompt = 'x'\n", "there is no option 'prompt'"),
        ("[models.other]\nseeds = 1\n", "models.other: there is no option 'seeds'; did you mean seed?"),
        ("temperature = 'hot'\n", "temperature: 'hot' is not a valid float"),
        ("temperature = -1\n", "temperature must be from 0"),
        ("seed = true\n", "seed must have a value, not True"),
        ("json = 3\n", "json must be true or false, not 3"),
        ("controller = 'clever'\n", "there is no controller 'clever'"),
        ("device-memory = 'much'\n", "cannot read the size 'much'"),
        ("stop = 3\n", "stop"),
        ("models = 3\n", "holds one section per model"),
        ("x = = 3\n", "is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(scripted: Make, text: str, complaint: str) -> None:
    chat = scripted()
    result = chat.run("-p", "x", env=configured(chat, text))
    last = " ".join(result.stderr[result.stderr.index("Error: ") :].split())
    assert result.returncode == 2 and complaint in last and "Traceback" not in result.stderr
    assert "config.toml" in last or "temperature must be" in last


def test_a_named_file_has_to_exist(scripted: Make, tmp_path: Path) -> None:
    chat = scripted()
    missing = tmp_path / "none.toml"
    result = chat.run("-p", "x", env={"EESD_CONFIG": str(missing)})
    assert result.returncode == 2 and f"EESD_CONFIG names {missing}" in " ".join(result.stderr.split())
    missing.write_text("seed = 8\n")
    assert chat.run("-p", "x", env={"EESD_CONFIG": str(missing)}).returncode == 0 and params(chat)["seed"] == 8


def test_help_says_the_order_of_precedence(scripted: Make) -> None:
    text = " ".join(scripted().run("--help").stdout.split())
    places = [text.index(part) for part in ("command line comes first", "variable EESD_CHAT_", "--session has kept",
                                            "model's section in", "rest of that file", "defaults")]  # fmt: skip
    assert places == sorted(places)


def test_without_a_model_those_there_are_are_listed(scripted: Make, tmp_path: Path) -> None:
    chat = scripted()
    for name, content in (("gptq", '{"quantization_config": {}}'), ("plain", "{}"), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    snapshot = tmp_path / "hub" / "models--some--model-GPTQ" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "quantize_config.json").write_text("{}")
    env = chat.environment(HF_HUB_CACHE=str(tmp_path / "hub"), PYTHONPATH=str(ROOT))
    result = subprocess.run(chat.command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert (result.returncode, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert lines[0] == "models:" and lines[-1] == "Error: which model?"
    assert any("smollm2-135m" in line and "to download" in line for line in lines)
    assert any(line.split()[0] == "some/model-GPTQ" for line in lines[1:4])
    assert any(line.split()[0] == "./gptq" for line in lines[1:4])
    assert not any("./plain" in line or "./broken" in line for line in lines)
    assert any(line.endswith("eesd-chat smollm2-135m") for line in lines)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("smol", "smollm2-135m"), ("--contr", "--controller"), ("m --controller be", "beta"), ("m --session wo", "work")],
)
def test_the_shell_completes(scripted: Make, typed: str, offered: str) -> None:
    chat = scripted()
    chat.run("-p", "x", "--session", "work")
    words = ["eesd-chat", *typed.split()]
    env = {"_EESD_CHAT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    result = subprocess.run(
        chat.command, cwd=ROOT, env=chat.environment(**env), capture_output=True, text=True, timeout=LIMIT
    )
    assert f"plain,{offered}" in result.stdout.splitlines(), result


def documented(pattern: str) -> set[str]:
    return set(re.findall(pattern, DOCS.read_text(encoding="utf-8")))


def test_the_documented_options_are_the_parsers() -> None:
    options = {name for p in make_command().params for name in p.opts if name.startswith("--")}
    in_table = documented(r"(?m)^\| `(--[a-z-]+)")
    assert in_table == options - {"--help"}
    assert documented(r"(?<![\w-])--[a-z][a-z-]+") - options - {"--help", "--columns", "--rows"} == set()


def test_the_documented_commands_are_those_of_the_chat() -> None:
    from cli.commands import COMMANDS

    assert documented(r"(?m)^\| `(/[a-z-]+)") == set(COMMANDS)


def test_the_documented_settings_are_those_that_can_be_set() -> None:
    from cli.chat_settings import SETTABLE

    line = next(line for line in DOCS.read_text(encoding="utf-8").splitlines() if "settings are" in line)
    assert set(re.findall(r"`(\w+)`", line)) == set(SETTABLE)


def test_every_situation_in_the_table_names_tests_that_exist() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (D\d+) \| .* \| (.+) \|$", text)
    assert [name for name, _ in rows] == [f"D{n}" for n in (*range(1, 8), *range(9, 19))]
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    for situation, tests in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named, situation
        for file, test in named:
            assert f"def {test}(" in sources[file], f"{situation}: {file} has no {test}"


def test_the_pictures_are_there_and_small() -> None:
    pictures = documented(r"\]\((pictures/[\w.-]+)\)")
    assert pictures and all((DOCS.parent / name).stat().st_size < 300_000 for name in pictures)
    assert {p.name for p in (DOCS.parent / "pictures").iterdir()} == {os.path.basename(name) for name in pictures}
