"""From chosen tokens to events: text as it becomes certain, stop strings, the reason why an answer ends.

A token is held back while its text might be the beginning of a stop string, so that nothing that a stop removes was
ever shown. Search covers all held text, wherever a stop string begins. Used by `eesd_lite.engine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from eesd_lite.params import SamplingParams


@dataclass(frozen=True)
class TokenEvent:
    """One emitted token. The last event has a `finish_reason`: eos, stop, length or context.

    `token_id` is None only in a last event that hands over text which was held back, or the part of a token before a
    stop string. `drafted` says whether the exit head had proposed the token, `rejected` what it had proposed instead.
    """

    token_id: int | None
    text: str
    drafted: bool
    finish_reason: str | None
    rejected: tuple[int, ...] = ()  # drafted ids that this token put an end to, in order; for a view of the drafts


class TextStream(Protocol):
    """A streaming detokenizer (`text.TextCodec.stream`)."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True)
class _Held:
    token_id: int
    text: str
    drafted: bool
    rejected: tuple[int, ...] = ()


class Emitter:
    """One answer. `push` every token in order until `finished`; then, or at a limit, `finish`."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], stream: TextStream) -> None:
        self._stop = params.stop
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._stream = stream
        self._held: deque[_Held] = deque()
        self.finished = False
        self.emitted_ids: list[int] = []

    def push(self, token_id: int, drafted: bool, rejected: tuple[int, ...] = ()) -> Iterator[TokenEvent]:
        """Events that have become certain with this token."""
        assert not self.finished, token_id
        if token_id in self._eos:
            yield from self._close("eos", _Held(token_id, "", drafted, rejected))
            return
        self._held.append(_Held(token_id, self._stream.push(token_id), drafted, rejected))
        text = "".join(held.text for held in self._held)
        found = self._find_stop(text)
        if found is not None:
            yield from self._cut(found)
            return
        certain = len(text) - self._possible_stop(text)
        while self._held and len(self._held[0].text) <= certain:
            certain -= len(self._held[0].text)
            yield self._emit(self._held.popleft())

    def finish(self, reason: str) -> Iterator[TokenEvent]:
        """End at a limit: everything held is shown."""
        yield from self._close(reason, None)

    def _close(self, reason: str, last: _Held | None) -> Iterator[TokenEvent]:
        self.finished = True
        while self._held:
            yield self._emit(self._held.popleft())
        rest = self._stream.flush()
        if last is None:
            yield TokenEvent(None, rest, False, reason)
            return
        self.emitted_ids.append(last.token_id)
        yield TokenEvent(last.token_id, rest, last.drafted, reason, last.rejected)

    def _cut(self, end: int) -> Iterator[TokenEvent]:
        """Emit the tokens whose text ends at or before `end`, then the text of the next one up to there."""
        self.finished = True
        while self._held and len(self._held[0].text) <= end and end > 0:
            end -= len(self._held[0].text)
            yield self._emit(self._held.popleft())
        rest = self._held[0].text[:end] if self._held else ""
        self._held.clear()
        yield TokenEvent(None, rest, False, "stop")

    def _emit(self, held: _Held) -> TokenEvent:
        self.emitted_ids.append(held.token_id)
        return TokenEvent(held.token_id, held.text, held.drafted, None, held.rejected)

    def _find_stop(self, text: str) -> int | None:
        places = [text.find(stop) for stop in self._stop]
        return min((place for place in places if place >= 0), default=None)

    def _possible_stop(self, text: str) -> int:
        """Length of the longest tail of `text` that a stop string begins with."""
        longest = max((len(stop) for stop in self._stop), default=1)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
