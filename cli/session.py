"""One chat session: a question becomes an answer on stdout, everything else goes to stderr.

Works with anything that looks like an Engine (`generate`, `stats`, `text`, `reset`), so that tests can script it. What
was shown is what is remembered, token for token, also when an answer is stopped by Ctrl-C or breaks off with an error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import click

from cli.answer_view import DraftView, Event, NoView, PlainView, View, write
from cli.common import is_terminal, program_name
from cli.interrupts import Interrupts
from cli.markdown_view import MarkdownView
from cli.render import ProgressDisplay, answer_line, dim, printable, shows_colors, totals
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress
from eesd_lite.stats import Stats

_ENDINGS = {
    "length": "cut at --max-new-tokens {0.max_new_tokens}",
    "context": "cut: the context is full",
}


class ChatEngine(Protocol):
    """The part of the Engine that a chat needs."""

    @property
    def stats(self) -> Stats: ...
    @property
    def text(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    @property
    def notices(self) -> Sequence[str]: ...
    def generate(self, prompt: Sequence[int], params: SamplingParams, progress: Progress) -> Iterator[Any]: ...
    @property
    def cached_ids(self) -> Sequence[int]: ...
    def set_controller(self, spec: str) -> None: ...
    def save_prefix(self, path: Path) -> None: ...
    def load_prefix(self, path: Path) -> int: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


class Session:
    """The engine, the conversation, and where the answer goes. Public attributes are what `/set` changes."""

    def __init__(
        self,
        engine: ChatEngine,
        params: SamplingParams,
        progress: ProgressDisplay,
        *,
        system: str | None = None,
        markdown: bool = True,
        as_json: bool = False,
        show_drafts: bool = False,
    ) -> None:
        from eesd_lite.chat import Conversation  # not needed before there is a model

        self.params = params
        self.markdown, self.show_drafts = markdown, show_drafts
        self.conversation = Conversation(
            engine.text, system, context=engine.plan.context, reserve=params.max_new_tokens
        )
        self.interrupted = False
        self._engine, self._codec = engine, engine.text
        self._progress = progress
        self._as_json = as_json
        self._attempts = 0  # of the last question

    def answer(self, question: str, *, attempt: int = 0) -> None:
        """Ask the model and show what it says; `interrupted` tells whether Ctrl-C stopped it.

        Each further attempt at a question has a seed of its own. Raises Terminated when the answer is kept.
        """
        with Interrupts() as interrupts:
            self._answer(question, attempt, interrupts)
        if interrupts.terminated is not None:
            raise interrupts.terminated

    def _answer(self, question: str, attempt: int, interrupts: Interrupts) -> None:
        ids = self.conversation.ask(question)
        self.say_notices()
        self._attempts = attempt
        stop = (*self.params.stop, *self._codec.stop)
        params = replace(self.params, stop=stop, seed=(self.params.seed + attempt) % 2**64)
        before = self._engine.stats.snapshot()
        shown = _Shown()
        view = self._view()
        try:
            self._run(ids, params, shown, view, interrupts)
        except Exception as error:
            shown.error = " ".join(str(error).split())
            raise
        finally:
            self._progress.stop()
            self._keep(shown)
            view.end()
            stats = self._engine.stats.since(before)
            if self._as_json:
                write(f"{json.dumps(self._report(shown, params, len(ids), stats))}\n")
        if self.interrupted and not shown.ids:
            note("stopped before the first token: the question is forgotten")
            return
        ending = "stopped" if self.interrupted else _ENDINGS.get(shown.finish_reason or "", "").format(params)
        click.echo(dim(f"[{answer_line(stats, shown.first_token, ending)}]"), err=True)

    def retry(self) -> bool:
        """Another answer to the last question, with the next seed; False if there is no question."""
        turn = self.conversation.undo()
        if turn is None:
            return False
        if self.params.greedy:
            note("temperature 0 gives the same answer again; /set temperature 0.7 would not")
        turns = len(self.conversation.turns)
        try:
            self.answer(turn.question, attempt=self._attempts + 1)
        finally:
            if len(self.conversation.turns) == turns:  # nothing new was said
                self.conversation.again(turn)
        return True

    def reset(self) -> None:
        """Forget the conversation, except for the system prompt."""
        self.conversation.reset()
        self._engine.reset()

    def say_notices(self) -> None:
        """What the conversation has to say, each once."""
        for notice in self.conversation.take_notices():
            note(notice)

    def totals(self) -> list[str]:
        """What `/stats` says."""
        controller = getattr(self._engine, "controller", None)
        drafts = getattr(self._engine, "drafter_factory", self._engine.plan.exit_layer) is not None
        if controller is None or not drafts:
            return totals(self._engine.stats, {})
        return totals(self._engine.stats, controller.belief())

    def _view(self) -> View:
        if self._as_json:
            return NoView()
        if self.show_drafts and is_terminal(sys.stdout):
            return DraftView(self._codec, colors=shows_colors(sys.stdout))
        # A dumb terminal cannot be painted over; whoever wants no colours gets no bold headings either.
        if self.markdown and shows_colors(sys.stdout) and "utf" in sys.stdout.encoding.lower():
            return MarkdownView()
        return PlainView(terminal=is_terminal(sys.stdout))

    def _run(self, ids: list[int], params: SamplingParams, shown: _Shown, view: View, interrupts: Interrupts) -> None:
        self.interrupted = False
        started = time.monotonic()
        with self._progress.showing(f"reading the prompt ({len(ids)} tokens)", delay=0.4):
            events = self._engine.generate(ids, params, self._progress)
            try:
                while not interrupts.pending:
                    with interrupts.waiting():
                        event = next(events, None)
                    if event is None:
                        break
                    if shown.first_token is None:
                        shown.first_token = time.monotonic() - started
                        self._progress.stop()
                    self._show(event, shown, view)
            except KeyboardInterrupt:
                interrupts.pending = True
            finally:
                self.interrupted = interrupts.pending
                close = getattr(events, "close", None)
                if close is not None:
                    close()

    def _show(self, event: Event, shown: _Shown, view: View) -> None:
        if event.token_id is not None:
            shown.ids.append(event.token_id)
        elif event.finish_reason == "stop" and event.text:
            # A stop string began inside a token: the part before it was shown, so it is part of the history.
            shown.ids += self._codec.encode_more(event.text)
        shown.finish_reason = event.finish_reason
        text = event.text
        if self._codec.template.stop and not shown.text.strip():
            text = text.lstrip(" ")  # layouts of plain text end in "Assistant:", and the answer begins with a space
        shown.visible += text
        shown.text += event.text
        view.show(text, event)

    def _keep(self, shown: _Shown) -> None:
        if shown.ids:
            self.conversation.answered(shown.ids, shown.text)
        else:
            self.conversation.withdraw()

    def _report(self, shown: _Shown, params: SamplingParams, prompt_tokens: int, stats: Stats) -> dict[str, Any]:
        """What `--json` says about one answer."""
        reason = "error" if shown.error else "interrupted" if self.interrupted else shown.finish_reason
        report: dict[str, Any] = {
            "text": shown.visible, "ids": shown.ids, "finish_reason": reason, "prompt_tokens": prompt_tokens,
            "seed": params.seed, "first_token_seconds": shown.first_token, "stats": stats.as_dict(),
        }  # fmt: skip
        return report | ({"error": shown.error} if shown.error else {})


class _Shown:
    """What has reached the reader of one answer."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""  # as the model wrote it
        self.visible = ""  # as it is shown
        self.finish_reason: str | None = None
        self.first_token: float | None = None  # seconds
        self.error = ""


def note(text: str) -> None:
    """A notice on stderr. It may quote a file's text, which must not move the cursor either."""
    click.echo(f"{program_name()}: note: {printable(text)}", err=True)


def complain(error: BaseException) -> None:
    """An error that does not end the session."""
    click.echo(f"{program_name()}: error: {printable(' '.join(str(error).split()))}", err=True)
