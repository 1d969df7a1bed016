"""A draft: the current token and what is proposed to follow it, as a tree. A chain is the tree without branches.

Node 0 is the current token: chosen in the round before, not yet run through the model. Node i lives in KV slot
start + i until the accepted path is compacted. Used by `eesd_lite.speculative`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.sampling import Choice


@dataclass
class DraftTree:
    """`start` is the position of node 0; tokens, parents (index of the parent node, -1 for node 0) grow together."""

    start: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int) -> int:
        """Hang `token` below node `parent`; returns the new node."""
        assert 0 <= parent < len(self.tokens), (parent, len(self.tokens))
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Nodes from node 0 down to `node`."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that proposes `token`."""
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def first_child(self, node: int) -> int | None:
        """The child of `node` that was added first: the likeliest."""
        return next((other for other in range(node + 1, len(self.tokens)) if self.parents[other] == node), None)

    def line_below(self, node: int) -> tuple[int, ...]:
        """Tokens of the line that was drafted first below `node`: what is lost when none of its children is kept."""
        tokens, child = [], self.first_child(node)
        while child is not None:
            tokens.append(self.tokens[child])
            child = self.first_child(child)
        return tuple(tokens)

    @property
    def is_chain(self) -> bool:
        """Whether node i hangs below node i - 1 throughout."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def rows(self, device: torch.device | str = "cpu") -> Rows:
        """Rows of all nodes. A chain lies in the slots of its positions: plain rows give the same bits for less."""
        if self.is_chain:
            return Rows.chain(self.start, len(self.tokens), device)
        return Rows.tree(self.start, self.parents, device)

    def row(self, node: int, device: torch.device | str = "cpu") -> Rows:
        """The row of one node."""
        return self.rows_of([node], device)

    def rows_of(self, nodes: Sequence[int], device: torch.device | str = "cpu") -> Rows:
        """Rows of some nodes, ascending; keys and values of the nodes above them are in place or among them."""
        if self.is_chain and nodes[-1] - nodes[0] == len(nodes) - 1:
            return Rows.chain(self.start + nodes[0], len(nodes), device)
        paths = [[self.start + above for above in self.path(node)] for node in nodes]
        return Rows.of_paths(self.start, paths, device)

    def ids_before(self, node: int, visible: Sequence[int]) -> list[int]:
        """Everything that a token below `node` follows: the visible ids, the last of which is node 0, and the path."""
        return [*visible, *(self.tokens[above] for above in self.path(node)[1:])]

    @property
    def depth(self) -> int:
        """Edges from node 0 to the deepest node."""
        depths = [0] * len(self.tokens)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return max(depths)


@dataclass(frozen=True)
class Draft:
    """A finished draft. `states` enter the exit layer, [nodes, hidden]; from `proposed_from` the drafter was asked.

    Trees also keep what was proposed at each of these nodes, the probability of every node in the round's belief, and
    how often layers below the exit ran (`steps`, the pass of node 0 not counted).
    """

    tree: DraftTree
    states: Tensor
    proposed_from: frozenset[int]
    proposals: Mapping[int, Sequence[Choice]] = field(default_factory=dict)
    reach: tuple[float, ...] = ()
    steps: int = 0
