"""A conversation as token ids: every turn extends the ids of the turn before, so that the engine's cache stays valid.

An answer is kept as the ids that the model produced and never encoded again; only the next question and the template's
text around it are. When the context is full, the oldest whole turns leave; system prompt and last question stay.
Used by the chat program; needs a TextCodec, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eesd_lite.errors import PromptError
from eesd_lite.text import Continuation, TextCodec

# After turns had to leave, this share of the room is free again: dropping moves everything that follows, so the cache
# is recomputed, and that should not happen at every turn.
_FREED = 0.25


@dataclass(frozen=True)
class Turn:
    """A question and its answer; `answer_ids` are what the model produced, an end-of-turn id included if it came."""

    question: str
    answer: str
    answer_ids: tuple[int, ...]


class Conversation:
    """Questions and answers of one session. `context` is how many tokens fit, `reserve` how many an answer may need."""

    def __init__(
        self, codec: TextCodec, system: str | None = None, *, context: int | None = None, reserve: int = 256
    ) -> None:
        self._codec = codec
        self._system = system
        self._context = context
        self.reserve_for_answer(reserve)
        self._turns: list[Turn] = []
        self._left: list[Turn] = []  # older turns, which are no longer in the context
        self._asked: str | None = None
        self._known: dict[tuple[str, str], Continuation | None] = {}
        self._notices: list[str] = list(codec.notices)
        self._folding_said = False
        self._say_folding()

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = text or None
        self._known.clear()
        self._say_folding()

    def _say_folding(self) -> None:
        if self._system and self._codec.folds_system and not self._folding_said:
            self._folding_said = True
            self._notices.append("the chat template takes no system prompt: it goes in front of the first question")

    def reserve_for_answer(self, tokens: int) -> None:
        """Room that a question leaves for its answer; at most a quarter of the context."""
        self._reserve = min(tokens, self._context // 4) if self._context is not None else tokens

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, oldest first, also those that are no longer in the context."""
        return (*self._left, *self._turns)

    @property
    def forgotten(self) -> int:
        """How many of the oldest turns are no longer in the context."""
        return len(self._left)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said so far, system prompt first, as far as it still is in the context."""
        messages = self._opening()
        for turn in self._turns:
            messages += [_user(turn.question), {"role": "assistant", "content": turn.answer}]
        return messages

    def ask(self, text: str) -> list[int]:
        """Ids to generate the answer from. The question counts only once `answered` is called.

        Drops the oldest turns if there is no room; PromptError with both numbers if not even the question alone fits.
        """
        ids = self._ids(self._turns, text)
        kept = self._turns
        if self._context is not None and len(ids) + self._reserve > self._context:
            room = int((self._context - self._reserve) * (1 - _FREED))
            while kept and len(ids) > room:
                kept = kept[1:]
                ids = self._ids(kept, text)
            if len(ids) >= self._context:
                raise PromptError(
                    f"the message needs {len(ids)} tokens with its template, the context holds {self._context}: "
                    "shorten it or start with a larger --context"
                )
        self._leave(len(self._turns) - len(kept))
        self._asked = text
        return ids

    def _leave(self, count: int) -> None:
        """The oldest turns go; that is said once, because in a full context it goes on for ever."""
        if count and not self._left:
            self._notices.append(
                f"the context of {self._context} tokens is full: from now on the oldest turns leave it "
                f"({count} now); the system prompt stays"
            )
        self._left, self._turns = [*self._left, *self._turns[:count]], self._turns[count:]

    def answered(self, ids: Sequence[int], text: str) -> None:
        """Keep the answer to the last question: the ids that were emitted, complete or cut short."""
        assert self._asked is not None, "answered() without ask()"
        self._turns = [*self._turns, Turn(self._asked, text, tuple(ids))]
        self._asked = None

    def withdraw(self) -> None:
        """Forget the last question, to which there was no answer."""
        self._asked = None

    def undo(self) -> Turn | None:
        """Take the last turn back; None if there is none."""
        if not self._turns and not self._left:
            return None
        return (self._turns or self._left).pop()

    def again(self, turn: Turn) -> None:
        """Put back what `undo` took."""
        self._turns = [*self._turns, turn]

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.restore((), 0)

    def restore(self, turns: Sequence[Turn], forgotten: int) -> None:
        """Go on from these turns, of which the first `forgotten` are not in the context."""
        self._left, self._turns, self._asked = list(turns[:forgotten]), list(turns[forgotten:]), None
        self._known.clear()

    def take_notices(self) -> list[str]:
        """What the user should be told, each once."""
        notices, self._notices = self._notices, []
        return notices

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []

    def _ids(self, turns: Sequence[Turn], question: str) -> list[int]:
        questions = [*(turn.question for turn in turns), question]
        ids = self._codec.render_chat([*self._opening(), _user(questions[0])])
        for turn, before, after in zip(turns, questions, questions[1:], strict=False):
            between = self._between(before, after)
            if between is None:  # the template rewrites what was said: then the whole text is the only truth
                return self._rendered_whole(turns, question)
            answer = list(turn.answer_ids)
            closed = bool(answer) and answer[-1] in self._codec.eos_token_ids
            if closed and between.closing and answer[-1] == between.closing[-1]:
                ids += [*answer, *between.rest]
            else:
                ids += [*(answer[:-1] if closed else answer), *between.closing, *between.rest]
        return ids

    def _between(self, before: str, after: str) -> Continuation | None:
        """Template text and question between two answers; remembered, because every turn asks for all of them."""
        if (before, after) not in self._known:
            answer = {"role": "assistant", "content": "x"}
            self._known[before, after] = self._codec.continuation(
                [*self._opening(), _user(before), answer, _user(after)]
            )
        return self._known[before, after]

    def _rendered_whole(self, turns: Sequence[Turn], question: str) -> list[int]:
        messages = self._opening()
        for turn in turns:
            messages += [_user(turn.question), {"role": "assistant", "content": turn.answer}]
        return self._codec.render_chat([*messages, _user(question)])


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
