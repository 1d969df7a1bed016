"""The chat on the real engine, in process: interruptions at any moment, long chats, cheap turns, kept caches."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from cli.chat_settings import ChatSettings
from cli.render import ProgressDisplay
from cli.session import Session
from cli.talk import Chat, open_chat
from eesd_lite import SamplingParams
from eesd_lite.engine import Engine
from tests.cli.conftest import LIMIT, ROOT, environment
from tests.cli.slow_chat import SlowReader
from tests.cli.terminal import CTRL_C, CTRL_D, READING
from tests.tiny import Tiny, TinySpec, build

OFFLOADED: dict[str, Any] = {"head": "random", "exit_layer": 2, "resident_layers": 2, "controller": "fixed:3"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(tmp_path_factory.mktemp("chat") / "model", TinySpec(layers=5, positions=2048))


class Watched:
    """Notes what an engine is asked, and how many rows it read for it."""

    def __init__(self, engine: Engine) -> None:
        self.prompts: list[list[int]] = []
        self.before: list[int] = []
        self._engine, self._generate = engine, engine.generate
        engine.generate = self.generate  # type: ignore[method-assign,assignment]

    def generate(self, prompt: list[int], *rest: Any) -> Any:
        self.prompts.append(list(prompt))
        self.before.append(self._engine.stats.prefilled_tokens)
        return self._generate(prompt, *rest)

    def rows(self, turn: int) -> int:
        """Prompt tokens that turn `turn` passed through the layers."""
        after = [*self.before[1:], self._engine.stats.prefilled_tokens]
        return after[turn] - self.before[turn]


def fresh_ids(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    """What plain decoding from an empty cache says."""
    engine.reset()
    return [event.token_id for event in engine.generate(prompt, params) if event.token_id is not None]


def text_of(engine: Engine, ids: list[int], interrupted: bool) -> str:
    """What these tokens show as they arrive; half a character is shown only at the end of a whole answer."""
    stream = engine.text.stream()
    text = "".join(stream.push(token) for token in ids)
    return text if interrupted else text + stream.flush()


@pytest.fixture
def quiet_ctrl_c() -> Iterator[None]:
    """A Ctrl-C that comes when the answer is already complete does nothing."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_after_an_interruption_at_any_moment_the_next_answer_is_that_of_a_fresh_run(
    tiny: Tiny, quiet_ctrl_c: None, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
    with tiny.engine(**OFFLOADED, context=512) as engine:
        fresh_ids(engine, [65], params)  # whatever is opened once for good is open now
    threads, files = threading.active_count(), descriptors()
    plain = tiny.engine(**{**OFFLOADED, "controller": "off"}, context=512)
    engine = tiny.engine(**OFFLOADED, context=512, reader=SlowReader(0.001))
    watched, rng, stopped, noted = Watched(engine), random.Random(1), 0, 0
    for _ in range(10):
        session = Session(engine, params, ProgressDisplay())
        for turn in range(6):
            turns = len(session.conversation.turns)
            ctrl_c = threading.Timer(rng.uniform(0, 0.12), signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
            if turn < 5:
                ctrl_c.start()
            session.answer(f"question {turn}?")
            ctrl_c.cancel()
            if turn < 5:
                ctrl_c.join()
            stopped += session.interrupted
            answered = session.conversation.turns[turns:]
            shown = list(answered[0].answer_ids) if answered else []
            expected = fresh_ids(plain, watched.prompts[-1], params)
            assert shown == (expected[: len(shown)] if session.interrupted else expected)
            printed, said = capsys.readouterr()
            assert printed.removesuffix("\n") == text_of(engine, shown, session.interrupted).removesuffix("\n")
            noted += said.count("stopped")
            assert engine.stats.balanced()
    assert stopped > 15, "the interruptions came too late to mean anything"
    engine.close()
    plain.close()
    assert (threading.active_count(), descriptors()) == (threads, files)
    assert noted == stopped


def test_forty_turns_in_a_small_context_keep_the_system_prompt_and_read_only_what_is_new(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.7, ignore_eos=True)
    with tiny.engine(**OFFLOADED, context=1024) as engine:
        watched = Watched(engine)
        session = Session(engine, params, ProgressDisplay(), system="Be brief.")
        system = engine.text.render_chat([{"role": "system", "content": "Be brief."}], add_generation_prompt=False)
        have: list[int] = []
        moved = 0
        for turn in range(40):
            question = f"This is question number {turn}, and it is of middling length."
            session.answer(question)
            prompt = watched.prompts[-1]
            assert prompt[: len(system)] == system and question in engine.text.decode(prompt)
            assert len(prompt) < 1024
            shared = next((n for n, (a, b) in enumerate(zip(have, prompt, strict=False)) if a != b), len(have))
            assert watched.rows(turn) == len(prompt) - min(shared, len(prompt) - 1)
            if shared == len(have):
                assert watched.rows(turn) < 120, "a question with its template, and the answer's last token"
            else:
                moved += 1
            have = [*prompt, *session.conversation.turns[-1].answer_ids][:-1]
        assert len(session.conversation.turns) == 40 and session.conversation.forgotten > 20
        assert 0 < moved < 16, "room is made for several turns at once"
        expected = fresh_ids(engine, watched.prompts[-1], SamplingParams(**{**vars(params)}))
        assert list(session.conversation.turns[-1].answer_ids) == expected
    assert capsys.readouterr().err.count("is full") == 1


def chat_of(tiny: Tiny, *, controller: str = "fixed:3", **settings: Any) -> Chat:
    """A chat on the tiny model."""
    options = {**OFFLOADED, "controller": controller}
    given = ChatSettings(
        model="tiny", params=SamplingParams(max_new_tokens=16, ignore_eos=True), controller=controller, **settings
    )
    return open_chat(given, ProgressDisplay(), lambda settings, progress: tiny.engine(**options, context=256))


def test_a_session_goes_on_from_its_cache_and_says_what_a_cold_run_says(
    tiny: Tiny, cache_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = chat_of(tiny, session="work", system="Be brief.")
    first.answer("How are you?")
    first.answer("Why?")
    held = len(first.engine.cached_ids)
    first.leave()
    second = chat_of(tiny, session="work")
    assert f"after 2 turns; {held} tokens of its cache are still valid" in capsys.readouterr().err
    watched = Watched(second.engine)  # type: ignore[arg-type]
    second.answer("And now?")
    assert watched.rows(0) == len(watched.prompts[0]) - held
    warm = second.session.conversation.turns[-1].answer_ids
    second.leave()
    (cache_home / "sessions" / "work.cache").unlink()
    third = chat_of(tiny, session="work")
    third.session.conversation.undo()
    third.answer("And now?")
    assert third.session.conversation.turns[-1].answer_ids == warm
    assert third.session.conversation.system == "Be brief."
    third.leave()


def test_a_cache_that_does_not_fit_is_computed_anew_and_that_is_said(
    tiny: Tiny, cache_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = chat_of(tiny, session="work")
    first.answer("How are you?")
    first.leave()
    second = chat_of(tiny, session="work", controller="off")
    assert "its cache does not fit this model and plan: the conversation is read anew" in capsys.readouterr().err
    watched = Watched(second.engine)  # type: ignore[arg-type]
    second.answer("Why?")
    assert watched.rows(0) == len(watched.prompts[0])
    second.leave()


def test_ctrl_c_behind_a_slow_disk_in_a_terminal(tiny: Tiny) -> None:
    """An answer that would take minutes is stopped; then one is given whole."""
    process = pexpect.spawn(
        sys.executable, ["-m", "tests.cli.slow_chat", str(tiny.folder), "0.5", "tiny", "--max-new-tokens", "400"],
        cwd=str(ROOT), encoding="utf-8", timeout=LIMIT, dimensions=(24, 80),
        env=environment(EESD_HOME=str(tiny.home), PROMPT_TOOLKIT_NO_CPR="1"),
    )  # fmt: skip
    process.expect_exact("loading tiny")
    process.expect_exact(READING)
    process.send("Hello\r")
    process.expect(r"\?2004l[\r\n]*.")  # what comes when the line editor has left: the answer, or progress
    process.send(CTRL_C)
    process.expect_exact(["stopped]", "the question is forgotten", "interrupted"])
    process.expect_exact(READING)
    process.send("/set max-new-tokens 2\r")
    process.expect_exact("max_new_tokens is 2")
    process.expect_exact(READING)
    process.send("And now?\r")
    process.expect_exact("2 tokens, ")
    process.expect_exact(READING)
    process.send(CTRL_D)
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 0
