"""Help and wrong arguments: fast, because nothing heavy is imported, and exit code 2 for mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.conftest import LIMIT, ROOT, environment

HEAVY = ("torch", "transformers", "numba", "tokenizers", "jinja2", "huggingface_hub", "accelerate")
CODE = f"""
import sys
from eesd_lite.entry import {{program}}
sys.argv = {{arguments!r}}
try:
    {{program}}()
    code = 0
except SystemExit as stop:
    code = stop.code
sys.stderr.write(f"\\n{{{{code}}}} {{{{[name for name in {HEAVY!r} if name in sys.modules]}}}}")
"""


def start(program: str, *arguments: str) -> tuple[int, str, str, str]:
    """Exit code, stdout, stderr, and the heavy modules that were imported, as text."""
    code = CODE.format(program=program, arguments=[program.replace("_", "-"), *arguments])
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT
    )
    errors, _, last = result.stderr.rpartition("\n")
    number, _, modules = last.partition(" ")
    return int(number), result.stdout, errors, modules


@pytest.mark.parametrize("command", [[], ["fetch"], ["quantize"], ["train"], ["bench"], ["eval"], ["cache"]])
def test_help_of_eesd_imports_nothing_heavy(command: list[str]) -> None:
    code, out, errors, modules = start("eesd", *command, "--help")
    assert (code, errors, modules) == (0, "", "[]")
    assert out.startswith(f"Usage: {' '.join(['eesd', *command])} [OPTIONS]")


def test_help_of_eesd_chat_imports_nothing_heavy() -> None:
    code, out, errors, modules = start("eesd_chat", "--help")
    assert (code, errors, modules) == (0, "", "[]")
    assert out.startswith("Usage: eesd-chat [OPTIONS] [MODEL]")


@pytest.mark.parametrize(
    ("program", "arguments", "complaint"),
    [
        ("eesd", ["nothing"], "No such command 'nothing'"),
        ("eesd", ["fetch", "--what"], "No such option '--what'"),
        ("eesd", ["quantize", "src"], "Missing argument 'DST'"),
        ("eesd", ["quantize", "src", "dst", "--bits", "9"], "9 is not in the range"),
        ("eesd", ["train", "model", "--out", "x"], "Missing option '--exit-layers'"),
        ("eesd", ["train", "model", "--exit-layers", "6,x"], "'6,x' is not a list of layers"),
        ("eesd", ["train", "model", "--exit-layers", "6,6"], "each is named once"),
        ("eesd", ["train", "model", "--exit-layers", "6"], "--out DIR"),
        ("eesd", ["train", "m", "--exit-layers=6", "--out=x", "--epochs=1", "--minutes=1"], "exclude each other"),
        ("eesd", ["train", "m", "--exit-layers", "6", "--out", "x", "--data", "/no/such.jsonl"], "does not exist"),
        ("eesd", ["train", "m", "--exit-layers", "6", "--out", "x", "--start", "/no/such/heads"], "does not exist"),
        ("eesd", ["train", "m", "--exit-layers=6", "--out=x", "--start=/", "--instant"], "exclude each other"),
        ("eesd", ["cache", "rm"], "Missing argument 'NAME...'"),
        ("eesd_chat", [], "which model?"),
        ("eesd_chat", ["model", "--what"], "No such option '--what'"),
        ("eesd_chat", ["model", "--device-memory", "much"], "cannot read the size 'much'"),
        ("eesd_chat", ["model", "--device-memory", "1GB", "--resident-layers", "3"], "exclude each other"),
        ("eesd_chat", ["model", "--controller", "clever"], "there is no controller 'clever'"),
        ("eesd_chat", ["model", "--temperature", "-1"], "temperature must be from 0"),
        ("eesd_chat", ["model", "--top-p", "0"], "top_p must be above 0"),
        ("eesd_chat", ["model", "--max-new-tokens", "0"], "max_new_tokens must be"),
        ("eesd_chat", ["model", "--stop", ""], "a stop string must be"),
        ("eesd_chat", ["model", "--template", "x"], "is not one of 'plain'"),
        ("eesd_chat", ["model", "--throttle", "0"], "more than 0 bytes a second"),
        ("eesd_chat", ["model", "-p", " "], "the text after -p is empty"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_with_exit_code_2(program: str, arguments: list[str], complaint: str) -> None:
    code, out, errors, modules = start(program, *arguments)
    assert (code, out, modules) == (2, "", "[]")
    assert errors.splitlines()[-1].startswith("Error: ") and complaint in " ".join(errors.split())


def test_a_rate_may_be_written_per_second() -> None:
    from cli.common import Rate

    assert Rate().convert("200MB/s", None, None) == Rate().convert("200MB", None, None) == 200_000_000


@pytest.mark.parametrize("program", ["eesd", "eesd_chat"])
@pytest.mark.parametrize("words", [{}, {"COMP_WORDS": "eesd"}, {"COMP_WORDS": "eesd", "COMP_CWORD": "one"}])
def test_a_stray_request_for_shell_completion_is_one_line(
    program: str, words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {f"_{program.upper()}_COMPLETE": "bash_complete", **words}.items():
        monkeypatch.setenv(name, value)
    code, out, errors, _ = start(program)
    assert (code, out) == (1, "")
    assert errors.startswith(
        f"{program.replace('_', '-')}: error: _{program.upper()}_COMPLETE asks for shell completion"
    )
    assert errors.count("\n") == 1
