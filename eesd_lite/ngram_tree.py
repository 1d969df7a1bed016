"""Look-ups in the text as branches of a token tree, beside those of the head.

At every node that is asked, continuations of the longest earlier matches join the head's proposals, each with the
belief that matches of its length have earned; a token that both propose is believed as the surer of the two says.
Made by `eesd_lite.drafters`; chains use the parent class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eesd_lite.ngram_drafter import Match, NgramDrafter
from eesd_lite.sampling import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from eesd_lite.cache import Rows
    from eesd_lite.speculative import TreeDrafter

_MATCHES = 3  # different continuations that one node is offered


class NgramTreeDrafter(NgramDrafter):
    """A `speculative.TreeDrafter`; without a head all branches are look-ups."""

    def __init__(self, head: TreeDrafter | None = None) -> None:
        super().__init__(head)
        self._tree_head = head
        self._paths: set[tuple[int, ...]] = set()  # below them: what was proposed in this round

    def branches(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]], count: int
    ) -> list[list[Choice]]:
        """See `speculative.TreeDrafter`."""
        found: list[list[Choice]] = [[] for _ in history]
        if self._tree_head is not None:
            found = self._tree_head.branches(states, rows, position=position, history=history, count=count)
        merged = []
        for ids, choices in zip(history, found, strict=True):
            path = self._path(ids)
            if path is None:  # a new round begins, so all of this is visible
                self.index.follow(self._root)  # back from the branches, so that accepted tokens are judged too
                self.index.learn(ids)
                self._root, self._paths, path = list(ids), set(), ()
            else:
                self.index.follow(ids)
            merged.append(_merge(choices, self.index.matches(_MATCHES), count))
            self._paths.update((*path, choice.token_id) for choice in merged[-1])
        return merged

    def _path(self, ids: Sequence[int]) -> tuple[int, ...] | None:
        """What follows the visible ids, if it was proposed in this round.

        A proposal that did not join the tree may have been right and end the next round's visible ids. That round then
        passes for a part of this one, and the one after it learns from both.
        """
        path = tuple(ids[len(self._root) :])
        return path if path in self._paths and list(ids[: len(self._root)]) == self._root else None


def _merge(choices: Sequence[Choice], matches: Sequence[Match], count: int) -> list[Choice]:
    """Both sources, every token once, the surest first; among equals the head's order stays."""
    believed = {choice.token_id: choice.confidence or 0.0 for choice in choices}
    for match in matches:
        believed[match.token] = max(match.belief, believed.get(match.token, 0.0))
    merged = [Choice(token, confidence) for token, confidence in believed.items()]
    merged.sort(key=lambda choice: -(choice.confidence or 0.0))
    return merged[:count]
