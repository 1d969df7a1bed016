"""Named sessions of `eesd-chat`: kept, resumed, locked, damaged, and saved when the program is asked to end."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eesd_lite.text import TextCodec
from tests.cli.conftest import LIMIT, ROOT, Scripted
from tests.cli.terminal import CTRL_D, Terminal

Make = Callable[..., Scripted]
Start = Callable[..., Terminal]


def session(chat: Scripted, name: str = "work") -> dict[str, Any]:
    return json.loads((chat.folder / "home" / "sessions" / f"{name}.json").read_text(encoding="utf-8"))


def test_a_session_is_readable_json_and_goes_on(scripted: Make) -> None:
    chat = scripted(answers=["one", "two"])
    first = chat.run("-p", "Hello \u65e5\u672c", "--session", "work", "--system", "Be brief.", "--top-k", "9")
    assert (first.returncode, first.stdout) == (0, "one\n")
    path = chat.folder / "home" / "sessions" / "work.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "Hello \u65e5\u672c" in path.read_text(encoding="utf-8")
    saved = session(chat)
    assert saved["system"] == "Be brief." and saved["settings"] == {"top_k": 9}
    second = chat.run("-p", "More?", "--session", "work")
    assert "session 'work' goes on after 1 turn; " in second.stderr
    one, two = chat.turns()
    have = one["prompt"] + one["emitted"]
    assert two["prompt"][: len(have)] == have and two["params"]["top_k"] == 9
    assert len(session(chat)["turns"]) == 2
    third = chat.run("-p", "x", "--session", "work", "--top-k", "3", "--system", "Be long.")
    assert chat.turns()[2]["params"]["top_k"] == 3, "what is typed now comes before what was kept"
    assert TextCodec.from_folder(chat.folder).decode(chat.turns()[2]["prompt"]).startswith("system\nBe long.")
    assert third.returncode == 0


def test_a_session_knows_its_model(scripted: Make) -> None:
    chat = scripted(answers=["one"])
    chat.run("-p", "Hello", "--session", "work")
    command = [*chat.command, "--session", "work", "-p", "More?"]
    result = subprocess.run(
        command, cwd=ROOT, env=chat.environment(), capture_output=True, text=True, timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "one\n")
    assert len(session(chat)["turns"]) == 2


@pytest.mark.parametrize("turns", [1, 3])
def test_bos_comes_once_however_many_turns_there_are(scripted: Make, turns: int) -> None:
    from tests.eesd_lite.tiny_tokenizers import CHATML, byte_level

    chat = scripted()
    byte_level(chat.folder, CHATML, add_bos=True)
    for _ in range(turns):
        chat.run("-p", "Hello", "--session", "work")
    prompt = chat.turns()[-1]["prompt"]
    assert prompt[0] == 0 and prompt.count(0) == 1


def test_answers_are_encoded_anew_for_another_tokenizer(scripted: Make) -> None:
    from tests.eesd_lite.tiny_tokenizers import sentencepiece

    chat = scripted(answers=["one two"])
    chat.run("-p", "Hello", "--session", "work")
    sentencepiece(chat.folder)
    result = chat.run("-p", "More?", "--session", "work")
    assert "it was held with another tokenizer (model): answers are encoded and read anew" in result.stderr
    codec = TextCodec.from_folder(chat.folder)
    chat_so_far = [("user", "Hello"), ("assistant", "one two"), ("user", "More?")]
    assert chat.turns()[1]["prompt"] == codec.render_chat([{"role": r, "content": c} for r, c in chat_so_far])


def test_a_session_is_held_by_one_program_at_a_time(start: Start, scripted: Make) -> None:
    terminal = start("--session", "work")
    terminal.prompt()
    result = terminal.scripted.run("-p", "x", "--session", "work")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "eesd-chat: error: session 'work' is open in another eesd-chat; leave that one first"
    )
    terminal.send(CTRL_D)
    assert terminal.end() == 0
    assert terminal.scripted.run("-p", "x", "--session", "work").returncode == 0


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "x" * 65])
def test_a_name_that_leaves_the_folder_is_refused(scripted: Make, name: str) -> None:
    result = scripted().run("-p", "x", "--session", name)
    assert result.returncode == 1 and "a session's name is up to 64 letters" in result.stderr


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '{"format": "eesd-lite conversation 1"}', "\u0000", "[" * 5000,
     '{"format": "eesd-lite conversation 1", "turns": [{"question": "x"}]}',
     '{"format": "eesd-lite conversation 1", "turns": [{"question": "x", "answer": "y", "ids": [-1]}]}'],
)  # fmt: skip
def test_a_damaged_session_is_one_line_and_is_left_alone(scripted: Make, content: str) -> None:
    chat = scripted()
    path = chat.folder / "home" / "sessions" / "work.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    result = chat.run("-p", "x", "--session", "work")
    assert result.returncode == 1 and path.read_text() == content
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"eesd-chat: error: {path}: ") and "Traceback" not in result.stderr


def test_settings_in_a_session_that_are_not_right_are_left_out(scripted: Make) -> None:
    chat = scripted()
    chat.run("-p", "x", "--session", "work")
    saved = session(chat) | {"settings": {"temperature": "hot", "top_k": 5, "nothing": 1, "controller": 3}}
    (chat.folder / "home" / "sessions" / "work.json").write_text(json.dumps(saved))
    assert chat.run("-p", "x", "--session", "work").returncode == 0
    params = chat.turns()[1]["params"]
    assert (params["temperature"], params["top_k"]) == (0.7, 5)


def test_a_context_that_lost_turns_keeps_them_in_the_file(scripted: Make) -> None:
    chat = scripted(answers=["one two three"], context=64)
    notices = 0
    for n in range(5):
        notices += chat.run("-p", f"question {n}", "--session", "work").stderr.count("is full")
    saved = session(chat)
    assert len(saved["turns"]) == 5 and saved["forgotten"] > 0
    assert notices == 1, "a new run knows that it was said"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["prompt", "answer", "loading"])
def test_a_program_that_is_asked_to_end_saves_the_session(start: Start, moment: str, number: signal.Signals) -> None:
    slow = {"load_seconds": 20.0} if moment == "loading" else {"token_seconds": 0.2}
    terminal = start("--session", "work", answers=["one two three four five six seven"], **slow)
    if moment != "loading":
        terminal.prompt()
    if moment == "answer":
        terminal.send("count\r")
    terminal.expect("loading layer" if moment == "loading" else "one" if moment == "answer" else "")
    time.sleep(0.3)
    terminal.process.kill(number)
    assert terminal.end() == 128 + number
    output = terminal.lines()
    assert not any("Traceback" in line for line in output)
    if moment == "loading":
        return
    assert any("session 'work' is saved" in line for line in output)
    turns = session(terminal.scripted)["turns"]
    if moment == "answer":
        assert turns[0]["ids"] == terminal.scripted.turns()[0]["emitted"][: len(turns[0]["ids"])] != []
    assert terminal.scripted.closed()


def test_a_piped_chat_that_is_asked_to_end_says_what_it_had(scripted: Make) -> None:
    chat = scripted(answers=["one two three four five six seven"], token_seconds=0.3)
    process = subprocess.Popen(
        [*chat.command, "model", "-p", "x", "--session", "work", "--json"], cwd=ROOT, text=True,
        env=chat.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    time.sleep(2.5)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 143 and "Traceback" not in errors
    if out:  # on a busy machine the signal may come before the answer
        report = json.loads(out)
        assert report["finish_reason"] == "interrupted" and session(chat)["turns"][0]["ids"] == report["ids"]


def test_a_folder_that_cannot_be_written_is_one_line(scripted: Make, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        blocked = tmp_path / "file"
        blocked.write_text("in the way")
    else:
        blocked = tmp_path / "locked"
        blocked.mkdir(mode=0o500)
    result = scripted().run("-p", "x", "--session", "work", env={"EESD_HOME": str(blocked)})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("eesd-chat: error: cannot keep sessions in ")
