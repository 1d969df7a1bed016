"""Recording trees: decode plainly, then at every position grow the best-first tree from the true prefix.

Positions are taken from the last to the first: a tree lies in the slots from its position on, so that what earlier
positions need stays in place and one prefill serves all of them. The plain ids are the truth: nothing is verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from eesd_lite.cache import Rows
from eesd_lite.controllers_tree import FixedTree
from eesd_lite.draft_tree import Draft
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError, PromptError
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress, no_progress
from eesd_lite.replay.record import about_trace, chain_positions, fastest, opened, plain_answer
from eesd_lite.replay.trace import Answer, Trace
from eesd_lite.replay.tree_trace import RecordedTree, TreeTrace
from eesd_lite.sampling import Sampler
from eesd_lite.speculative import VERIFY_ROWS, keep_prefix
from eesd_lite.target import LOGITS_ROWS
from eesd_lite.tree_growth import grow

CHAIN = 16  # tokens of the chains that are recorded beside the trees
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 65)  # whose times are measured; others lie on lines between them
_UNJOINED = 2  # one proposal that did not join is recorded for so many nodes that did


class _Watched(FixedTree):
    """A fixed tree that remembers how many nodes joined in every draft step."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.groups: list[int] = []

    def take(self, reaches: Sequence[float]) -> int:
        count = super().take(reaches)
        self.groups += [count] if count else []
        return count


def record_trees(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    nodes: int = 64,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.perf_counter,
) -> TreeTrace:
    """Chains and trees of the answers to `prompts`. Leaves the engine with an empty cache.

    EesdError without a head, or where a round of the engine may draft fewer nodes.
    """
    if engine.head is None or engine.drafter_factory is None:
        raise EesdError(f"{engine.name}: a trace needs an exit head; see eesd train, or --head instant")
    if not 1 <= nodes <= engine.draft_limit:
        raise EesdError(f"trees of {nodes} nodes: this engine's rounds draft 1 to {engine.draft_limit}")
    answers, trees = [], []
    chain = min(CHAIN, engine.draft_limit)
    for number, prompt in enumerate(prompts):
        answer = plain_answer(engine, prompt, params)
        positions = chain_positions(engine, prompt, answer, params, chain)
        answers.append(Answer(tuple(prompt), tuple(answer), positions))
        note = f"growing trees, prompt {number + 1} of {len(prompts)}, position"
        trees.append(_trees(engine, prompt, answer, params, nodes, lambda done, of: progress(note, done, of)))  # noqa: B023
        engine.reset()
    seconds = measure_rows(engine, clock)
    about = about_trace(engine, params, chain, chain_seconds(seconds, chain))
    about["trees"] = {"nodes": nodes, "seconds": seconds}
    return TreeTrace(Trace(about, tuple(answers)), tuple(trees))


@torch.inference_mode()
def _trees(
    engine: Engine, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, nodes: int,
    progress: Callable[[int, int], None],
) -> tuple[RecordedTree, ...]:  # fmt: skip
    target, text = engine.target, [*prompt, *answer]
    if len(text) + nodes > target.kv.capacity:
        raise PromptError(f"a prompt and its answer take {len(text)} of {target.kv.capacity} tokens: no room to draft")
    sampler = Sampler(params, engine.config.vocab_size, engine.text.vocab_size if engine.text.vocab_size > 0 else None)
    assert engine.drafter_factory is not None
    drafter = engine.drafter_factory(target, sampler)
    known = Rows.chain(0, len(text) - 1, target.device)
    keep_prefix(drafter, target.lower(target.embed(text[:-1]), known), known)
    found: list[RecordedTree] = []
    for index in range(len(answer) - 2, -1, -1):
        progress(len(found), len(answer) - 1)
        controller = _Watched(nodes)
        # As in the engine: what cannot be of use is not drafted, for the answer ends there.
        drafted = grow(
            target, drafter, controller, visible=text[: len(prompt) + index + 1], limit=nodes,
            depth=max(0, params.max_new_tokens - index - 2), stop_ids=engine.text.eos_token_ids,
        )  # fmt: skip
        found.append(recorded(drafted, controller.groups, answer[index + 1 :], nodes // _UNJOINED))
    return tuple(found[::-1])


def recorded(drafted: Draft, groups: Sequence[int], truth: Sequence[int], unjoined: int) -> RecordedTree:
    """A grown tree without its tokens: `groups` are the nodes of every step, `truth` what the target says."""
    tree, ends = drafted.tree, list(accumulate(groups))
    parents, stated, tokens = list(tree.parents[1:]), [0.0] * (len(tree) - 1), list(tree.tokens[1:])
    steps = [next(step for step, end in enumerate(ends, start=1) if node < end) for node in range(len(tree) - 1)]
    waiting = []
    for parent, choices in drafted.proposals.items():
        for choice in choices:
            node, confidence = tree.child(parent, choice.token_id), choice.confidence or 0.0
            if node is not None:
                stated[node - 1] = confidence
            else:
                waiting.append((drafted.reach[parent] * confidence, parent, choice.token_id, confidence))
    waiting.sort(key=lambda candidate: -candidate[0])
    for _, parent, token, confidence in waiting[:unjoined]:
        parents, stated, tokens, steps = [*parents, parent], [*stated, confidence], [*tokens, token], [*steps, 0]
    kept, last, depth = [], 0, 0
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=1):
        right = parent == last and depth < len(truth) and token == truth[depth]
        kept.append(right)
        if right:
            last, depth = node, depth + 1
    return RecordedTree(tuple(parents), tuple(stated), tuple(steps), tuple(kept))


@torch.inference_mode()
def measure_rows(engine: Engine, clock: Callable[[], float] = time.perf_counter) -> dict[str, list[float]]:
    """Seconds by number of `rows`: layers below the exit, the head with lm_head, and a verify that visits few nodes.

    Leaves the engine with an empty cache.
    """
    target, head = engine.target, engine.head
    assert head is not None
    place = min(128, engine.plan.context - 1)
    counts = [rows for rows in _ROWS if rows <= engine.draft_limit + 1]
    found: dict[str, list[Any]] = {"rows": counts, "lower": [], "head": [], "verify": []}

    def ask(states: torch.Tensor, rows: Rows) -> None:
        for part in head.forward(states, rows).split(LOGITS_ROWS):
            target.ops.logits(part.contiguous(), target.lm_head)

    def verify(states: torch.Tensor, rows: Rows) -> None:
        target.logits(target.upper(states.clone(), rows)[:VERIFY_ROWS])

    for count in counts:
        rows, states = Rows.chain(place, count, target.device), target.embed([0] * count)
        found["lower"].append(fastest(lambda: target.lower(states.clone(), rows), clock))  # noqa: B023
        found["head"].append(fastest(lambda: ask(states, rows), clock))  # noqa: B023
        found["verify"].append(fastest(lambda: verify(states, rows), clock))  # noqa: B023
    engine.reset()
    target.bank.abandon()
    return found


def chain_seconds(seconds: dict[str, list[float]], longest: int) -> dict[str, Any]:
    """The same times as a trace of chains states them."""
    from eesd_lite.replay.tree_curves import by_rows

    verify = by_rows([int(rows) for rows in seconds["rows"]], seconds["verify"])
    return {
        "lower": seconds["lower"][0], "head": seconds["head"][0],
        "verify": [verify(rows) for rows in range(1, longest + 2)],
    }  # fmt: skip


def record_tree_model(
    model: str, *, params: SamplingParams, nodes: int, progress: Progress = no_progress, **options: Any
) -> TreeTrace:
    """`record_trees` for a model by name; what `eesd trace --trees` does. Options as of `record.opened`."""
    with opened(model, params=params, progress=progress, draft_limit=max(nodes, CHAIN), **options) as (engine, ids):
        return record_trees(engine, ids, params, nodes=nodes, progress=progress)
