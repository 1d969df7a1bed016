"""One round as a picture: what was proposed below what, how likely it was held to be, what was kept, and the seconds.

`record_round` decodes as far as the wanted round and describes it in texts and numbers; who draws it is `cli.tree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError
from eesd_lite.params import SamplingParams

_BEFORE = 24  # tokens of the text before the round that are shown


@dataclass(frozen=True)
class NodeView:
    """A node of the tree; node 0 is the token that the round before emitted last."""

    text: str
    parent: int  # -1 for node 0
    reach: float | None  # probability of its path in the round's belief; None: chains keep none
    accepted: bool
    asked: bool  # whether the head proposed tokens below it


@dataclass(frozen=True)
class RoundView:
    """One round. `emitted` are the accepted tokens and, last, the target's own."""

    number: int
    before: str
    nodes: tuple[NodeView, ...]
    emitted: tuple[str, ...]
    steps: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    sweep_bytes: int

    @property
    def drafted(self) -> int:
        """Proposed nodes: all but node 0."""
        return len(self.nodes) - 1


def record_round(engine: Engine, prompt: Sequence[int], params: SamplingParams, number: int) -> RoundView:
    """Round `number` (from 1) of the answer to `prompt`; EesdError if the answer is shorter or nothing is drafted."""
    if engine.drafter_factory is None:
        reasons = "; ".join(engine.notices) or "the model has no exit head"
        raise EesdError(f"nothing is drafted here: {reasons}")
    before = engine.stats.rounds
    events = engine.generate(prompt, params)
    for _ in events:
        if engine.stats.rounds - before >= number:
            break
    rounds, last = engine.stats.rounds - before, engine.last_round
    if rounds < number or last is None:
        raise EesdError(f"the answer ended after {rounds} rounds; there is no round {number}")
    show = lambda token: engine.text.decode([token]) or f"<{token}>"  # noqa: E731
    drafted, tree = last.drafted, last.drafted.tree
    asked = drafted.proposed_from
    nodes = [
        NodeView(
            text=show(token),
            parent=parent,
            reach=drafted.reach[node] if drafted.reach else None,
            accepted=node in last.accepted.nodes or node == 0,
            asked=node in asked,
        )
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
    ]
    return RoundView(
        number=number,
        before=engine.text.decode(list(last.visible[-_BEFORE:])),
        nodes=tuple(nodes),
        emitted=tuple(show(token) for token in last.accepted.tokens),
        steps=drafted.steps if drafted.reach else len(nodes) - 1,
        draft_seconds=last.draft_seconds,
        verify_seconds=last.verify_seconds,
        accept_seconds=last.accept_seconds,
        sweep_bytes=engine.plan.sweep_bytes,
    )
