"""`eesd-chat` in a real pseudo-terminal: several turns, Ctrl-C, Ctrl-D, pastes, commands, what the screen shows."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from eesd_lite.text import TextCodec

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from tests.cli.terminal import ALT_ENTER, CTRL_C, CTRL_D, Terminal, asked

COUNTING = "one two three four five six seven eight nine ten"


def test_two_turns_and_ctrl_d_leaves_with_code_0(start: Callable[..., Terminal]) -> None:
    terminal = start(answers=["I am fine.", "Paris."])
    header = terminal.prompt()
    assert header.splitlines()[-3:] == [
        "model: 2 of 4 layers in memory, 2 streamed from disk (1.00 MiB a sweep)",
        "memory 3.00 MiB, context 512 tokens",
        "drafts from exit head after layer 2, controller calibrated; /help lists commands",
    ]
    assert "I am fine.\n[" in terminal.ask("How are you?")
    assert "Paris.\n[" in terminal.ask("Capital?")
    terminal.send(CTRL_D)
    assert terminal.end() == 0
    first, second = terminal.scripted.turns()
    have = first["prompt"] + first["emitted"]
    assert second["prompt"][: len(have)] == have, "the second turn extends what the cache holds"
    assert terminal.scripted.closed()


def test_ctrl_c_stops_the_answer_and_the_session_goes_on(start: Callable[..., Terminal]) -> None:
    terminal = start(answers=[COUNTING, "Paris."], token_seconds=0.3)
    terminal.prompt()
    terminal.send("count\r")
    terminal.expect("one")
    terminal.send(CTRL_C)
    assert "stopped]" in terminal.prompt()
    assert "Paris.\n[" in terminal.ask("Capital?")
    terminal.send(CTRL_D)
    assert terminal.end() == 0
    first, second = terminal.scripted.turns()
    assert 0 < len(first["emitted"]) < 20
    have = first["prompt"] + first["emitted"]
    assert second["prompt"][: len(have)] == have, "what was shown, and only that, is what is remembered"
    codec = TextCodec.from_folder(terminal.scripted.folder)
    shown = codec.decode(first["emitted"])
    assert COUNTING.startswith(shown) and f"assistant\n{shown}\nuser\nCapital?" in asked(terminal, 1)


def test_ctrl_c_before_the_first_token_forgets_the_question(start: Callable[..., Terminal]) -> None:
    terminal = start(prefill_seconds=5.0)
    terminal.prompt()
    terminal.send("never mind\r")
    terminal.expect("reading")
    terminal.send(CTRL_C)
    assert "stopped before the first token: the question is forgotten" in terminal.prompt()
    terminal.ask("Hello")
    assert asked(terminal, 1) == "user\nHello\nassistant\n"


def test_ctrl_c_empties_a_line_and_twice_on_an_empty_one_leaves(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.prompt()
    terminal.send("half a quest")
    terminal.expect("quest")
    terminal.send(CTRL_C)
    terminal.ask("Hello")
    assert asked(terminal, 0) == "user\nHello\nassistant\n"
    terminal.send(CTRL_C)
    assert "(Ctrl-C again, or Ctrl-D, leaves)" in terminal.prompt()
    terminal.send(CTRL_C)
    assert terminal.end() == 130
    assert terminal.scripted.closed()


def test_a_paste_of_many_lines_is_one_question(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.prompt()
    terminal.send("\x1b[200~def f():\n    return 1\n\x1b[201~")
    terminal.expect("return 1")
    terminal.send("why?\r")
    terminal.prompt()
    assert len(terminal.scripted.turns()) == 1
    assert asked(terminal, 0) == "user\ndef f():\n    return 1\nwhy?\nassistant\n"


def test_alt_enter_starts_a_new_line(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.prompt()
    terminal.send(f"one{ALT_ENTER}two\r")
    terminal.prompt()
    assert asked(terminal, 0) == "user\none\ntwo\nassistant\n"


def test_empty_lines_are_not_sent(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.prompt()
    terminal.ask("")
    terminal.ask("   ")
    assert terminal.scripted.turns() == []


def test_commands(start: Callable[..., Terminal]) -> None:
    terminal = start(answers=["I am fine."])
    terminal.prompt()
    shown = terminal.ask("/help")
    assert all(name in shown for name in ("/help", "/reset", "/stats", "/quit"))
    assert "no command /stat; did you mean /stats?" in terminal.ask("/stat")
    assert "no command /xyzzy; /help lists them" in terminal.ask("/xyzzy")
    terminal.ask("Hello")
    assert "tokens/s" in terminal.ask("/stats") and len(terminal.scripted.turns()) == 1
    assert "forgotten" in terminal.ask("/reset")
    terminal.ask(" /help me")
    assert asked(terminal, 1) == "user\n /help me\nassistant\n"
    terminal.send("/quit\r")
    assert terminal.end() == 0


def test_an_error_in_an_answer_does_not_end_the_session(start: Callable[..., Terminal]) -> None:
    terminal = start(answers=[COUNTING], fail_after=2, context=64)
    terminal.prompt()
    assert "eesd-chat: error: layer 3 could not be read" in terminal.ask("Hello")
    assert "eesd-chat: error: the message needs" in terminal.ask("word " * 60)
    terminal.send(CTRL_D)
    assert terminal.end() == 0


def test_escape_sequences_in_an_answer_do_not_reach_the_terminal(start: Callable[..., Terminal]) -> None:
    terminal = start(answers=["a\x1b[2Jb\x07c\x9b1m"])
    terminal.prompt()
    terminal.send("x\r")
    terminal.process.expect_exact("a^[[2Jb^Gc<U+009B>1m")


def test_loading_shows_a_status_that_disappears(start: Callable[..., Terminal]) -> None:
    terminal = start(load_seconds=2.0)
    terminal.expect("loading model")
    terminal.expect("loading layer")
    terminal.expect("2/4")
    terminal.process.expect_exact("\x1b[2K")  # the line is wiped
    terminal.prompt()


def test_no_color_leaves_the_figures_undimmed(start: Callable[..., Terminal]) -> None:
    dimmed = start()
    dimmed.prompt()
    dimmed.send("x\r")
    dimmed.process.expect_exact("\x1b[2m[")
    for arguments, env in ((["--no-color"], {}), ([], {"NO_COLOR": "1"})):
        plain = start(*arguments, env=env)
        plain.prompt()
        plain.send("x\r")
        plain.process.expect_exact("tokens/s")
        assert "\x1b[2m" not in plain.process.before
