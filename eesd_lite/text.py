"""Text and token ids: encoding, exact streaming decoding, chat templates, and the ids that end an answer.

Control tokens come from the template's own text only: what users wrote is tokenized with control tokens switched off,
yet together with the template text around it, so that ids are those of Hugging Face for harmless messages.
Used by the engine and by `eesd_lite.chat`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eesd_lite.detokenize import Detokenizer, make_detokenizer
from eesd_lite.errors import PromptError
from eesd_lite.scaffold import Fragment, fold_system, fragments_of, merge_neighbours
from eesd_lite.templates import (
    ChatTemplate,
    Message,
    TemplateLimitError,
    TemplateRefusal,
    fallback_template,
    own_template,
)
from eesd_lite.tokenizer_files import TokenizerFacts, read_tokenizer

# An added token that we put before a span which does not start the text: tokenizers treat the two differently.
# Private-use characters, so that only somebody who wants to be rid of them writes this.
_GUARD = "\ue0ee\ue0e5\ue0ddguard\ue0ee"


@dataclass(frozen=True)
class Continuation:
    """Ids between an answer and the next one: `closing` ends the answer's turn, `rest` is the next question's turn."""

    closing: tuple[int, ...]
    rest: tuple[int, ...]


@dataclass(frozen=True)
class _Control:
    """A token that only a template may write; white space beside it is dropped if the tokenizer says so."""

    id: int
    lstrip: bool
    rstrip: bool


class TextCodec:
    """The tokenizer and chat template of one model. `notices` says what had to be assumed, for the program to show."""

    def __init__(self, facts: TokenizerFacts, template: ChatTemplate, notices: tuple[str, ...] = ()) -> None:
        from tokenizers import AddedToken

        self._facts = facts
        self._tokenizer = facts.tokenizer
        self.template = template
        self.notices = notices
        self._control = self._find_control_tokens()
        # A special token is never recognised inside text from here on (and stays visible if it was before).
        self._tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self._control])
        self._tokenizer.add_tokens([AddedToken(_GUARD, special=False, normalized=False)])
        self._tokenizer.encode_special_tokens = True
        self._control_ids = frozenset(control.id for control in self._control.values())
        names = sorted(self._control, key=len, reverse=True)  # the longest match wins, as in the tokenizer
        self._pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._decoder = "null"
        if self._tokenizer.decoder is not None:
            self._decoder = bytes(self._tokenizer.decoder.__getstate__()).decode("utf-8")

    @classmethod
    def from_folder(cls, folder: str | Path, *, template: str | None = None) -> TextCodec:
        """Read a model folder; `template` names a layout to use instead of the model's own."""
        facts = read_tokenizer(Path(folder))
        if template is not None:
            return cls(facts, fallback_template(template))
        own = own_template(Path(folder), facts.settings)
        if own is not None:
            return cls(facts, own)
        return cls(
            facts,
            fallback_template("plain"),
            ("the model has no chat template: using 'plain'; others: --template llama2, vicuna, alpaca or chatml",),
        )

    # --- plain text ---

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of plain text, as the tokenizer itself would give them, but with no control token out of `text`."""
        ids = self._span(text, start=True)
        return self._with_one_bos(ids) if add_bos else ids

    def encode_more(self, text: str) -> list[int]:
        """Ids of plain text that follows other text."""
        return self._span_inside_text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all ids at once. Special tokens, and ids that the tokenizer does not know, give nothing."""
        return self._tokenizer.decode(
            [int(i) for i in ids if self._token(int(i)) is not None], skip_special_tokens=False
        )

    def stream(self) -> Detokenizer:
        """A decoder for one answer, token by token."""
        return make_detokenizer(self._decoder, self._token, self.decode)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id of the tokenizer; a model may have more rows than this."""
        return self._facts.vocab_size

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids the same meaning."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()[:16]

    @property
    def bos_token_id(self) -> int | None:
        return self._facts.bos_id

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer: those of all the model's files, and the token that closes a turn in the template."""
        return self._facts.eos_ids | ({self._end_of_turn} if self._end_of_turn is not None else set())

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer: layouts without control tokens need them."""
        return self.template.stop

    # --- chats ---

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a whole conversation, with exactly the BOS that the model expects."""
        return self._with_one_bos(self._ids(self._fragments(messages, add_generation_prompt), start=True))

    def answer_ids(self, question: str, answer: str) -> list[int]:
        """Ids of an answer of which only the text is known, as the template would have it, with its end of turn."""
        asked = [{"role": "user", "content": question}]
        prompt = self.render_chat(asked)
        whole = self.render_chat([*asked, {"role": "assistant", "content": answer}], add_generation_prompt=False)
        rest = whole[len(prompt) :]
        ends = [place for place, token in enumerate(rest) if token in self.eos_token_ids]
        if whole[: len(prompt)] != prompt or not ends:
            return self.encode_more(answer)
        return rest[: ends[0] + 1]

    def continuation(self, messages: Sequence[Message]) -> Continuation | None:
        """Ids that follow the last assistant content of `messages`; None if the template does not show that content.

        The content itself does not matter: its ids are those that the model produced.
        """
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        marked = [{**m, "content": "x"} if i == last else m for i, m in enumerate(messages)]
        adds_prompt = last < len(messages) - 1
        # No folding here: indices must stay. A system message that the template refuses is of no use to what follows.
        if self.folds_system and marked[0]["role"] == "system":
            marked, last = marked[1:], last - 1
        fragments = self._fragments(marked, adds_prompt)
        places = [n for n, fragment in enumerate(fragments) if fragment.message == last]
        if len(places) != 1:
            return None
        return self._split_closing(fragments[places[0] + 1 :])

    @cached_property
    def folds_system(self) -> bool:
        """Whether the template refuses or ignores the system role, so that its text goes into the first question."""
        user = {"role": "user", "content": "x"}
        system = {"role": "system", "content": "EESDSYSTEMPROBE"}
        try:
            return "EESDSYSTEMPROBE" not in self._render([system, user], True)
        except TemplateLimitError:  # as it is with any question: said at once
            raise
        except (TemplateRefusal, PromptError):
            return True

    # --- how it is done ---

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        special = self._facts.special
        return self.template.render(messages, special=special, add_generation_prompt=add_generation_prompt)

    def _fragments(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Fragment]:
        if not messages or any(not isinstance(m.get("content"), str) or "role" not in m for m in messages):
            raise PromptError("a chat is a list of messages, each with a 'role' and a text as its 'content'")
        if any(m["role"] == "system" for m in messages) and self.folds_system:
            messages = fold_system(messages)

        def render(chat: Sequence[Message]) -> str:
            return self._render(chat, add_generation_prompt)

        try:
            return fragments_of(render, messages)
        except TemplateRefusal as refusal:
            merged = merge_neighbours(messages)
            try:
                if len(merged) < len(messages):
                    return fragments_of(render, merged)
            except TemplateRefusal:
                pass
            raise PromptError(f"the chat template refuses this conversation: {refusal}") from refusal

    def _ids(self, fragments: Sequence[Fragment], *, start: bool) -> list[int]:
        """Scaffold with control tokens, contents without; plain text between two control tokens is one span."""
        spans, controls = self._spans(fragments)
        ids: list[int] = []
        for n, span in enumerate(spans):
            if n == 0 and not start:
                ids += self._span_inside_text(span)
            else:
                ids += self._span(span, start=n == 0)
            if n < len(controls):
                ids.append(controls[n].id)
        return ids

    def _spans(self, fragments: Sequence[Fragment]) -> tuple[list[str], list[_Control]]:
        """Plain spans and the control tokens between them (one span more than tokens)."""
        spans, controls = [""], []
        for fragment in fragments:
            pieces = [fragment.text]
            if fragment.message is None and self._pattern is not None:
                pieces = self._pattern.split(fragment.text)
            spans[-1] += pieces[0]
            for name, after in zip(pieces[1::2], pieces[2::2], strict=True):
                controls.append(self._control[name])
                spans.append(after)
        for n, control in enumerate(controls):
            spans[n] = spans[n].rstrip() if control.lstrip else spans[n]
            spans[n + 1] = spans[n + 1].lstrip() if control.rstrip else spans[n + 1]
        return spans, controls

    def _split_closing(self, fragments: Sequence[Fragment]) -> Continuation:
        """Cut after the first control token if nothing but white space comes before it."""
        spans, controls = self._spans(fragments)
        ids = self._ids(fragments, start=False)
        if not controls or spans[0].strip():
            return Continuation((), tuple(ids))
        cut = ids.index(controls[0].id) + 1
        return Continuation(tuple(ids[:cut]), tuple(ids[cut:]))

    def _span(self, text: str, *, start: bool) -> list[int]:
        """Ids of text without control tokens; not `start`: text that follows a control token."""
        # Lone surrogates (undecodable bytes of an argument or a pasted text) are no characters.
        text = text.replace(_GUARD, "").encode("utf-8", "replace").decode("utf-8")
        if not text:
            return []
        offset = 0 if start else len(_GUARD)
        encoding = self._tokenizer.encode(text if start else _GUARD + text, add_special_tokens=False)
        ids = encoding.ids if start else encoding.ids[1:]
        if self._control_ids.isdisjoint(ids):
            return ids
        # Some models have their control tokens in the plain vocabulary too: take the text apart inside such a token.
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control_ids and end - begin > 1:
                cut = begin - offset + 1
                return self._span(text[:cut], start=start) + self._span(text[cut:], start=False)
        return ids

    def _span_inside_text(self, text: str) -> list[int]:
        """Ids of text that follows other text: some tokenizers would put a space before it otherwise."""
        if not text or not self._adds_space:
            return self._span(text, start=False)
        for anchor in ("a", ".", "1"):
            alone, both = self._span(anchor, start=False), self._span(anchor + text, start=False)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return self._span(text, start=False)

    @cached_property
    def _adds_space(self) -> bool:
        return [self._tokenizer.id_to_token(i) for i in self._span("a", start=False)] != ["a"]

    @cached_property
    def _end_of_turn(self) -> int | None:
        try:
            found = self.continuation([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}])
        except TemplateLimitError:
            raise
        except PromptError:
            return None
        return found.closing[-1] if found is not None and found.closing else None

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self._facts.bos_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if self._facts.adds_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def _token(self, token_id: int) -> str | None:
        if token_id in self._facts.hidden_ids or not 0 <= token_id < self._facts.vocab_size:
            return None
        return self._tokenizer.id_to_token(token_id)

    def _find_control_tokens(self) -> dict[str, _Control]:
        """Special tokens, tokens that end a text, and added tokens that look like, or are, the template's markers."""
        found = {}
        for token_id in self._facts.hidden_ids:  # those that are ordinary entries of the vocabulary among them
            text = self._tokenizer.id_to_token(token_id)
            if text:
                found[text] = _Control(token_id, lstrip=False, rstrip=False)
        for token_id, token in self._facts.added.items():
            text = token.content
            looks = "<|" in text or (len(text) > 2 and not text[0].isalnum() and text in self.template.source)
            if text in found or (looks and text.strip()):
                found[text] = _Control(token_id, token.lstrip, token.rstrip)
        return found
