"""Trees and chains at the level of one round: verification rows, acceptance, compaction, and what a drafter is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from eesd_lite import SamplingParams
from eesd_lite import tree_growth as growth_module
from eesd_lite.cache import Rows
from eesd_lite.controller import Controller, make_controller
from eesd_lite.draft_tree import DraftTree
from eesd_lite.engine import Engine
from eesd_lite.sampling import Choice, Sampler
from eesd_lite.speculative import Draft, Drafter, HeadDrafter, accept, crop, draft
from eesd_lite.target import Target
from tests.puppets import (
    assert_caches_are_those_of,
    caches,
    drafting,
    fresh_caches,
    ids_of,
    plain_ids,
    right,
    watched_rounds,
)
from tests.tiny import TinySpec

SPEC = TinySpec(layers=5)
EXIT2: dict[str, Any] = {"head": "random", "exit_layer": 2, "resident_layers": 3}
PREFIX = list(b"A tree of words")
EngineOf = Callable[..., Engine]

# A tree with branches: node 0 is the current token; a long path, siblings on every level, a twig off a twig.
TREE = DraftTree(
    start=len(PREFIX),
    tokens=[65, 70, 71, 72, 70, 90, 91, 33, 70, 92],
    parents=[-1, 0, 0, 1, 3, 4, 2, 6, 7, 1],
)


def read_prefix(engine: Engine, ids: Sequence[int] = PREFIX) -> None:
    fresh_caches(engine, ids)


@torch.inference_mode()
def verify_rows(engine: Engine, tree: DraftTree, *, at_once: bool = True) -> tuple[Tensor, Tensor]:
    """Logits and states of all nodes: lower layers node by node as drafting does, or together; then one sweep."""
    target = engine.target
    if at_once:
        states = target.lower(target.embed(tree.tokens), tree.rows())
    else:
        states = torch.cat([target.lower(target.embed([token]), tree.row(n)) for n, token in enumerate(tree.tokens)])
    return target.logits(target.upper(states.clone(), tree.rows())), states


@torch.inference_mode()
def chain_row(engine: Engine, tokens: list[int]) -> Tensor:
    """Logits after `tokens`, read one by one behind the prefix: plain decoding."""
    target = engine.target
    for place, token in enumerate(tokens):
        rows = Rows.chain(len(PREFIX) + place, 1)
        hidden = target.upper(target.lower(target.embed([token]), rows), rows)
    return target.logits(hidden)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 17])
def test_logits_of_a_verification_equal_those_of_one_row_at_a_time(engine_of: EngineOf, count: int, dtype: str) -> None:
    engine = engine_of(SPEC, dtype=dtype, **EXIT2)
    tokens = [(11 * n + 3) % 250 for n in range(count)]
    read_prefix(engine)
    together, _ = verify_rows(engine, DraftTree(len(PREFIX), tokens, list(range(-1, count - 1))))
    read_prefix(engine)
    alone = torch.stack([chain_row(engine, tokens[: n + 1]) for n in range(count)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("at_once", [True, False])
def test_every_path_of_a_tree_has_the_bits_of_a_chain(engine_of: EngineOf, dtype: str, at_once: bool) -> None:
    engine = engine_of(SPEC, dtype=dtype, **EXIT2)
    read_prefix(engine)
    logits, _ = verify_rows(engine, TREE, at_once=at_once)
    for node in range(len(TREE)):
        read_prefix(engine)
        alone = chain_row(engine, [TREE.tokens[n] for n in TREE.path(node)])
        assert torch.equal(logits[node], alone), f"node {node}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("node", [5, 8, 9])
def test_a_compacted_tree_path_leaves_the_cache_of_a_fresh_prefill(engine_of: EngineOf, node: int, dtype: str) -> None:
    engine = engine_of(SPEC, dtype=dtype, **EXIT2)
    read_prefix(engine)
    _, states = verify_rows(engine, TREE)
    path = TREE.path(node)
    drafted = Draft(TREE, states, frozenset())
    accepted = accept(TREE, *follow(TREE, path), PREFIX + TREE.tokens[:1])
    assert list(accepted.nodes) == path[1:]
    head = HeadDrafter(engine.head, engine.target, Sampler(SamplingParams(), engine.config.vocab_size))  # type: ignore[arg-type]
    with torch.inference_mode():
        crop(engine.target, head, drafted, accepted)
    visible = PREFIX + [TREE.tokens[n] for n in path]
    assert_caches_are_those_of(engine, visible, caches(engine, len(visible)))


def follow(tree: DraftTree, path: list[int]) -> tuple[Tensor, Callable[[Tensor, int, Sequence[int]], int]]:
    """Logits (node numbers) and a rule that chooses the tokens of `path`, then one that nobody proposed."""
    following = dict(zip(path, [tree.tokens[n] for n in path[1:]] + [255], strict=True))
    return torch.arange(float(len(tree))).reshape(-1, 1), lambda logits, position, history: following[int(logits[0])]


def test_the_line_below_a_node_is_its_first_children() -> None:
    tree = DraftTree(3, [1, 10, 20, 30, 20, 40], [-1, 0, 0, 1, 1, 2])
    assert [tree.line_below(node) for node in range(6)] == [(10, 30), (30,), (40,), (), (), ()]


def test_acceptance_follows_the_choice_down_the_tree_and_adds_one_token() -> None:
    tree = DraftTree(3, [1, 10, 20, 30, 20, 40], [-1, 0, 0, 1, 1, 2])
    seen: list[tuple[int, list[int]]] = []

    def choose(logits: Tensor, position: int, history: Sequence[int]) -> int:
        seen.append((position, list(history)))
        return {0: 10, 1: 20, 4: 99}[int(logits[0])]

    found = accept(tree, torch.arange(6.0).reshape(-1, 1), choose, [7, 8, 9, 1])
    assert found.nodes == (1, 4) and found.tokens == (10, 20, 99)
    # Every node is judged with its own path as history, at its own position; rejected branches are not looked at.
    assert seen == [(4, [7, 8, 9, 1]), (5, [7, 8, 9, 1, 10]), (6, [7, 8, 9, 1, 10, 20])]


@pytest.mark.parametrize(("wanted", "nodes", "tokens"), [(5, (), (5,)), (10, (1,), (10, 5)), (20, (2,), (20, 5))])
def test_nothing_proposed_or_nothing_right_emits_the_targets_own_token(
    wanted: int, nodes: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    tree = DraftTree(1, [1, 10, 20], [-1, 0, 0])

    def choose(logits: Tensor, position: int, history: Sequence[int]) -> int:
        return wanted if position == 1 else 5

    found = accept(tree, torch.zeros(3, 1), choose, [1])
    assert (found.nodes, found.tokens) == (nodes, tokens)


def test_the_same_token_proposed_twice_below_one_node_is_accepted_once() -> None:
    tree = DraftTree(1, [1, 10, 10, 20], [-1, 0, 0, 2])
    found = accept(tree, torch.zeros(4, 1), lambda logits, position, history: 10 if position == 1 else 20, [1])
    assert found.nodes == (1,) and found.tokens == (10, 20)


def test_a_tree_knows_its_paths_its_children_and_whether_it_is_a_chain() -> None:
    tree = DraftTree(5, [1])
    assert tree.is_chain and tree.add(2, 0) == 1 and tree.add(3, 1) == 2 and tree.is_chain
    assert tree.add(4, 1) == 3 and not tree.is_chain
    assert tree.path(3) == [0, 1, 3] and tree.child(1, 4) == 3 and tree.child(0, 4) is None
    assert tree.rows().positions.tolist() == [5, 6, 7, 7]
    assert tree.rows().slots.tolist() == [5, 6, 7, 8]
    for node in range(4):
        row, rows = tree.row(node), tree.rows()
        assert row.positions.tolist() == rows.positions[node : node + 1].tolist()
        assert [slot for slot in row.paths[0].tolist() if slot >= 0] == [
            slot for slot in rows.paths[node].tolist() if slot >= 0
        ]
    with pytest.raises(AssertionError):
        tree.add(9, 7)


def grow_tree(known: Sequence[int], vocab: int, seed: int) -> Callable[..., Draft]:
    """Stands in for `draft`: a random tree in which the plain ids are one path among wrong branches."""
    rng = random.Random(seed)

    def build(
        target: Target,
        drafter: Drafter | None,
        controller: Controller,
        *,
        visible: Sequence[int],
        limit: int,
        stop_ids: frozenset[int],
    ) -> Draft:
        tree = DraftTree(start=len(visible) - 1, tokens=[visible[-1]])
        good = [0]
        for _ in range(min(limit, rng.randrange(9))):
            place = tree.start + len(good)
            if rng.random() < 0.5 and place < len(known):
                good.append(tree.add(known[place], good[-1]))
            else:
                tree.add(rng.randrange(vocab), rng.randrange(len(tree)))
        return Draft(tree, target.lower(target.embed(tree.tokens), tree.rows()), frozenset())

    return build


@contextmanager
def growing_trees(known: Sequence[int], vocab: int, seed: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth_module, "draft", grow_tree(known, vocab, seed))
        yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "seed": 6}])
def test_random_trees_give_the_plain_ids_and_the_cache_of_a_fresh_prefill(
    engine_of: EngineOf, settings: dict[str, Any], dtype: str
) -> None:
    engine = engine_of(SPEC, dtype=dtype, **EXIT2)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, **settings)
    expected = plain_ids(engine, PREFIX, params)
    visible = PREFIX + expected
    reference = fresh_caches(engine, visible[:-1])
    accepted = engine.stats.accepted
    engine.set_controller("fixed:9")
    for seed in range(6):
        with growing_trees(visible, engine.config.vocab_size, seed), drafting(engine, right(visible)):
            with watched_rounds(engine) as seen:
                assert ids_of(engine, PREFIX, params) == expected
        for held, found in seen:
            assert held == visible[: len(held)]
            assert all(torch.equal(a, b[:, : len(held)]) for a, b in zip(found, reference, strict=True)), len(held)
    assert engine.stats.accepted - accepted > 20, "the trees were too poor to test anything"


class Script:
    """A drafter that proposes a list of tokens, then nothing."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.asked: list[tuple[int, list[int]]] = []

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        self.asked.append((position, list(history)))
        return Choice(self.tokens[len(self.asked) - 1], 0.7) if len(self.asked) <= len(self.tokens) else None

    def keep(self, states: Tensor, first: int) -> None: ...

    def move(self, sources: list[int], targets: list[int]) -> None: ...


@torch.inference_mode()
def draft_with(
    engine: Engine, script: Script | None, *, limit: int, controller: str = "fixed:9", stop_ids: tuple[int, ...] = ()
) -> Draft:
    read_prefix(engine)
    return draft(
        engine.target, script, make_controller(controller), visible=[*PREFIX, 65], limit=limit,
        stop_ids=frozenset(stop_ids),
    )  # fmt: skip


def test_a_draft_is_a_chain_and_every_node_has_its_state(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **EXIT2)
    script = Script([66, 67, 68])
    found = draft_with(engine, script, limit=3)
    assert found.tree.tokens == [65, 66, 67, 68] and found.tree.is_chain and found.tree.start == len(PREFIX)
    assert found.states.shape == (4, SPEC.hidden) and found.proposed_from == {0, 1, 2}
    assert script.asked == [(len(PREFIX) + 1 + n, [*PREFIX, 65, 66, 67, 68][: len(PREFIX) + 1 + n]) for n in range(3)]


@pytest.mark.parametrize(
    ("tokens", "limit", "controller", "stop_ids", "expected"),
    [
        ([66, 67], 0, "fixed:9", (), [65]),
        ([66, 67], 1, "fixed:9", (), [65, 66]),
        ([66, 67], 9, "fixed:1", (), [65, 66]),
        ([66, 67], 9, "fixed:9", (), [65, 66, 67]),  # it falls silent
        ([66, 67, 68], 9, "fixed:9", (67,), [65, 66, 67]),  # nothing after an EOS
        ([], 9, "fixed:9", (), [65]),
    ],
)
def test_a_draft_ends_at_the_limit_at_the_controllers_word_at_silence_or_at_eos(
    engine_of: EngineOf, tokens: list[int], limit: int, controller: str, stop_ids: tuple[int, ...], expected: list[int]
) -> None:
    found = draft_with(engine_of(SPEC, **EXIT2), Script(tokens), limit=limit, controller=controller, stop_ids=stop_ids)
    assert found.tree.tokens == expected


def test_without_a_drafter_the_draft_is_the_current_token(engine_of: EngineOf) -> None:
    found = draft_with(engine_of(SPEC, **EXIT2), None, limit=5)
    assert found.tree.tokens == [65] and found.proposed_from == frozenset()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_head_whose_numbers_are_broken_proposes_nothing(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    engine = engine_of(SPEC, **EXIT2)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    expected = plain_ids(engine, PREFIX, params)
    assert engine.head is not None
    original = engine.target.ops.logits
    drafting_logits: list[int] = []

    def broken(x: Tensor, lm_head: Tensor) -> Tensor:
        logits = original(x, lm_head)
        if drafting_logits:
            logits[0, 3] = value
        return logits

    forward = engine.head.forward
    monkeypatch.setattr(engine.head, "forward", lambda *a: drafting_logits.append(1) or forward(*a))
    monkeypatch.setattr(
        engine.target,
        "logits",
        lambda hidden: drafting_logits.clear() or type(engine.target).logits(engine.target, hidden),
    )
    monkeypatch.setattr(engine.target.ops, "logits", broken)
    engine.set_controller("fixed:4")
    before = engine.stats.snapshot()
    assert ids_of(engine, PREFIX, params) == expected
    assert engine.stats.since(before).drafted == 0
