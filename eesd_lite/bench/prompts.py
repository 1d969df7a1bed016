"""The prompts of a benchmark: those shipped with the package, or a file of the user's own.

A file is JSONL, one object with `prompt` (and perhaps `id`) a line, or plain text with one prompt a line. Used by
`eesd_lite.bench.run`; a file that cannot be read is refused with its line number before a model is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eesd_lite.errors import PromptError

SHIPPED_PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str


def load_prompts(path: Path | None = None, limit: int | None = None) -> tuple[Prompt, ...]:
    """The prompts of a file (None: the shipped ones), or the first `limit` of them."""
    source = SHIPPED_PROMPTS if path is None else path
    if limit is not None and limit < 1:
        raise PromptError(f"the number of prompts must be at least 1, not {limit}")
    try:
        text = source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read the prompts file {source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{source} is not UTF-8 text (byte {error.start}); prompts are JSONL or plain lines"
        ) from error
    is_jsonl = source.suffix in (".jsonl", ".json") or text.lstrip().startswith("{")
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{source}, line {number}"
            prompts.append(_from_json(line, place, str(number)) if is_jsonl else Prompt(str(number), line.strip()))
    if not prompts:
        raise PromptError(f'{source} holds no prompts; write one a line, as text or as JSON with a key "prompt"')
    return tuple(prompts[:limit])


def _from_json(line: str, place: str, number: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{place}: not JSON ({error})") from error
    text = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f'{place}: expected an object with a non-empty text "prompt"')
    return Prompt(str(value.get("id", number)), text)
