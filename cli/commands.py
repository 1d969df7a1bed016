"""The commands of a chat: lines that begin with a slash. What they say goes to stderr."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.chat_file import read_chat, write_chat
from cli.chat_settings import SETTABLE, parse_setting, setting_name
from cli.common import is_terminal
from cli.prompt_line import PATHS, Words
from cli.render import printable, shows_colors
from eesd_lite.errors import PromptError

if TYPE_CHECKING:
    from cli.talk import Chat

_KEYS = (
    "Enter sends, Alt-Enter starts a new line, Tab completes, Ctrl-X Ctrl-E opens an\n"
    "editor; a pasted text is one question. Ctrl-C stops an answer or empties the\n"
    "line. Begin with a space to send a text that starts with '/'."
)


@dataclass(frozen=True)
class Command:
    """`run` gets the chat and the rest of the line; True from it means that it is time to leave."""

    usage: str
    help: str
    run: Callable[[Chat, str], bool | None]


def is_command(line: str) -> bool:
    """Whether a line is a command rather than a question."""
    return line.startswith("/")


def run_command(chat: Chat, line: str) -> bool:
    """Carry out a command; True when it is time to leave. Raises one of USER_ERRORS."""
    name, _, rest = line.strip().partition(" ")
    command = COMMANDS.get(name.lower())
    if command is None:
        near = difflib.get_close_matches(name.lower(), COMMANDS, n=1, cutoff=0.4)
        _say(f"no command {name}; did you mean {near[0]}?" if near else f"no command {name}; /help lists them")
        return False
    return bool(command.run(chat, rest.strip()))


def words_after(chat: Chat) -> Mapping[str, Words]:
    """What may follow each command, for completion."""
    switch = ("on", "off")
    values = [*SETTABLE, "markdown on", "markdown off", *(f"controller {name}" for name in _CONTROLLERS)]
    words: dict[str, Words] = {name: lambda: () for name in COMMANDS}
    words |= {"/save": lambda: (PATHS,), "/load": lambda: (PATHS,), "/show-drafts": lambda: switch}
    return words | {"/set": lambda: values, "/model": lambda: (*_models(), PATHS), "/system": lambda: ("off",)}


_CONTROLLERS = ("calibrated", "beta", "tree", "fixed:4", "hf", "off")


def _models() -> list[str]:
    from models import RECIPES

    return sorted(RECIPES)


def _help(chat: Chat, rest: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    _say("\n".join([*(f"{c.usage:{width}}  {c.help}" for c in COMMANDS.values()), _KEYS]))


def _quit(chat: Chat, rest: str) -> bool:
    return True


def _system(chat: Chat, rest: str) -> None:
    conversation = chat.session.conversation
    if not rest:
        _say(f"system prompt: {printable(conversation.system)}" if conversation.system else "there is no system prompt")
        return
    conversation.system = None if rest == "off" else rest
    _say("the system prompt is changed from the next answer on" if conversation.system else "no system prompt any more")
    chat.session.say_notices()
    chat.store()


def _reset(chat: Chat, rest: str) -> None:
    chat.session.reset()
    chat.store()
    _say("the conversation is forgotten")


def _undo(chat: Chat, rest: str) -> None:
    turn = chat.session.conversation.undo()
    if turn is None:
        raise PromptError("there is no turn to take back")
    chat.store()
    _say(f"taken back: {_short(turn.question)}")


def _retry(chat: Chat, rest: str) -> None:
    if not chat.retry():
        raise PromptError("there is no question to answer again")


def _edit(chat: Chat, rest: str) -> None:
    turns = chat.session.conversation.turns
    if not turns:
        raise PromptError("there is no question to edit")
    chat.draft, chat.replacing = turns[-1].question, True
    _say("the last question, to be changed and sent again; an empty line leaves everything as it was")


def _save(chat: Chat, rest: str) -> None:
    if not rest and chat.named is None:
        raise PromptError("/save FILE: the name of a file is missing")
    path = Path(rest).expanduser() if rest else chat.named.path if chat.named is not None else Path()
    if path.exists():
        read_chat(path)  # anything else than a saved conversation is not overwritten
    write_chat(path, chat.saved())
    _say(f"saved {_turns(len(chat.session.conversation.turns))} to {path}")


def _load(chat: Chat, rest: str) -> None:
    if not rest:
        raise PromptError("/load FILE: the name of a file is missing")
    saved = read_chat(Path(rest).expanduser())
    same = chat.take(saved)
    chat.session.say_notices()
    chat.store()
    anew = "" if same else "; it was held with another tokenizer, so its answers are encoded anew"
    _say(f"loaded {_turns(len(saved.turns))}{anew}")


def _set(chat: Chat, rest: str) -> None:
    name, _, text = rest.partition(" ")
    if not name:
        width = max(map(len, SETTABLE))
        _say("\n".join(f"{each:{width}}  {_spelt(chat.settings.value(each))}" for each in SETTABLE))
        return
    name = setting_name(name)
    if text.strip():
        chat.change(name, parse_setting(name, text))
    _say(f"{name} is {_spelt(chat.settings.value(name))}")


def _stats(chat: Chat, rest: str) -> None:
    _say("\n".join(chat.session.totals()))


def _plan(chat: Chat, rest: str) -> None:
    _say("\n".join(chat.plan_lines()))


def _show_drafts(chat: Chat, rest: str) -> None:
    from cli.answer_view import DraftView

    if rest not in ("", "on", "off"):
        raise PromptError(f"/show-drafts is on or off, not {rest!r}")
    session = chat.session
    session.show_drafts = not session.show_drafts if not rest else rest == "on"
    if not session.show_drafts:
        _say("drafts are not shown any more")
    elif not is_terminal(sys.stdout):
        _say("drafts will be shown when answers go to a terminal; now they go to a file or pipe")
    else:
        nothing = chat.engine.plan.exit_layer is None and chat.settings.drafter == "head"
        off = "; nothing drafts now" if nothing or chat.settings.controller == "off" else ""
        _say(DraftView.legend(colors=shows_colors(sys.stderr)) + off)


def _model(chat: Chat, rest: str) -> None:
    from cli.talk import header

    if rest:
        chat.exchange(rest)
    _say(header(chat.settings, chat.engine))


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def _short(text: str) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _spelt(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return (", ".join(map(repr, value)) or "off") if isinstance(value, tuple) else str(value)


def _say(text: str) -> None:
    click.echo(text, err=True)


COMMANDS: dict[str, Command] = {
    command.usage.split()[0]: command
    for command in (
        Command("/help", "this list", _help),
        Command("/system [TEXT|off]", "show or change the system prompt", _system),
        Command("/reset", "forget the conversation, not the system prompt", _reset),
        Command("/undo", "take the last question and its answer back", _undo),
        Command("/retry", "answer the last question again, with the next seed", _retry),
        Command("/edit", "change the last question and send it again", _edit),
        Command("/save FILE", "write the conversation to a file", _save),
        Command("/load FILE", "go on from a saved conversation", _load),
        Command("/set [NAME [VALUE]]", "show or change a setting, as /set temperature 0.7", _set),
        Command("/stats", "figures of the session, beliefs of the controller", _stats),
        Command("/plan", "which bytes are where", _plan),
        Command("/show-drafts [on|off]", "colour drafted, rejected and corrected tokens", _show_drafts),
        Command("/model [NAME]", "which model this is; go on with another one", _model),
        Command("/quit", "leave (as Ctrl-D does)", _quit),
    )
}
