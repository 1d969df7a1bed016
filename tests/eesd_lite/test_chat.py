"""A conversation's ids: each turn extends the one before, whatever the tokenizer would make of the text again."""

from __future__ import annotations

from pathlib import Path

import pytest

from eesd_lite.chat import Conversation
from eesd_lite.errors import PromptError
from eesd_lite.text import TextCodec
from tests.eesd_lite.tiny_tokenizers import CHATML, byte_level, sentencepiece

END = 2  # <|im_end|> and </s>


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.from_folder(byte_level(tmp_path))


def said(codec: TextCodec, text: str) -> list[int]:
    return codec.encode(text, add_bos=False)


def talk(conversation: Conversation, codec: TextCodec, question: str, answer: str, *, end: bool = True) -> list[int]:
    ids = conversation.ask(question)
    conversation.answered(said(codec, answer) + [END] * end, answer)
    return ids


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_turn_extends_the_ids_of_the_turn_before(tmp_path: Path, make, system: str | None) -> None:  # type: ignore[no-untyped-def]
    codec = TextCodec.from_folder(make(tmp_path))
    conversation = Conversation(codec, system)
    have: list[int] = []
    for n, answer in enumerate(["I am fine.", "Paris", "one two"]):
        ids = conversation.ask(f"question {n}")
        assert ids[: len(have)] == have and len(ids) > len(have)
        answer_ids = [*said(codec, answer), END]
        conversation.answered(answer_ids, answer)
        have = ids + answer_ids


def test_a_conversation_has_the_ids_of_its_rendered_messages(codec: TextCodec) -> None:
    conversation = Conversation(codec, "Be brief.")
    talk(conversation, codec, "Hello", "I am fine.")
    talk(conversation, codec, "And you?", "Paris")
    ids = conversation.ask("Who?")
    assert ids == codec.render_chat([*conversation.messages, {"role": "user", "content": "Who?"}])


def test_an_answer_cut_short_is_closed_by_the_template(codec: TextCodec) -> None:
    cut, whole = Conversation(codec), Conversation(codec)
    talk(cut, codec, "Hello", "I am", end=False)
    talk(whole, codec, "Hello", "I am")
    assert cut.ask("Go on") == whole.ask("Go on")


def test_another_end_of_text_than_the_templates_is_replaced(tmp_path: Path) -> None:
    codec = TextCodec.from_folder(byte_level(tmp_path, eos_token="<|endoftext|>"))
    conversation = Conversation(codec)
    first = conversation.ask("Hello")
    conversation.answered([*said(codec, "fine"), 0], "fine")
    ids = conversation.ask("x")
    assert 0 not in ids and ids[: len(first)] == first
    assert ids == codec.render_chat([*conversation.messages, {"role": "user", "content": "x"}])


def test_answers_are_never_encoded_again(codec: TextCodec) -> None:
    spelled_out = [token for letter in "Hello" for token in said(codec, letter)]
    assert spelled_out != said(codec, "Hello")
    conversation = Conversation(codec)
    first = conversation.ask("Hi")
    conversation.answered(spelled_out, "Hello")
    assert conversation.ask("x")[: len(first) + 5] == first + spelled_out


def test_new_lines_do_not_merge_across_the_end_of_an_answer(tmp_path: Path) -> None:
    codec = TextCodec.from_folder(byte_level(tmp_path, None))  # plain layout: "\nUser:" follows the answer
    conversation = Conversation(codec)
    first, answer = conversation.ask("Hi"), said(codec, " fine\n")
    conversation.answered(answer, " fine\n")
    ids = conversation.ask("x")
    assert ids[: len(first + answer)] == first + answer
    assert codec.decode(ids) == "User: Hi\nAssistant: fine\n\nUser: x\nAssistant:"


@pytest.mark.parametrize("prefix", ["normalizer", "first"])
@pytest.mark.parametrize("template", ["plain", "llama2", "vicuna", "alpaca", "chatml"])
def test_text_layouts_continue_without_extra_spaces(tmp_path: Path, prefix: str, template: str) -> None:
    codec = TextCodec.from_folder(sentencepiece(tmp_path, prefix=prefix), template=template)
    conversation = Conversation(codec)
    prompt = conversation.ask("Hello world")
    rendered = codec.render_chat(
        [{"role": "user", "content": "Hello world"}, {"role": "assistant", "content": "MARK"},
         {"role": "user", "content": "how are you"}]
    )  # fmt: skip
    conversation.answered(codec.encode_more("MARK" if template in ("alpaca", "chatml") else " MARK"), "MARK")
    ids = conversation.ask("how are you")
    assert ids[: len(prompt)] == prompt
    assert codec.decode(ids) == codec.decode(rendered)


def test_a_question_counts_only_once_it_is_answered(codec: TextCodec) -> None:
    conversation = Conversation(codec)
    talk(conversation, codec, "Hello", "fine")
    before = conversation.ask("x")
    conversation.withdraw()
    assert len(conversation.messages) == 2 and conversation.ask("x") == before


def test_reset_keeps_the_system_prompt_only(codec: TextCodec) -> None:
    conversation = Conversation(codec, "Be brief.")
    first = talk(conversation, codec, "Hello", "fine")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.ask("Hello") == first


def test_a_full_context_loses_its_oldest_turns_and_says_so(codec: TextCodec) -> None:
    conversation = Conversation(codec, "Be brief.", context=128, reserve=16)
    notices = []
    for n in range(12):
        ids = talk(conversation, codec, f"question number {n}", f"answer {n}")
        text = codec.decode(ids)
        assert len(ids) + 16 <= 128
        assert text.startswith("system\nBe brief.\n") and f"question number {n}\n" in text
        shown = [i for i in range(n + 1) if f"question number {i}\n" in text]
        assert shown == list(range(shown[0], n + 1)), "whole turns leave, oldest first"
        assert all(f"answer {i}\n" in text for i in shown[:-1])
        notices += conversation.take_notices()
    assert 0 < len(notices) < 10 and "the context of 128 tokens is full" in notices[0]


def test_after_turns_were_dropped_the_next_turn_extends_again(codec: TextCodec) -> None:
    conversation = Conversation(codec, context=128, reserve=8)
    extended, have = 0, []
    for n in range(12):
        ids = conversation.ask(f"question number {n}")
        extended += ids[: len(have)] == have
        conversation.answered([*said(codec, "fine"), END], "fine")
        have = [*ids, *said(codec, "fine"), END]
    assert extended >= 8, "room is made for several turns at once, so that the cache is not recomputed every time"


def test_a_message_that_cannot_fit_is_refused_with_both_numbers_and_nothing_is_lost(codec: TextCodec) -> None:
    conversation = Conversation(codec, context=64, reserve=8)
    talk(conversation, codec, "Hello", "fine")
    long = "word " * 200
    needed = len(codec.render_chat([{"role": "user", "content": long}]))
    with pytest.raises(PromptError, match=f"needs {needed} tokens .* context holds 64"):
        conversation.ask(long)
    assert len(conversation.messages) == 2
    assert conversation.ask("x")


def test_a_template_that_rewrites_the_past_is_rendered_whole(tmp_path: Path) -> None:
    only_last = CHATML.replace("for m in messages", "for m in messages[-1:]")
    codec = TextCodec.from_folder(byte_level(tmp_path, only_last))
    conversation = Conversation(codec)
    talk(conversation, codec, "Hello", "fine")
    assert codec.decode(conversation.ask("x")) == "user\nx\nassistant\n"


def test_notices_of_the_codec_and_of_a_folded_system_prompt_are_given_once(tmp_path: Path) -> None:
    codec = TextCodec.from_folder(sentencepiece(tmp_path))
    conversation = Conversation(codec, "Be brief.")
    assert conversation.take_notices() == [
        "the chat template takes no system prompt: it goes in front of the first question"
    ]
    assert conversation.take_notices() == []
    assert codec.decode(conversation.ask("Hello")) == "[INST] Be brief.\n\nHello [/INST]"
    plain = TextCodec.from_folder(byte_level(tmp_path / "none", None))
    assert "no chat template" in Conversation(plain).take_notices()[0]


@pytest.mark.real
def test_the_demo_model_talks_in_extending_ids(demo_model: Path) -> None:
    codec = TextCodec.from_folder(demo_model)
    conversation = Conversation(codec)
    first = talk(conversation, codec, "What is the capital of France?", "Paris, of course.")
    ids = conversation.ask("And of Spain?")
    assert ids[: len(first)] == first
    assert ids == codec.render_chat([*conversation.messages, {"role": "user", "content": "And of Spain?"}])
