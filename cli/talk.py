"""A chat with everything around it: the engine and its exchange for another, a named session's files, the loop.

`Chat` is what commands act on (`cli.commands`). However it ends - /quit, Ctrl-D, SIGTERM, an error - `leave` keeps the
session and its cache and closes the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import click

from cli.chat_file import ChatFileError, NamedSession, SavedChat, from_conversation, into_conversation, write_chat
from cli.chat_settings import SETTABLE, ChatSettings, with_saved
from cli.commands import is_command, run_command, words_after
from cli.common import INTERRUPTED, is_terminal
from cli.prompt_line import PromptLine, quiet_keys
from cli.render import ProgressDisplay
from cli.session import ChatEngine, Session, complain, note
from eesd_lite.errors import USER_ERRORS
from eesd_lite.progress import Progress
from eesd_lite.tiers import DISK, HOST_COMPUTE, HOST_STREAM
from eesd_lite.units import format_size

_FAILURES: tuple[type[BaseException], ...] = (*USER_ERRORS, OSError)
_STOPPED: tuple[type[BaseException], ...] = (*_FAILURES, KeyboardInterrupt)
OpenEngine = Callable[[ChatSettings, Progress], ChatEngine]


class Chat:
    """Made by `open_chat`. `settings` are those in force; `draft` is what the next line begins with."""

    def __init__(
        self,
        settings: ChatSettings,
        engine: ChatEngine,
        progress: ProgressDisplay,
        open_engine: OpenEngine,
        named: NamedSession | None,
    ) -> None:
        self.settings, self.engine, self.progress, self.named = settings, engine, progress, named
        self.draft = ""
        self.replacing = False  # what is sent next takes the place of the last turn
        self.changed = set(settings.explicit)  # settings that a session keeps
        self._open_engine = open_engine
        self.session = self._new_session()

    def _new_session(self) -> Session:
        settings = self.settings
        return Session(
            self.engine, settings.params, self.progress, system=settings.system, markdown=settings.markdown,
            as_json=settings.json,
        )  # fmt: skip

    def answer(self, text: str) -> None:
        """Ask, show, keep."""
        conversation = self.session.conversation
        old = conversation.undo() if self.replacing else None
        turns, self.replacing = len(conversation.turns), False
        try:
            with quiet_keys():
                self.session.answer(text)
        finally:
            if old is not None and len(conversation.turns) == turns:  # nothing was said in its place
                conversation.again(old)
            self.store()

    def retry(self) -> bool:
        """Another answer to the last question; False if there is none."""
        try:
            with quiet_keys():
                return self.session.retry()
        finally:
            self.store()

    def change(self, name: str, value: object) -> None:
        """Change a setting; EesdError says what is wrong with the value."""
        self.settings = self.settings.changed(name, value)
        self.changed.add(name)
        self.session.params, self.session.markdown = self.settings.params, self.settings.markdown
        self.session.conversation.reserve_for_answer(self.settings.params.max_new_tokens)
        if name == "controller":
            self.engine.set_controller(self.settings.controller)
        self.store()

    def saved(self) -> SavedChat:
        """The conversation as a file would have it."""
        settings = {name: self.settings.value(name) for name in SETTABLE if name in self.changed}
        return from_conversation(
            self.session.conversation, self.engine.text, model=self.settings.model, settings=settings
        )

    def take(self, saved: SavedChat) -> bool:
        """Go on from a saved conversation; whether its token ids could be kept."""
        return into_conversation(saved, self.session.conversation, self.engine.text)

    def plan_lines(self) -> list[str]:
        """Planned bytes by tier, and what is really allocated."""
        from cli.plan_table import exit_lines, plan_lines

        if not hasattr(self.engine, "target"):  # a scripted one allocates nothing
            return plan_lines(self.engine.plan)
        from eesd_lite.allocated import allocated_bytes

        lines = plan_lines(self.engine.plan, allocated_bytes(self.engine))  # type: ignore[arg-type]
        exits = getattr(self.engine, "exits", None)
        return lines + exit_lines(exits) if exits is not None else lines

    def exchange(self, model: str) -> None:
        """Another model; the conversation goes on. If it cannot be opened, the old one is opened again."""
        saved, old = self.saved(), self.settings
        drafts = self.session.show_drafts
        self.engine.close()
        # Where the split and the head were chosen, they were chosen for the old model.
        wanted = replace(old, model=model, resident_layers=None, exit_layer=None, head=None, force_head=False)
        try:
            self._open(wanted)
        except _STOPPED as error:
            self._open(old)
            complain(ChatFileError("interrupted") if isinstance(error, KeyboardInterrupt) else error)
            note(f"still talking to {old.model}")
        self.session = self._new_session()
        self.session.show_drafts = drafts
        self.take(saved)
        self.session.say_notices()
        self.store()

    def _open(self, settings: ChatSettings) -> None:
        with self.progress.showing(f"loading {settings.model}"):
            self.engine = self._open_engine(settings, self.progress)
        self.settings = settings
        for line in self.engine.notices:
            note(line)

    def store(self) -> None:
        """Keep a named session's conversation; a failure is said and does not end the chat."""
        if self.named is None:
            return
        try:
            write_chat(self.named.path, self.saved())
        except ChatFileError as error:
            complain(error)

    def leave(self) -> None:
        """Keep the session and what the model has read, close everything."""
        try:
            if self.named is not None:
                self.store()
                self._store_cache(self.named)
        finally:
            self.engine.close()
            if self.named is not None:
                self.named.close()

    def _store_cache(self, named: NamedSession) -> None:
        try:
            if self.engine.cached_ids and self.session.conversation.turns:
                with self.progress.showing("saving the session's cache", delay=0.4):
                    self.engine.save_prefix(named.cache)
            else:
                named.cache.unlink(missing_ok=True)
        except _FAILURES as error:
            complain(error)


def open_chat(settings: ChatSettings, progress: ProgressDisplay, open_engine: OpenEngine) -> Chat:
    """Take the named session if there is one, load the model, go on where the session stopped."""
    named, saved = None, None
    if settings.session is not None:
        named = NamedSession(settings.session)
        saved = named.open()
    try:
        if saved is not None:
            settings = with_saved(settings, saved.settings)
            settings = settings if settings.system is not None else replace(settings, system=saved.system)
            saved = replace(saved, system=settings.system)
        with progress.showing(f"loading {settings.model}"):
            engine = open_engine(settings, progress)
    except BaseException:
        if named is not None:
            named.close()
        raise
    chat = Chat(settings, engine, progress, open_engine, named)
    for line in engine.notices:
        note(line)
    if named is not None and saved is not None:
        chat.changed |= set(saved.settings)
        _resume(chat, named, saved)
    return chat


def _resume(chat: Chat, named: NamedSession, saved: SavedChat) -> None:
    same = chat.take(saved)
    if not saved.turns:
        return
    turns = "1 turn" if len(saved.turns) == 1 else f"{len(saved.turns)} turns"
    cached = chat.engine.load_prefix(named.cache) if same else 0
    if cached:
        what = f"{cached} tokens of its cache are still valid"
    elif same:
        what = "its cache does not fit this model and plan: the conversation is read anew"
    else:
        what = f"it was held with another tokenizer ({saved.model}): answers are encoded and read anew"
    note(f"session {named.name!r} goes on after {turns}; {what}")


_ELSEWHERE = {
    HOST_COMPUTE: "computed in host memory",
    HOST_STREAM: "streamed from host memory",
    DISK: "streamed from disk",
}


def header(settings: ChatSettings, engine: ChatEngine) -> str:
    """Three lines: the model and where its layers are; memory; what drafts."""
    plan = engine.plan
    layers = len(plan.tiers)
    where = [f"{plan.resident_layers} of {layers} layers in memory"]
    if plan.resident_layers == layers:
        where = [f"all {layers} layers in memory"]
    where += [f"{plan.tiers.count(tier)} {words}" for tier, words in _ELSEWHERE.items() if tier in plan.tiers]
    if plan.sweep_bytes:
        where[-1] += f" ({format_size(plan.sweep_bytes)} a sweep)"
    allowed = f" of {format_size(settings.device_memory)}" if settings.device_memory is not None else ""
    sources = [f"exit head after layer {plan.exit_layer}"] if plan.exit_layer else []
    if plan.exit_layer and plan.other_exits:
        sources = [f"exit heads after layers {', '.join(map(str, (*plan.other_exits, plan.exit_layer)))}"]
    sources += ["repeated text"] if settings.drafter != "head" else []
    drafts = "plain decoding, nothing drafts"
    if sources and settings.controller != "off":
        drafts = f"drafts from {' and '.join(sources)}, controller {settings.controller}"
    return (
        f"{settings.model}: {', '.join(where)}\n"
        f"memory {format_size(plan.total_bytes)}{allowed}, context {plan.context} tokens\n"
        f"{drafts}; /help lists commands"
    )


def talk(chat: Chat) -> int:
    """Questions and answers until the user leaves; the exit code."""
    from cli.chat_file import state_folder

    history = state_folder() / "history" if is_terminal(sys.stdin) else None
    reader = PromptLine(words_after(chat), history)
    click.echo(header(chat.settings, chat.engine), err=True)
    chat.session.say_notices()
    leaving = False
    while True:
        default, chat.draft = chat.draft, ""
        try:
            text = reader.read(default)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if leaving:
                return INTERRUPTED
            leaving, chat.replacing = True, False
            click.echo("(Ctrl-C again, or Ctrl-D, leaves)", err=True)
            continue
        leaving = False
        if not text.strip():
            chat.replacing = False
            continue
        try:
            if is_command(text):
                if run_command(chat, text):
                    return 0
            else:
                chat.answer(text)
        except USER_ERRORS as error:
            complain(error)
        except KeyboardInterrupt:  # before an answer began, or after it was kept: it does not end the session
            chat.session.conversation.withdraw()
            note("interrupted")
