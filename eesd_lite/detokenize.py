"""From token ids to text, one at a time: the pieces joined are exactly what decoding all ids at once gives.

A piece is held back while a later token could still change it: an incomplete UTF-8 character, or a run of byte tokens
that is valid so far (one bad byte later in the run turns all of it into replacement marks). Bytes that can no longer
become valid come out at once, so nothing stalls. Work per token is constant for the decoders of the usual tokenizers
(byte-level, SentencePiece-style, Metaspace); others are decoded whole each time. Made by `TextCodec.stream`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

_BAD = "\ufffd"


class Detokenizer(Protocol):
    """Ids in, text out. `flush` ends the stream and gives what was held back."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


TokenText = Callable[[int], "str | None"]  # the vocabulary's spelling of an id; None for ids to be left out
DecodeAll = Callable[[Sequence[int]], str]


def make_detokenizer(decoder: str, token: TokenText, decode: DecodeAll) -> Detokenizer:
    """The detokenizer for a decoder given as JSON (the "decoder" entry of tokenizer.json)."""
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelStream(token)
    if kinds == ["Metaspace"]:
        return _MetaspaceStream(token, steps[0])
    if _is_byte_fallback(steps, kinds):
        return _ByteFallbackStream(token, steps)
    return _WholeStream(token, decode)


@lru_cache(maxsize=8)
def _steps(decoder: str) -> list[dict[str, Any]]:
    settings = json.loads(decoder) or {"type": "none"}
    nested = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    return [dict(step) for step in nested]


def _is_byte_fallback(steps: list[dict[str, Any]], kinds: list[str]) -> bool:
    """Replace*, ByteFallback, Fuse, and at most one Strip at the start: Llama 2, Mistral, Gemma, Phi-3, Yi."""
    while kinds and kinds[0] == "Replace" and "String" in steps[0]["pattern"]:
        steps, kinds = steps[1:], kinds[1:]
    if kinds == ["ByteFallback", "Fuse"]:
        return True
    return kinds == ["ByteFallback", "Fuse", "Strip"] and steps[-1]["stop"] == 0


class _ByteLevelStream:
    """GPT-2 style: every token is bytes, spelt in printable characters."""

    def __init__(self, token: TokenText) -> None:
        self._token = token
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        text = self._token(token_id)
        return "" if text is None else self._utf8.decode(_token_bytes(text))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _MetaspaceStream:
    """Tokens in which a mark stands for a space; the marks of the very first token are dropped."""

    def __init__(self, token: TokenText, settings: dict[str, Any]) -> None:
        self._token = token
        self._mark = settings["replacement"]
        self._space = "" if settings.get("prepend_scheme", "always") != "never" else " "

    def push(self, token_id: int) -> str:
        text = self._token(token_id)
        if text is None:
            return ""
        space, self._space = self._space, " "
        return text.replace(self._mark, space)

    def flush(self) -> str:
        return ""


class _ByteFallbackStream:
    """SentencePiece style: text tokens with replacements, and `<0xE2>` tokens in runs for what has no token."""

    def __init__(self, token: TokenText, steps: list[dict[str, Any]]) -> None:
        self._token = token
        self._replacements = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
        strip = steps[-1] if steps[-1]["type"] == "Strip" else {}
        self._strip: str = strip.get("content", " ")
        self._strip_left: int = strip.get("start", 0)
        self._run = 0  # byte tokens since the last text token
        self._characters = ""  # what they spell so far
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._run_is_bad = False

    def push(self, token_id: int) -> str:
        text = self._token(token_id)
        if text is None:
            return ""
        for old, new in self._replacements:
            text = text.replace(old, new)
        byte = _fallback_byte(text)
        if byte is None:
            return self._stripped(self._end_of_run() + text)
        if self._run_is_bad:
            return self._stripped(_BAD)
        self._run += 1
        try:
            self._characters += self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run_is_bad = True
            return self._stripped(_BAD * self._run)
        return ""

    def flush(self) -> str:
        return self._stripped(self._end_of_run())

    def _end_of_run(self) -> str:
        text = "" if self._run_is_bad else self._characters  # the marks of a bad run are out already
        try:
            self._utf8.decode(b"", final=True)
        except UnicodeDecodeError:  # it ends inside a character
            text = "" if self._run_is_bad else _BAD * self._run
        self._utf8.reset()
        self._run, self._characters, self._run_is_bad = 0, "", False
        return text

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip):
                self._strip_left = 0
                break
            text = text[len(self._strip) :]
            self._strip_left -= 1
        return text


class _WholeStream:
    """Any other decoder: decode everything so far, give what is new; replacement marks at the end wait a little."""

    def __init__(self, token: TokenText, decode: DecodeAll) -> None:
        self._token, self._decode = token, decode
        self._ids: list[int] = []
        self._given = ""

    def push(self, token_id: int) -> str:
        if self._token(token_id) is None:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        settled = text.rstrip(_BAD)
        # A character has at most four bytes: more marks than three cannot be the beginning of one.
        return self._new(settled if len(text) - len(settled) <= 3 else text[:-3])

    def flush(self) -> str:
        return self._new(self._decode(self._ids)) if self._ids else ""

    def _new(self, text: str) -> str:
        if not text.startswith(self._given):
            return ""
        new = text[len(self._given) :]
        self._given = text
        return new


def _fallback_byte(text: str) -> int | None:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return int(text[3:5], 16)
        except ValueError:
            return None
    return None


def _token_bytes(text: str) -> bytes:
    table = _byte_table()
    try:
        return bytes([table[character] for character in text])
    except KeyError:  # an added token, spelt as itself
        return text.encode("utf-8")


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """GPT-2's printable spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
