"""One chat session: a question becomes an answer on stdout, everything else goes to stderr.

Works with anything that looks like an Engine (`generate`, `stats`, `text`, `reset`), so that tests can script it. What
was shown is what is remembered, token for token, also when an answer is stopped by Ctrl-C or breaks off with an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import click

from cli.common import is_terminal, program_name
from cli.interrupts import Interrupts
from cli.render import ProgressDisplay, answer_line, dim, printable, totals
from eesd_lite.params import SamplingParams
from eesd_lite.stats import Stats

_ENDINGS = {
    "length": "cut at --max-new-tokens {0.max_new_tokens}",
    "context": "cut: the context is full",
}


class Event(Protocol):
    """What `Engine.generate` yields."""

    @property
    def token_id(self) -> int | None: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...


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
    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Any]: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


class Session:
    """The engine, the conversation, and where the answer goes."""

    def __init__(
        self,
        engine: ChatEngine,
        params: SamplingParams,
        progress: ProgressDisplay,
        *,
        system: str | None = None,
    ) -> None:
        from eesd_lite.chat import Conversation  # not needed before there is a model

        self._engine = engine
        self._codec = engine.text
        self._params = replace(params, stop=(*params.stop, *self._codec.stop))
        self._progress = progress
        self._conversation = Conversation(
            self._codec, system, context=engine.plan.context, reserve=params.max_new_tokens
        )
        self._raw = not is_terminal(sys.stdout)
        self.interrupted = False

    def answer(self, question: str) -> None:
        """Ask the model and show what it says; `interrupted` tells whether Ctrl-C stopped it."""
        ids = self._conversation.ask(question)
        for notice in self._conversation.take_notices():
            note(notice)
        before = self._engine.stats.snapshot()
        shown = _Shown()
        try:
            self._run(ids, shown)
        finally:
            self._progress.stop()
            self._keep(shown)
            if shown.text and not shown.text.endswith("\n"):
                write_answer("\n")
        if self.interrupted and not shown.ids:
            note("stopped before the first token: the question is forgotten")
            return
        ending = "stopped" if self.interrupted else _ENDINGS.get(shown.finish_reason or "", "").format(self._params)
        click.echo(dim(f"[{answer_line(self._engine.stats.since(before), ending)}]"), err=True)

    def reset(self) -> None:
        """Forget the conversation, except for the system prompt."""
        self._conversation.reset()
        self._engine.reset()

    def totals(self) -> list[str]:
        """What `/stats` says."""
        controller = getattr(self._engine, "controller", None)
        drafts = getattr(self._engine, "drafter_factory", self._engine.plan.exit_layer) is not None
        if controller is None or not drafts:
            return totals(self._engine.stats, {})
        return totals(self._engine.stats, controller.belief())

    def _run(self, ids: list[int], shown: _Shown) -> None:
        self.interrupted = False
        with Interrupts() as interrupts, self._progress.showing(f"reading the prompt ({len(ids)} tokens)", delay=0.4):
            events = self._engine.generate(ids, self._params)
            try:
                while not interrupts.pending:
                    with interrupts.waiting():
                        event = next(events, None)
                    if event is None:
                        break
                    self._progress.stop()
                    self._show(event, shown)
            except KeyboardInterrupt:
                interrupts.pending = True
            finally:
                self.interrupted = interrupts.pending
                close = getattr(events, "close", None)
                if close is not None:
                    close()

    def _show(self, event: Event, shown: _Shown) -> None:
        if event.token_id is not None:
            shown.ids.append(event.token_id)
        elif event.finish_reason == "stop" and event.text:
            # A stop string began inside a token: the part before it was shown, so it is part of the history.
            shown.ids += self._codec.encode_more(event.text)
        shown.finish_reason = event.finish_reason
        text = event.text
        if self._codec.template.stop and not shown.text.strip():
            text = text.lstrip(" ")  # layouts of plain text end in "Assistant:", and the answer begins with a space
        if text:
            write_answer(text if self._raw else printable(text))
        shown.text += event.text

    def _keep(self, shown: _Shown) -> None:
        if shown.ids:
            self._conversation.answered(shown.ids, shown.text)
        else:
            self._conversation.withdraw()


class _Shown:
    """What has reached the reader of one answer."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None


def write_answer(text: str) -> None:
    """Part of the answer, at once."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def note(text: str) -> None:
    """A notice on stderr."""
    click.echo(f"{program_name()}: note: {text}", err=True)


def complain(error: Exception) -> None:
    """An error that does not end the session."""
    click.echo(f"{program_name()}: error: {' '.join(str(error).split())}", err=True)
