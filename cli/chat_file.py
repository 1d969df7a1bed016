"""Conversations on disk: readable JSON, written whole or not at all; named sessions with the model's cache beside them.

A file is a person's own text and may come from anywhere: everything in it is checked, and token ids are used only with
the tokenizer that made them. Sessions and the input history lie in EESD_HOME if that is set, else where the desktop
keeps state (XDG_STATE_HOME, ~/.local/state): not in ~/.cache, which people empty.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eesd_lite.errors import EesdError

if TYPE_CHECKING:
    from filelock import FileLock

    from eesd_lite.chat import Conversation
    from eesd_lite.text import TextCodec

FORMAT = "eesd-lite conversation 1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NUMBERS = re.compile(r"\[\s+((?:\d+,\s+)*\d+)\s+\]")  # outside strings: there, line ends are written as \n
_LARGEST = 1 << 28


class ChatFileError(EesdError):
    """A saved conversation cannot be read, written or used."""


@dataclass(frozen=True, kw_only=True)
class SavedTurn:
    question: str
    answer: str
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SavedChat:
    """What a file holds. `settings` are what the user had changed; `forgotten` turns had left the context."""

    model: str = ""
    tokenizer: str = ""
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    forgotten: int = 0
    turns: tuple[SavedTurn, ...] = ()


def state_folder() -> Path:
    """Where sessions and the input history are kept."""
    if os.environ.get("EESD_HOME"):
        from eesd_lite.home import home

        return home()
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "eesd-lite"


def from_conversation(
    conversation: Conversation, codec: TextCodec, *, model: str, settings: Mapping[str, Any]
) -> SavedChat:
    """A conversation as it is now."""
    turns = tuple(SavedTurn(question=t.question, answer=t.answer, ids=t.answer_ids) for t in conversation.turns)
    return SavedChat(
        model=model, tokenizer=codec.fingerprint, system=conversation.system, settings=dict(settings),
        forgotten=conversation.forgotten, turns=turns,
    )  # fmt: skip


def into_conversation(saved: SavedChat, conversation: Conversation, codec: TextCodec) -> bool:
    """Go on from a saved conversation; whether its token ids could be kept (else answers are encoded anew)."""
    from eesd_lite.chat import Turn

    same = saved.tokenizer == codec.fingerprint
    turns = [
        Turn(turn.question, turn.answer, turn.ids if same else tuple(codec.answer_ids(turn.question, turn.answer)))
        for turn in saved.turns
    ]
    conversation.system = saved.system
    conversation.restore(turns, saved.forgotten)
    return same


def write_chat(path: Path, chat: SavedChat) -> None:
    """Write the file, whole or not at all; its folder has to exist."""
    content = {
        "format": FORMAT, "model": chat.model, "tokenizer": chat.tokenizer,
        "saved": time.strftime("%Y-%m-%dT%H:%M:%S"), "system": chat.system, "settings": dict(chat.settings),
        "forgotten": chat.forgotten,
        "turns": [{"question": t.question, "answer": t.answer, "ids": list(t.ids)} for t in chat.turns],
    }  # fmt: skip
    text = _NUMBERS.sub(lambda m: f"[{' '.join(m[1].split())}]", json.dumps(content, indent=1, ensure_ascii=False))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # What people say is theirs alone. Lone surrogates are no characters.
        with open(partial, "w", encoding="utf-8", errors="replace", opener=_private) as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise ChatFileError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if partial.exists():
            partial.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_chat(path: Path) -> SavedChat:
    """Read and check a file; ChatFileError says what is wrong with it."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ChatFileError(f"{path}: not a regular file")  # a device or a pipe may never end
        if path.stat().st_size > _LARGEST:
            raise ChatFileError(f"{path}: too large for a conversation")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ChatFileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ChatFileError(f"{path}: not a saved conversation (no valid JSON)") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ChatFileError(f"{path}: not a saved conversation (its 'format' is not {FORMAT!r})")
    system, settings, forgotten, turns = (raw.get(key) for key in ("system", "settings", "forgotten", "turns"))
    if not isinstance(turns, list) or not (system is None or isinstance(system, str)):
        raise ChatFileError(f"{path}: damaged ('turns' or 'system' is missing or of the wrong kind)")
    checked = tuple(_turn(path, number, turn) for number, turn in enumerate(turns, 1))
    known = forgotten if isinstance(forgotten, int) and 0 <= forgotten <= len(checked) else 0
    return SavedChat(
        model=str(raw.get("model", "")), tokenizer=str(raw.get("tokenizer", "")), system=system,
        settings=settings if isinstance(settings, dict) else {}, forgotten=int(known),
        turns=checked,
    )  # fmt: skip


def _turn(path: Path, number: int, raw: Any) -> SavedTurn:
    question, answer, ids = (raw.get(key) if isinstance(raw, dict) else None for key in ("question", "answer", "ids"))
    texts = isinstance(question, str) and isinstance(answer, str)
    if not texts or not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 1 << 31 for i in ids):
        raise ChatFileError(f"{path}: damaged (turn {number} needs a 'question', an 'answer' and 'ids')")
    return SavedTurn(question=str(question), answer=str(answer), ids=tuple(ids))


class NamedSession:
    """A session's files, held by one program at a time: NAME.json, and NAME.cache with the model's cache."""

    def __init__(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            raise ChatFileError(
                f"a session's name is up to 64 letters, digits, '.', '_' and '-', beginning with one of the first "
                f"two; not {name!r}"
            )
        self.name = name
        folder = state_folder() / "sessions"
        self.path, self.cache = folder / f"{name}.json", folder / f"{name}.cache"
        self._lock: FileLock | None = None

    def open(self) -> SavedChat | None:
        """Take the session; what it holds, None if it is new."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.path.with_name(f".{self.name}.lock"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ChatFileError(f"session {self.name!r} is open in another eesd-chat; leave that one first") from error
        except OSError as error:
            raise ChatFileError(f"cannot keep sessions in {self.path.parent}: {error.strerror}") from error
        self._lock = lock
        return read_chat(self.path) if self.path.exists() else None

    def close(self) -> None:
        """Let others have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def session_names() -> list[str]:
    """All sessions there are."""
    folder = state_folder() / "sessions"
    return sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
