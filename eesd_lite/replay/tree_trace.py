"""A trace of trees: for every position of plainly decoded answers, the best-first tree that a head grows there.

The chains of the same positions are recorded with it (`trace.Trace`), so that both kinds of controller meet the same
luck. A tree is what the head's own confidence makes of it up to a number of nodes, and the best proposals that did
not join; a controller that believes otherwise chooses among these. One .npz file, written by `record_trees`, read by
`tree_player`; needs numpy, not torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eesd_lite.replay.trace import CONFIDENCE_STEPS, Array, Trace, read_arrays, write_arrays


@dataclass(frozen=True)
class RecordedTree:
    """Node 0 is the current token and not listed: entry i tells of node i + 1. Nodes that joined come first, in the
    order of joining; then proposals that did not, by falling probability of their paths."""

    parents: tuple[int, ...]  # numbers of nodes, smaller than the node's own
    confidences: tuple[float, ...]  # of the head, once the parent was kept
    steps: tuple[int, ...]  # the draft step with which a node joined, from 1; 0: it did not
    kept: tuple[bool, ...]  # whether the node lies on the target's path

    def __post_init__(self) -> None:
        sizes = {len(self.parents), len(self.confidences), len(self.steps), len(self.kept)}
        assert len(sizes) == 1, sizes
        last = 0  # the target's path goes down without gaps
        for node, (parent, kept) in enumerate(zip(self.parents, self.kept, strict=True), start=1):
            assert 0 <= parent < node, (parent, node)
            assert not kept or parent == last, (node, parent, last)
            last = node if kept else last

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """By node: the nodes below it, likeliest first."""
        below: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents, start=1):
            below[parent].append(node)
        return tuple(map(tuple, below))

    @property
    def accepted(self) -> int:
        """How far the target's path goes among all recorded nodes."""
        return sum(self.kept)


@dataclass(frozen=True)
class TreeTrace:
    """`trees` by answer and position, as `chains.answers`; `chains.about` has a key `trees` with the number of nodes
    and the seconds of a step by rows."""

    chains: Trace
    trees: tuple[tuple[RecordedTree, ...], ...]

    def __post_init__(self) -> None:
        assert [len(answer.positions) for answer in self.chains.answers] == [len(trees) for trees in self.trees]

    @property
    def nodes(self) -> int:
        """The nodes of a whole tree."""
        return int(self.chains.about["trees"]["nodes"])

    def save(self, path: Path) -> None:
        """Write the file."""
        trees = [tree for answer in self.trees for tree in answer]

        def flat(name: str, dtype: type) -> Array:
            return np.array([value for tree in trees for value in getattr(tree, name)], dtype=dtype)

        arrays: dict[str, Any] = {
            **self.chains.arrays(),
            "tree_sizes": np.array([len(tree.parents) for tree in trees], dtype=np.int32),
            "tree_parents": flat("parents", np.uint8),
            "tree_confidences": np.rint(flat("confidences", np.float64) * CONFIDENCE_STEPS).astype(np.uint16),
            "tree_steps": flat("steps", np.uint8),
            "tree_kept": flat("kept", np.bool_),
        }
        write_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> TreeTrace:
        """Read a file; TraceError for anything that is not a whole trace of trees."""
        return read_arrays(path, cls._of_arrays)

    @classmethod
    def _of_arrays(cls, arrays: Mapping[str, Array]) -> TreeTrace:
        chains = Trace.of_arrays(arrays)
        parents, steps = arrays["tree_parents"].tolist(), arrays["tree_steps"].tolist()
        stated, kept = (arrays["tree_confidences"] / CONFIDENCE_STEPS).tolist(), arrays["tree_kept"].tolist()
        trees, first = [], 0
        for size in arrays["tree_sizes"].tolist():
            part = slice(first, first + size)
            fields = (tuple(values[part]) for values in (parents, stated, steps, kept))
            trees.append(RecordedTree(*fields))
            first += size
        places = sum(len(answer.positions) for answer in chains.answers)
        if first != len(parents) or len(trees) != places:
            raise ValueError(f"{len(trees)} trees of {len(parents)} nodes, {places} of {first} expected")
        rest = iter(trees)
        return cls(chains, tuple(tuple(islice(rest, len(answer.positions))) for answer in chains.answers))


def has_trees(trace: Trace) -> bool:
    """Whether the file that these chains come from holds trees as well."""
    return "trees" in trace.about
