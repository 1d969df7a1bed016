"""What the small files say about text: how many tokens, which ids end an answer, which chat template.

From JSON alone, so that it can be said of a tokenizer that does not work, too. What counts when a model runs is
`tokenizer_files` and `text`. Plain Python; used by `inspection`, which also lets the library open the tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd_lite.errors import ModelError
from eesd_lite.templates import own_template
from quant.errors import remedy

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
_LARGEST = 128 * 2**20


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """`tokens` is one more than the highest id; None where only the tokenizer itself could tell."""

    tokenizer: str  # the file
    tokens: int | None
    bos: str
    eos_ids: tuple[int, ...]
    template: str
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def read_text_facts(folder: Path) -> TextFacts:
    """Never raises for what a folder holds: what cannot be read is a problem."""
    problems: list[str] = []
    notes: list[str] = []
    settings = _read(folder / "tokenizer_config.json", problems)
    tokenizer = _read(folder / "tokenizer.json", problems)
    file = "tokenizer.json" if (folder / "tokenizer.json").is_file() else ""
    file = file or next((name for name in _OTHER_TOKENIZERS if (folder / name).is_file()), "")
    if not file:
        problems.append(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); copy the model's own there")
    ids = _token_ids(tokenizer)
    eos: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        eos |= _whole(_read(folder / name, problems if name != "config.json" else []).get("eos_token_id"))
    special = {**_read(folder / "special_tokens_map.json", problems), **settings}
    end, begin = _content(special.get("eos_token")), _content(special.get("bos_token"))
    if end in ids:
        eos.add(ids[end])
    if not eos:
        notes.append("no file names a token that ends an answer: it runs to its limit")
    return TextFacts(
        tokenizer=file or "none",
        tokens=max(ids.values()) + 1 if ids else None,
        bos=begin or "none",
        eos_ids=tuple(sorted(eos)),
        template=_template(folder, settings, notes, problems),
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _read(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path.stat().st_size} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} is not readable JSON ({' '.join(str(error).split())[:120]}); {remedy(error)}")
        return {}
    return found if isinstance(found, dict) else {}


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: pieces with their scores, in the order of their ids
        ids = {str(entry[0]): n for n, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    elif isinstance(vocab, dict):
        ids = {text: n for text, n in vocab.items() if isinstance(n, int)}
    else:
        ids = {}
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str):
            ids[token["content"]] = token["id"]
    return ids


def _whole(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}


def _content(token: Any) -> str:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _template(folder: Path, settings: dict[str, Any], notes: list[str], problems: list[str]) -> str:
    try:
        own = own_template(folder, settings)
    except (OSError, ValueError, AttributeError, ModelError) as error:
        problems.append(f"{folder}: the chat template cannot be read ({' '.join(str(error).split())[:120]})")
        return "unreadable"
    if own is None:
        notes.append("no chat template: 'plain' is used; others: --template llama2, vicuna, alpaca or chatml")
        return "none (fallback plain)"
    return f"own, {len(own.source)} characters"
