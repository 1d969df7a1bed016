"""Text as it becomes certain: stop strings anywhere, held text, ends. The oracle sees everything at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_lite import SamplingParams
from eesd_lite.emitter import Emitter, TokenEvent

EOS = 99


class Pieces:
    """A detokenizer whose token n stands for pieces[n]; `rest` is what it still holds at the end."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.rest


def run(
    pieces: list[str], stop: tuple[str, ...] = (), *, rest: str = "", eos_at: int | None = None
) -> tuple[list[TokenEvent], Emitter]:
    """Push token n for pieces[n], an EOS at `eos_at`, and end by length if nothing else ended it."""
    emitter = Emitter(SamplingParams(stop=stop), frozenset({EOS}), Pieces(pieces, rest))
    events: list[TokenEvent] = []
    for token in range(len(pieces)):
        if not emitter.finished:
            events += emitter.push(EOS if token == eos_at else token, token % 2 == 0)
    if not emitter.finished:
        events += emitter.finish("length")
    return events, emitter


def shown(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def test_without_stop_strings_every_token_is_an_event_at_once() -> None:
    emitter = Emitter(SamplingParams(), frozenset({EOS}), Pieces(["a", "", "bc"]))
    assert list(emitter.push(0, True)) == [TokenEvent(0, "a", True, None)]
    assert list(emitter.push(1, False)) == [TokenEvent(1, "", False, None)]
    assert list(emitter.push(2, True)) == [TokenEvent(2, "bc", True, None)]
    assert list(emitter.finish("length")) == [TokenEvent(None, "", False, "length")]


def test_eos_is_the_last_event_and_carries_what_the_detokenizer_held() -> None:
    events, emitter = run(["a", "b", "c"], rest="\ufffd", eos_at=2)
    assert events[-1] == TokenEvent(EOS, "\ufffd", True, "eos")
    assert emitter.emitted_ids == [0, 1, EOS]


def test_rejected_drafts_stay_with_the_token_that_took_their_place() -> None:
    emitter = Emitter(SamplingParams(stop=("END",)), frozenset({EOS}), Pieces(["x", "E", "X"]))
    assert list(emitter.push(0, False, (7, 8)))[0].rejected == (7, 8)
    assert list(emitter.push(1, False, (5,))) == []
    assert [event.rejected for event in emitter.push(2, True)] == [(5,), ()]
    assert list(emitter.push(EOS, False, (6,)))[-1].rejected == (6,)


def test_eos_is_an_ordinary_token_when_it_is_to_be_ignored() -> None:
    emitter = Emitter(SamplingParams(ignore_eos=True), frozenset({1}), Pieces(["a", "</s>"]))
    assert [event.finish_reason for event in [*emitter.push(0, False), *emitter.push(1, False)]] == [None, None]


def test_a_token_that_may_begin_a_stop_string_is_held_until_it_is_certain() -> None:
    emitter = Emitter(SamplingParams(stop=("END",)), frozenset(), Pieces(["x", "E", "N", "X", "EN", "D"]))
    assert [event.token_id for event in emitter.push(0, False)] == [0]
    assert list(emitter.push(1, False)) == [] and list(emitter.push(2, False)) == []
    assert [event.token_id for event in emitter.push(3, False)] == [1, 2, 3]  # ENX is no END
    assert list(emitter.push(4, False)) == []
    assert list(emitter.push(5, False)) == [TokenEvent(None, "", False, "stop")]
    assert emitter.emitted_ids == [0, 1, 2, 3]


def test_text_before_a_stop_string_inside_one_token_is_shown_without_the_token() -> None:
    events, emitter = run(["so", "me stop!", "more"], ("stop",))
    assert shown(events) == "some " and events[-1] == TokenEvent(None, "me ", False, "stop")
    assert emitter.emitted_ids == [0], "a token that was shown in part is not part of the history"


def test_the_earliest_stop_string_wins_and_longer_ones_are_still_found() -> None:
    assert shown(run(["ab", "cd", "ef"], ("ef", "bc"))[0]) == "a"
    assert shown(run(["ab", "abc", "d"], ("abcd", "zz"))[0]) == "ab"
    assert shown(run(list("aabaac"), ("aac",))[0]) == "aab"


def test_held_text_is_shown_when_the_answer_ends_at_a_limit_or_by_eos() -> None:
    assert shown(run(["x", "E", "N"], ("END",))[0]) == "xEN"
    assert shown(run(["x", "E", "N", "?"], ("END",), eos_at=3)[0]) == "xEN"


def test_tokens_without_text_are_emitted_with_what_they_belong_to() -> None:
    events, emitter = run(["", "", "\U0001f642", "stop", "x"], ("stop",))
    assert shown(events) == "\U0001f642" and emitter.emitted_ids == [0, 1, 2]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=3), min_size=1, max_size=12),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_what_is_shown_is_the_text_up_to_the_first_stop_however_tokens_fall(pieces: list[str], stop: list[str]) -> None:
    events, emitter = run(pieces, tuple(stop))
    # The oracle: as soon as the text so far contains a stop string, cut at the earliest one.
    text, expected, reason = "", "".join(pieces), "length"
    for piece in pieces:
        text += piece
        places = [text.find(word) for word in stop if word in text]
        if places:
            expected, reason = text[: min(places)], "stop"
            break
    assert shown(events) == expected
    assert events[-1].finish_reason == reason and all(event.finish_reason is None for event in events[:-1])
    kept = emitter.emitted_ids
    assert kept == list(range(len(kept))) == [event.token_id for event in events if event.token_id is not None]
    assert expected.startswith("".join(pieces[: len(kept)]))
    if reason == "length":
        assert len(kept) == len(pieces)
    else:
        following = next(piece for piece in pieces[len(kept) :] if piece)  # a token without text is the next one's
        assert len("".join(pieces[: len(kept)]) + following) > len(expected)


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=2), min_size=1, max_size=8),
    stop=st.text(alphabet="ab", min_size=1, max_size=4),
)
def test_nothing_that_a_stop_removes_was_ever_shown(pieces: list[str], stop: str) -> None:
    emitter = Emitter(SamplingParams(stop=(stop,)), frozenset(), Pieces(pieces))
    so_far = ""
    for token in range(len(pieces)):
        if emitter.finished:
            break
        so_far += shown(list(emitter.push(token, False)))
        assert stop not in so_far
