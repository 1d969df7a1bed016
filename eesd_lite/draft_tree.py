"""A draft: the current token and what is proposed to follow it, as a tree. A chain is the tree without branches.

Node 0 is the current token: chosen in the round before, not yet run through the model. Node i lives in KV slot
start + i until the accepted path is compacted. Used by `eesd_lite.speculative`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from eesd_lite.cache import Rows


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
        if self.is_chain:
            return Rows.chain(self.start + node, 1, device)
        return Rows.tree(self.start, self.parents[: node + 1], device).slice(node, node + 1)
