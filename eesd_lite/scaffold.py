"""A rendered chat, split into the template's own text and the contents of messages.

The template is rendered with marks in place of the contents, so that nothing a user writes can pass for the template's
text, and the result is split at the marks. White space around a content stays outside the mark: templates that trim do
it to the real thing. Where a template looks into a content and changes it, the changed content is used, as content.
Called by `eesd_lite.text`; knows nothing of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eesd_lite.templates import Message

Render = Callable[[Sequence[Message]], str]

_MARK = re.compile(r"EESDMARK([0-9]+)CONTENT")


@dataclass(frozen=True)
class Fragment:
    """A piece of the rendered text; `message` is the index of the message whose content it is, None for scaffold."""

    text: str
    message: int | None = None


def fragments_of(render: Render, messages: Sequence[Message]) -> list[Fragment]:
    """The rendered messages in pieces; what the template raises passes through."""
    contents = {i: m["content"].strip() for i, m in enumerate(messages) if m["content"].strip()}
    marked = [_with_mark(m, i) if i in contents else m for i, m in enumerate(messages)]
    text = render(marked)
    fragments = _split(text, contents)
    if "".join(fragment.text for fragment in fragments) == _rendered(render, messages):
        return fragments
    changed = {i: _as_rendered(render, marked, text, i, messages[i]) or contents[i] for i in contents}
    return _split(text, changed)


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """The same without the system role: its text opens the first user message."""
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    rest = [dict(m) for m in messages if m["role"] != "system"]
    for message in rest:
        if message["role"] == "user":
            message["content"] = f"{system}\n\n{message['content']}"
            return list(rest)
    return [{"role": "user", "content": system}, *rest]


def merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """The same with consecutive messages of one role joined, for templates that want roles to alternate."""
    merged: list[dict[str, str]] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] += "\n\n" + message["content"]
        else:
            merged.append(dict(message))
    return list(merged)


def _with_mark(message: Message, index: int) -> Message:
    core = message["content"].strip()
    before, _, after = message["content"].partition(core)
    return {**message, "content": f"{before}EESDMARK{index}CONTENT{after}"}


def _split(text: str, contents: dict[int, str]) -> list[Fragment]:
    pieces = _MARK.split(text)  # scaffold, index, scaffold, index, ..., scaffold
    fragments = [Fragment(pieces[0])]
    for index, scaffold in zip(pieces[1::2], pieces[2::2], strict=True):
        fragments += [Fragment(contents[int(index)], int(index)), Fragment(scaffold)]
    return [fragment for fragment in fragments if fragment.text or fragment.message is not None]


def _rendered(render: Render, messages: Sequence[Message]) -> str | None:
    # Deliberately broad: a template may choke on contents in any way, and then the marked rendering is what counts.
    try:
        return render(messages)
    except Exception:
        return None


def _as_rendered(render: Render, marked: Sequence[Message], text: str, index: int, message: Message) -> str | None:
    """What the template makes of one content; None when that cannot be told from the text around it.

    All other contents stay marks, so the text before and after is known and cannot be imitated by a content.
    """
    mark = f"EESDMARK{index}CONTENT"
    if text.count(mark) != 1:
        return None
    before, after = text.split(mark)
    real = _rendered(render, [*marked[:index], message, *marked[index + 1 :]])
    if real is None or len(real) < len(before) + len(after):
        return None
    if not (real.startswith(before) and real.endswith(after)):
        return None
    return real[len(before) : len(real) - len(after)]
