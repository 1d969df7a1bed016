"""Drafting without a head: what followed the last time the same tokens stood here. And head and look-up together.

Text repeats itself: names, code, lists, what the prompt says. The longest earlier match of the last tokens proposes its
continuation, with a confidence that is believed per match length and learned from every token that becomes visible,
drafted or not, so that learning costs nothing. As with every drafter, a wrong proposal costs speed only. The idea is
known as prompt look-up; the beliefs, and choosing between the two sources by them, are ours. Made by `Engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eesd_lite.sampling import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from eesd_lite.cache import Rows
    from eesd_lite.speculative import Drafter

SHORTEST, LONGEST = 2, 6  # tokens of a match
_PRIOR = {2: 0.25, 3: 0.4, 4: 0.5, 5: 0.6, 6: 0.7}  # believed acceptance before any was seen ...
_PRIOR_WEIGHT = 4.0  # ... which counts as so many observations
_KEEP = 0.98  # per observation of a length: about the last 50 count
LEAST = 0.2  # a match that is believed to be right less often is not worth a row of the verify
_HEAD_PRIOR, _HEAD_KEEP = 0.5, 0.95


@dataclass(frozen=True)
class Match:
    """A continuation: the token, how many tokens matched, and how often such matches are right."""

    token: int
    length: int
    belief: float


class NgramIndex:
    """Where every run of 2 to 6 tokens of a growing text ended, and how far such matches can be believed."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # run -> ascending places of its last token
        self._right = {length: _PRIOR_WEIGHT * share for length, share in _PRIOR.items()}
        self._weight = dict.fromkeys(_PRIOR, _PRIOR_WEIGHT)

    def learn(self, ids: Sequence[int]) -> None:
        """`ids` is what is visible now: forget what is not in it, and learn from what is new, token by token."""
        self.follow(ids, learning=True)

    def follow(self, ids: Sequence[int], *, learning: bool = False) -> None:
        """Make `ids` the text, without believing its new tokens (a draft is not the truth) unless `learning`."""
        same = min(len(self.ids), len(ids))
        while self.ids[:same] != list(ids[:same]):
            same -= 1
        while len(self.ids) > same:
            self._remove_last()
        for token in ids[same:]:
            if learning:
                self._judge(token)
            self._append(token)

    def matches(self, width: int = 1) -> list[Match]:
        """Up to `width` different continuations of the text, the longest and latest matches first."""
        found: dict[int, Match] = {}
        for length in range(min(LONGEST, len(self.ids) - 1), SHORTEST - 1, -1):
            for end in reversed(self._ends.get(tuple(self.ids[-length:]), ())):
                if end + 1 < len(self.ids):  # the run itself ends the text
                    token = self.ids[end + 1]
                    found.setdefault(token, Match(token, length, self.belief(length)))
                    if len(found) == width:
                        return list(found.values())
        return list(found.values())

    def belief(self, length: int) -> float:
        """How often a match of that length is believed to continue rightly."""
        return self._right[length] / self._weight[length]

    def _judge(self, token: int) -> None:
        for match in self.matches():
            self._right[match.length] = _KEEP * self._right[match.length] + (match.token == token)
            self._weight[match.length] = _KEEP * self._weight[match.length] + 1.0

    def _append(self, token: int) -> None:
        self.ids.append(token)
        for length in range(SHORTEST, min(LONGEST, len(self.ids)) + 1):
            self._ends.setdefault(tuple(self.ids[-length:]), []).append(len(self.ids) - 1)

    def _remove_last(self) -> None:
        for length in range(SHORTEST, min(LONGEST, len(self.ids)) + 1):
            run = tuple(self.ids[-length:])
            self._ends[run].pop()
            if not self._ends[run]:
                del self._ends[run]
        self.ids.pop()


class NgramDrafter:
    """Proposes from the text alone, or from the text and `head`, whichever is believed more at each token.

    Where the text proposes, the head only keeps its keys and values, which costs far less than a draft step. Made for
    chains: whoever grows branches from the text uses an NgramIndex of its own.
    """

    def __init__(self, head: Drafter | None = None) -> None:
        self.index = NgramIndex()
        self._head = head
        self._root: list[int] = []  # what was visible when this draft began
        self._expected: list[int] | None = None  # the history of the next call, should it belong to the same draft
        self._guesses: dict[int, int] = {}  # by position: what the head proposed in this draft
        self._head_right = self._head_weight = 0.0

    @property
    def head_belief(self) -> float:
        """How often the head's tokens are right of late."""
        return (self._head_right + _HEAD_PRIOR) / (self._head_weight + 1.0)

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        """See `speculative.Drafter`. Without head: None where nothing matches."""
        if self._expected == list(history):
            self.index.follow(history)
        else:  # a new draft begins, so all of this is visible
            self._judge_head(history)
            self.index.follow(self._root)  # back from the draft, so that its accepted tokens are judged too
            self.index.learn(history)
            self._root = list(history)
        best = next((match for match in self.index.matches() if match.belief >= LEAST), None)
        choice = self._choose(best, state, rows, position=position, history=history)
        self._expected = None if choice is None else [*history, choice.token_id]
        return choice

    def _choose(
        self, best: Match | None, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]
    ) -> Choice | None:
        if best is not None and (self._head is None or best.belief >= self.head_belief):
            if self._head is not None:
                self._head.keep(state, position - 1)
            return Choice(best.token, best.belief)
        if self._head is None:
            return None
        choice = self._head.propose(state, rows, position=position, history=history)
        if choice is not None:
            self._guesses[position] = choice.token_id
        return choice

    def _judge_head(self, visible: Sequence[int]) -> None:
        """Compare the last draft's tokens with what became of them; beyond the first wrong one nothing was judged."""
        before = self._expected or []
        right = 0
        while right < min(len(before), len(visible)) and before[right] == visible[right]:
            right += 1
        for position, token in sorted(self._guesses.items()):
            if position <= right and position < len(visible):
                self._head_right = _HEAD_KEEP * self._head_right + (visible[position] == token)
                self._head_weight = _HEAD_KEEP * self._head_weight + 1.0
        self._guesses = {}

    def keep(self, states: Tensor, first: int) -> None:
        """See `speculative.Drafter`."""
        if self._head is not None:
            self._head.keep(states, first)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """See `speculative.Drafter`."""
        if self._head is not None:
            self._head.move(sources, targets)
