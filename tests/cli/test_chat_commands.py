"""The slash commands of `eesd-chat` in a pseudo-terminal, completion, history, and what the screen looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands import COMMANDS
from tests.cli.terminal import CTRL_C, CTRL_D, TAB, UP, Terminal, asked

Start = Callable[..., Terminal]


def commands_of(terminal: Terminal) -> Callable[[str], list[str]]:
    """Type a command; the lines that it says."""

    def run(line: str) -> list[str]:
        return [text for text in terminal.ask(line).splitlines()[1:] if text]

    return run


def test_help_lists_every_command_and_unknown_ones_say_the_nearest(start: Start) -> None:
    terminal = start()
    terminal.prompt()
    run = commands_of(terminal)
    shown = run("/help")
    for name, command in COMMANDS.items():
        assert any(line.startswith(name) and line.endswith(command.help) for line in shown), name
    assert run("/stat") == ["no command /stat; did you mean /stats?"]
    assert run("/show-draft") == ["no command /show-draft; did you mean /show-drafts?"]
    assert run("/xyzzy") == ["no command /xyzzy; /help lists them"]
    assert terminal.scripted.turns() == []


def test_a_whole_conversation_looks_like_this(start: Start) -> None:
    answers = ["# Rivers\n\nThe **Danube** is one.\n\n```c\nint x;\n```\n", "Paris.", "Rome."]
    terminal = start(answers=answers)
    terminal.prompt()
    terminal.ask("Name a river.")
    terminal.ask("/set temperature 0")
    terminal.ask("And a city?")
    terminal.ask("/undo")
    terminal.ask("/set seeds 3")
    terminal.send(CTRL_D)
    assert terminal.end() == 0
    figures = "tokens, 0.0 tokens/s"
    assert [f"[{line.split()[0][1:]} {figures}..." if figures in line else line for line in terminal.lines()] == [
        "model: 2 of 4 layers in memory, 2 streamed from disk (1.00 MiB a sweep)",
        "memory 3.00 MiB, context 512 tokens",
        "drafts from exit head after layer 2, controller calibrated; /help lists commands",
        ">>> Name a river.",
        "Rivers",
        "",
        "The Danube is one.",
        "",
        "```c",
        "int x;",
        "```",
        "[42 tokens, 0.0 tokens/s...",
        ">>> /set temperature 0",
        "temperature is 0.0",
        ">>> And a city?",
        "Paris.",
        "[4 tokens, 0.0 tokens/s...",
        ">>> /undo",
        "taken back: And a city?",
        ">>> /set seeds 3",
        "eesd-chat: error: no setting 'seeds'; did you mean seed?",
        ">>>",
    ]


def test_system_undo_retry_and_edit_change_what_the_model_is_asked(start: Start) -> None:
    terminal = start(answers=["one", "two"])
    terminal.prompt()
    run = commands_of(terminal)
    assert run("/system") == ["there is no system prompt"]
    assert run("/undo") == ["eesd-chat: error: there is no turn to take back"]
    assert run("/retry") == ["eesd-chat: error: there is no question to answer again"]
    assert run("/edit") == ["eesd-chat: error: there is no question to edit"]
    run("/system Be brief.")
    assert run("/system") == ["system prompt: Be brief."]
    run("Hello")
    assert asked(terminal, 0) == "system\nBe brief.\nuser\nHello\nassistant\n"
    run("/retry")
    first, second = terminal.scripted.turns()
    assert first["prompt"] == second["prompt"]
    assert (first["params"]["seed"], second["params"]["seed"]) == (0, 1)
    run("More?")
    assert run("/undo") == ["taken back: More?"]
    run("/system off")
    terminal.ask("/edit")
    terminal.send("!\r")
    terminal.prompt()
    assert asked(terminal, 3) == "user\nHello!\nassistant\n", "the edited question took the place of the old one"
    run("x")
    assert asked(terminal, 4).startswith("user\nHello!\nassistant\n") and "More" not in asked(terminal, 4)
    assert terminal.scripted.turns()[4]["params"]["seed"] == 0, "only an attempt has another seed"


def test_an_edit_that_is_given_up_changes_nothing(start: Start) -> None:
    terminal = start()
    terminal.prompt()
    terminal.ask("Hello")
    terminal.ask("/edit")
    terminal.send(CTRL_C)  # empties the line
    terminal.send("\r")
    terminal.prompt()
    terminal.ask("x")
    assert asked(terminal, 1).startswith("user\nHello\nassistant\n")


@pytest.mark.parametrize("command", ["/retry", "/edit"])
def test_a_new_answer_that_is_stopped_before_its_first_token_leaves_the_old_one(start: Start, command: str) -> None:
    terminal = start(answers=["one two three"], prefill_seconds=1.5)
    terminal.prompt()
    terminal.ask("Hello")
    terminal.send(f"{command}\r")
    if command == "/edit":
        terminal.prompt()
        terminal.send("!\r")
    terminal.expect("reading")
    terminal.send(CTRL_C)
    assert "stopped before the first token" in terminal.prompt()
    terminal.ask("x")
    assert "one two three" in asked(terminal, 2)


def test_save_and_load(start: Start, tmp_path: Path) -> None:
    terminal = start(answers=["one", "two", "three"])
    terminal.prompt()
    run = commands_of(terminal)
    file, other = tmp_path / "talk.json", tmp_path / "notes.txt"
    other.write_text("mine")
    run("/system Be brief.")
    run("Hello")
    assert run("/save") == ["eesd-chat: error: /save FILE: the name of a file is missing"]
    assert "".join(run(f"/save {file}")).endswith("talk.json")
    assert "not a saved conversation" in " ".join(run(f"/save {other}")) and other.read_text() == "mine"
    saved = json.loads(file.read_text())
    assert saved["system"] == "Be brief." and saved["turns"][0]["question"] == "Hello"
    assert saved["turns"][0]["ids"] == terminal.scripted.turns()[0]["emitted"]
    run("/reset")
    run("/system off")
    assert run(f"/load {file}") == ["loaded 1 turn"]
    run("More?")
    first, second = terminal.scripted.turns()
    have = first["prompt"] + first["emitted"]
    assert second["prompt"][: len(have)] == have
    assert "No such file" in " ".join(run("/load nowhere.json"))
    for command in ("/save /dev/zero", "/load /dev/zero"):
        assert "/dev/zero: not a regular file" in " ".join(run(command))
    assert "No such file" in " ".join(run(f"/save {file.parent}/none/talk.json"))
    assert not (file.parent / "none").exists()


def test_settings_can_be_listed_changed_and_are_checked(start: Start) -> None:
    terminal = start("--top-k", "7")
    terminal.prompt()
    run = commands_of(terminal)
    listed = dict(line.split(maxsplit=1) for line in run("/set"))
    assert listed["temperature"] == "0.7" and listed["top_k"] == "7" and listed["markdown"] == "on"
    assert run("/set temperature 1.5") == ["temperature is 1.5"]
    assert run("/set top-p 0.5") == ["top_p is 0.5"]
    assert run("/set seed") == ["seed is 0"]
    assert run("/set stop END") == ["stop is 'END'"]
    assert run("/set controller fixed:2") == ["controller is fixed:2"]
    assert run("/set temperature hot") == ["eesd-chat: error: temperature must be a number, not 'hot'"]
    assert run("/set seed 1.5") == ["eesd-chat: error: seed must be a whole number, not '1.5'"]
    assert run("/set temperature -1")[0].startswith("eesd-chat: error: temperature must be from 0")
    assert run("/set controller clever")[0].startswith("eesd-chat: error: there is no controller 'clever'")
    assert run("/set markdown maybe") == ["eesd-chat: error: markdown is on or off, not 'maybe'"]
    run("Hello")
    params = terminal.scripted.turns()[0]["params"]
    assert (params["temperature"], params["top_k"], params["top_p"], params["stop"]) == (1.5, 7, 0.5, ["END"])


def test_markdown_can_be_switched_off(start: Start) -> None:
    terminal = start(answers=["**x**"])
    terminal.prompt()
    terminal.ask("one")
    terminal.ask("/set markdown off")
    terminal.ask("two")
    lines = terminal.lines()
    assert lines.count("x") == 1 and lines.count("**x**") == 1
    plain = start("--plain", answers=["**x**"])
    plain.prompt()
    plain.ask("one")
    assert "**x**" in plain.lines()


def test_drafts_can_be_shown(start: Start) -> None:
    terminal = start(answers=["one two three"], drafting=True)
    terminal.prompt()
    terminal.send("/show-drafts\r")
    terminal.process.expect_exact("\x1b[32mdrafted and kept\x1b[0m, \x1b[31m\x1b[9mdrafted in vain\x1b[0m")
    terminal.prompt()
    terminal.send("x\r")
    terminal.process.expect_exact("tokens/s")
    shown = terminal.process.before
    terminal.prompt()
    assert "\x1b[32m" in shown and "\x1b[31m\x1b[9m wrong\x1b[0m" in shown and "\x1b[33m\x1b[1m" in shown
    terminal.ask("/show-drafts off")
    terminal.ask("x")
    assert terminal.lines()[-3] == "one two three"
    plain = start(answers=["one two three"], drafting=True, env={"NO_COLOR": "1"})
    plain.prompt()
    plain.ask("/show-drafts on")
    assert "[- wrong-]{+" in plain.ask("x")


def test_plan_and_stats_and_model(start: Start) -> None:
    terminal = start(broken_models=["nothing"])
    terminal.prompt()
    run = commands_of(terminal)
    assert any("KV cache" in line and "1.00 MiB" in line for line in run("/plan"))
    run("Hello")
    assert any(line.startswith("answers ") for line in run("/stats"))
    assert "".join(run("/model")).startswith("model: 2 of 4 layers in memory")
    shown = run("/model nothing")
    assert "eesd-chat: error: nothing: no such model" in shown and "eesd-chat: note: still talking to model" in shown
    assert any(line.startswith("other: 2 of 4 layers") for line in run("/model other"))
    run("More?")
    assert asked(terminal, 1).startswith("user\nHello\nassistant\nHello world"), "the conversation goes on"


def test_tab_completes_commands_settings_and_files(start: Start, tmp_path: Path) -> None:
    terminal = start()
    terminal.prompt()
    terminal.send(f"/sho{TAB}\r")
    assert "drafted and kept" in terminal.prompt()
    terminal.send(f"/set temp{TAB} 0.25\r")
    assert "temperature is 0.25" in terminal.prompt()
    terminal.ask("Hello")
    terminal.ask(f"/save {tmp_path}/a-long-name.json")
    terminal.send(f"/load {tmp_path}/a-lo{TAB}\r")
    assert "loaded 1 turn" in terminal.prompt()


def test_what_was_typed_comes_back_in_the_next_run(start: Start) -> None:
    first = start()
    first.prompt()
    first.ask("a question to remember")
    first.send(CTRL_D)
    assert first.end() == 0
    history = first.scripted.folder / "home" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    second = start()
    second.prompt()
    second.send(f"{UP}\r")
    second.prompt()
    assert asked(second, 1) == "user\na question to remember\nassistant\n"


def test_a_dumb_terminal_gets_no_escapes_at_all(start: Start) -> None:
    terminal = start(answers=["**x** and `y`"], env={"TERM": "dumb"}, load_seconds=0.5, prefill_seconds=0.6)
    terminal.process.expect_exact(">>> ")
    terminal.send("Hello\n")
    terminal.process.expect_exact("**x** and `y`")
    terminal.process.expect_exact(">>> ")
    terminal.send("/edit\n")
    terminal.process.expect_exact(">>> (was: Hello) ")
    terminal.send("Bye\n")
    terminal.process.expect_exact(">>> ")
    terminal.send(CTRL_D)
    assert terminal.end() == 0
    assert asked(terminal, 1) == "user\nBye\nassistant\n"
    assert "\x1b" not in terminal.process.logfile_read.getvalue()


def test_keys_typed_while_an_answer_runs_wait_for_the_next_line(start: Start) -> None:
    terminal = start(answers=["one two three four", "ok"], token_seconds=0.2)
    terminal.prompt()
    terminal.send("count\r")
    terminal.expect("one")
    terminal.send("next")
    terminal.prompt()
    terminal.send("\r")
    terminal.prompt()
    assert "one two three four" in terminal.lines(), "they do not show in the answer"
    assert asked(terminal, 1).endswith("user\nnext\nassistant\n")
