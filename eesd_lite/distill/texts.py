"""Training text that the user brings: a JSON lines file.

Each line is an object in one of three forms: `messages` (role and content), ShareGPT `conversations` (from and value),
or plain `text`. A bad line stops the run with its number, before any work is done. Returns token ids per sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eesd_lite.errors import PrepareError
from eesd_lite.progress import Progress, no_progress

if TYPE_CHECKING:
    from eesd_lite.text import TextCodec

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def parse_line(line: str) -> str | list[dict[str, str]]:
    """Plain text, or chat messages with role and content. ValueError says what is wrong."""
    try:
        sample = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(sample, dict):
        raise ValueError(f"a JSON object is needed, not {type(sample).__name__}")
    if "messages" in sample:
        return _messages(sample["messages"], "role", "content")
    if "conversations" in sample:
        return _messages(sample["conversations"], "from", "value")
    if isinstance(sample.get("text"), str):
        return sample["text"]
    raise ValueError("no 'messages', 'conversations' or 'text' in it")


def _messages(turns: object, role_key: str, text_key: str) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise ValueError("the list of messages is empty or no list")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get(text_key), str):
            raise ValueError(f"message {number} has no text '{text_key}'")
        role = _ROLES.get(str(turn.get(role_key)))
        if role is None:
            raise ValueError(f"message {number} has {role_key} {turn.get(role_key)!r}; known: {', '.join(_ROLES)}")
        messages.append({"role": role, "content": turn[text_key]})
    return messages


def read_samples(path: Path, *, samples: int | None = None) -> list[str | list[dict[str, str]]]:
    """All samples of the file, or the first `samples`; blank lines are skipped."""
    path = Path(path)
    found: list[str | list[dict[str, str]]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if samples is not None and len(found) >= samples:
                    break
                if line.strip():
                    try:
                        found.append(parse_line(line))
                    except ValueError as error:
                        raise PrepareError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise PrepareError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not found:
        raise PrepareError(f"{path}: no samples in it; each line is a JSON object with messages, conversations or text")
    return found


def tokenize(
    samples: list[str | list[dict[str, str]]],
    codec: TextCodec,
    *,
    longest: int,
    max_tokens: int | None = None,
    progress: Progress = no_progress,
) -> list[list[int]]:
    """Token ids per sample, each cut to `longest`, until `max_tokens`; samples of fewer than two tokens are dropped."""
    render: Callable[[list[dict[str, str]]], list[int]] = lambda messages: codec.render_chat(  # noqa: E731
        messages, add_generation_prompt=False
    )
    sequences: list[list[int]] = []
    total = 0
    for done, sample in enumerate(samples):
        if done % 100 == 0:
            progress("tokenizing", done, len(samples))
        ids = (codec.encode(sample) if isinstance(sample, str) else render(sample))[:longest]
        if len(ids) < 2:
            continue
        if max_tokens is not None and total + len(ids) > max_tokens:
            break
        sequences.append(ids)
        total += len(ids)
    if len(sequences) < 2:
        raise PrepareError(f"{len(sequences)} usable samples; at least two are needed, one of them to judge")
    return sequences
