"""What a model folder says about its tokenizer: the tokenizer itself, special tokens, BOS, and the ids that end a text.

Reads tokenizer.json with the `tokenizers` library, and lets transformers convert other formats. Settings disagree
between files in the wild, so everything is read once, here, into one record. Called by `eesd_lite.text`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eesd_lite.errors import ModelError
from quant.errors import remedy, shown

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer and what the files around it say."""

    tokenizer: Tokenizer
    settings: Mapping[str, Any]  # tokenizer_config.json
    special: Mapping[str, str]  # "bos_token": "<s>", ... as chat templates expect them
    bos_id: int | None
    adds_bos: bool  # whether the tokenizer puts a BOS before plain text
    eos_ids: frozenset[int]  # of all files together
    hidden_ids: frozenset[int]  # never shown: special tokens and those that end a text
    vocab_size: int
    added: Mapping[int, AddedToken]  # as the files have them


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Everything about the tokenizer in a model folder; ModelError with the file when it cannot be read."""
    settings = _read_json(folder / "tokenizer_config.json")
    tokenizer = _load(folder)
    _add_listed_tokens(tokenizer, settings)
    special = _special_tokens(settings, _read_json(folder / "special_tokens_map.json"))
    added = tokenizer.get_added_tokens_decoder()
    eos_ids = set()
    for name in ("config.json", "generation_config.json"):
        eos_ids |= _ids(_read_json(folder / name).get("eos_token_id"))
    eos = tokenizer.token_to_id(special["eos_token"]) if special["eos_token"] else None
    eos_ids |= _ids(eos)
    try:
        bos_id, adds_bos = _bos(tokenizer, settings, special)
    except Exception as error:  # the library raises plain Exception, for an unk_token that is not in the vocabulary
        raise ModelError(f"{folder}: the tokenizer cannot encode text ({shown(error)}); copy the model's own") from None
    hidden = {i for i, token in added.items() if token.special} | eos_ids | _ids(bos_id)
    return TokenizerFacts(
        tokenizer=tokenizer,
        settings=settings,
        special=special,
        bos_id=bos_id,
        adds_bos=adds_bos,
        eos_ids=frozenset(eos_ids),
        hidden_ids=frozenset(hidden),
        # The highest id counts, not the number of entries: some vocabularies have holes.
        vocab_size=1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
        added=added,
    )


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} is not a readable tokenizer ({error}); fetch the file again") from error
    elif any((folder / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = _converted(folder)
    else:
        raise ModelError(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model); copy the model's own there")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _converted(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # dozens of kinds, depending on the format
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder}: transformers cannot read the tokenizer ({reason})") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{folder}: this tokenizer has no fast version; save one with transformers as tokenizer.json")
    return backend


def _add_listed_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Some folders list added tokens in tokenizer_config.json only."""
    from tokenizers import AddedToken

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for number, content, entry in _listed_tokens(settings):
        if content in known:
            continue
        here = tokenizer.token_to_id(content)
        if here is None and tokenizer.get_vocab_size() != number:
            continue  # it would get another id than the model knows it by
        options = {name: bool(entry[name]) for name in _TOKEN_FLAGS if name in entry}
        token = AddedToken(content, special=bool(entry.get("special")), **options)
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])


def _listed_tokens(settings: Mapping[str, Any]) -> list[tuple[int, str, Mapping[str, Any]]]:
    """(id, text, entry) of what tokenizer_config.json adds, by id; ModelError for anything of another form."""
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        return []
    found = []
    for key, entry in listed.items() if isinstance(listed, dict) else [("", listed)]:
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isascii() or not key.isdigit() or len(key) > 9 or not isinstance(content, str) or not content:
            raise ModelError(
                f"tokenizer_config.json: added_tokens_decoder is damaged at '{shown(key)}': {shown(entry)}; "
                "fetch the file again"
            )
        found.append((int(key), content, entry))
    return sorted(found, key=lambda item: item[0])


def _special_tokens(settings: Mapping[str, Any], listed: Mapping[str, Any]) -> dict[str, str]:
    special = {"bos_token": "", "eos_token": ""}  # templates add these to strings: empty is safe, missing is not
    for source in (listed, settings):
        for name, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                special[name] = content
    return special


def _bos(tokenizer: Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> tuple[int | None, bool]:
    bos_id = tokenizer.token_to_id(special["bos_token"]) if special["bos_token"] else None
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    dressed = tokenizer.encode("a", add_special_tokens=True).ids
    prefix = dressed[: len(dressed) - len(plain)] if dressed != plain else []
    wanted = settings.get("add_bos_token")
    if bos_id is None and prefix and prefix[0] != plain[0] and wanted is not False:
        return prefix[0], True
    adds = wanted if isinstance(wanted, bool) else bool(prefix) and prefix[0] == bos_id
    return bos_id, adds and bos_id is not None


def _ids(value: Any) -> set[int]:
    if isinstance(value, bool) or value is None:
        return set()
    values = value if isinstance(value, list) else [value]
    return {int(item) for item in values if isinstance(item, int) and item >= 0}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON ({error}); {remedy(error)}") from error
    return found if isinstance(found, dict) else {}
