"""Grown trees: exact whatever branches propose, within their limits, on lm_head rows that are visited, best first."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eesd_lite import SamplingParams
from eesd_lite.cache import Rows
from eesd_lite.controllers_tree import FixedTree, group_size
from eesd_lite.draft_tree import Draft, DraftTree
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError
from eesd_lite.ngram_tree import NgramTreeDrafter
from eesd_lite.sampling import Choice, Sampler
from eesd_lite.speculative import VERIFY_ROWS, Accepted, Drafter, HeadDrafter, TreeDrafter, VisitedLogits, accept
from eesd_lite.target import Target
from eesd_lite.tree_growth import grow, lessons
from tests.puppets import all_puppets, drafting, fresh_caches, ids_of, plain_ids, watched_rounds
from tests.tiny import TinySpec

SPEC = TinySpec(layers=5)
EXIT = 2
OPTIONS: dict[str, Any] = {"head": "random", "exit_layer": EXIT, "resident_layers": 3, "draft_limit": 64}
PROMPT = list(b"A tree of words")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "everything": {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 9},
}
EngineOf = Callable[..., Engine]


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 20, "ignore_eos": True, **options})


class Branching:
    """Proposes right, wrong, repeated or no tokens by chance, over the real head, which does its work all the same."""

    def __init__(self, seed: int, known: Sequence[int], vocab: int, head: TreeDrafter) -> None:
        self._rng, self._known, self._vocab, self._head = random.Random(seed), known, vocab, head
        self.asked = 0

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        raise AssertionError("trees ask for branches")

    def branches(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]], count: int
    ) -> list[list[Choice]]:
        assert len(states) == len(rows) == len(position) == len(history)
        assert rows.positions.tolist() == [len(ids) - 1 for ids in history] == [place - 1 for place in position]
        self._head.branches(states, rows, position=position, history=history, count=count)
        self.asked += len(rows)
        return [self._proposals(place) for place in position]

    def _proposals(self, position: int) -> list[Choice]:
        rng, found = self._rng, []
        for _ in range(rng.randrange(5)):
            right = rng.random() < 0.5 and position < len(self._known)
            token = self._known[position] if right else rng.randrange(self._vocab)
            found.append(Choice(token, rng.random()))
            if rng.random() < 0.2:
                found.append(Choice(token, rng.random()))  # the same token twice below one node
        return found

    def keep(self, states: Tensor, first: int) -> None:
        self._head.keep(states, first)

    def move(self, sources: list[int], targets: list[int]) -> None:
        self._head.move(sources, targets)


@contextmanager
def branching(engine: Engine, seed: int, known: Sequence[int]) -> Iterator[list[Branching]]:
    before, made = engine.drafter_factory, []

    def make(target: Target, sampler: Sampler) -> Drafter:
        assert before is not None
        heads = before(target, sampler)
        assert isinstance(heads, TreeDrafter)
        made.append(Branching(seed, known, engine.config.vocab_size, heads))
        return made[-1]

    engine.drafter_factory = make
    try:
        yield made
    finally:
        engine.drafter_factory = before
        engine.reset()


@pytest.mark.parametrize("controller", ["tree", "tree:1", "tree:7", "tree:64"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_tree_controller_gives_the_plain_ids(engine_of: EngineOf, controller: str, name: str) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    chosen = params(**SETTINGS[name])
    expected = plain_ids(engine, PROMPT, chosen)
    engine.set_controller(controller)
    assert ids_of(engine, PROMPT, chosen) == expected
    assert engine.stats.drafted > 0 or controller == "tree"  # which may have seen that drafts do not pay here
    for puppet, proposal in all_puppets(PROMPT + expected, engine.config.vocab_size).items():
        with drafting(engine, proposal):  # a drafter that knows no branches grows a chain
            assert ids_of(engine, PROMPT, chosen) == expected, puppet


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["greedy", "everything"])
def test_any_branches_give_the_plain_ids_and_the_caches_of_a_fresh_prefill(
    engine_of: EngineOf, name: str, dtype: str
) -> None:
    engine = engine_of(SPEC, dtype=dtype, **OPTIONS)
    chosen = params(**SETTINGS[name])
    expected = plain_ids(engine, PROMPT, chosen)
    visible = PROMPT + expected
    reference = fresh_caches(engine, visible[:-1])
    deepest = 0

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32), controller=st.sampled_from(["tree", "tree:2", "tree:9", "tree:30"]))
    def check(seed: int, controller: str) -> None:
        nonlocal deepest
        engine.set_controller(controller)
        with branching(engine, seed, visible), watched_rounds(engine) as seen:
            assert ids_of(engine, PROMPT, chosen) == expected
        for held, found in seen:
            assert held == visible[: len(held)]
            different = [
                n for n, (a, b) in enumerate(zip(found, reference, strict=True)) if not a.equal(b[:, : len(held)])
            ]
            assert not different, f"tensors {different} after {len(held)} tokens"
        deepest = max(deepest, len(engine.stats.accepted_length_histogram) - 1)

    check()
    assert deepest >= 4, "the branches were too poor to test anything"


def test_a_tree_takes_one_sweep_a_round_and_every_node_passes_the_layers_below_the_exit_once(
    engine_of: EngineOf,
) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    expected = plain_ids(engine, PROMPT, params())
    bank, target = engine.target.bank, engine.target
    forwards, before, lower_rows = list(bank.forwards), engine.stats.snapshot(), [0]
    original = target.lower

    def counted(hidden: Tensor, rows: Rows, *rest: Any) -> Tensor:
        lower_rows[0] += len(rows)
        return original(hidden, rows, *rest)

    target.lower = counted  # type: ignore[method-assign]
    try:
        engine.set_controller("tree:20")
        with branching(engine, 3, PROMPT + expected):
            assert ids_of(engine, PROMPT, params()) == expected
    finally:
        del target.lower
    stats = engine.stats.since(before)
    assert [now - then for now, then in zip(bank.forwards, forwards, strict=True)][EXIT:] == [1 + stats.rounds] * 3
    assert lower_rows[0] == len(PROMPT) + stats.rounds + stats.drafted
    assert stats.target_rows == stats.rounds + stats.drafted
    assert stats.draft_offloaded_bytes == 0 and stats.verify_offloaded_bytes == stats.rounds * engine.plan.sweep_bytes
    assert 0 < stats.draft_depth < stats.drafted, "these were no trees"


@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_end_of_the_context_and_of_the_answer_bound_the_depth_of_a_tree(
    tiny_of: Callable[[TinySpec], Any], engine_of: EngineOf, room: int
) -> None:
    expected = plain_ids(engine_of(SPEC, **OPTIONS), PROMPT, params(max_new_tokens=room))
    with tiny_of(SPEC).engine(**{**OPTIONS, "context": len(PROMPT) + room, "controller": "tree:64"}) as engine:
        events = list(engine.generate(PROMPT, params(max_new_tokens=99)))
        assert [event.token_id for event in events if event.token_id is not None] == expected
        assert events[-1].finish_reason == "context"
        assert engine.stats.balanced() and engine.stats.accepted <= max(0, room - 1)
    engine = engine_of(SPEC, **OPTIONS)
    engine.set_controller("tree:64")
    with branching(engine, 4, PROMPT + expected):
        assert ids_of(engine, PROMPT, params(max_new_tokens=room)) == expected
    assert engine.stats.cut == 0, "a tree was deeper than what was left to say"


def test_lm_head_sees_the_visited_nodes_and_no_more_rows_than_come_free(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    target = engine.target
    fresh_caches(engine, PROMPT)
    tree = DraftTree(len(PROMPT), [65, 70, 71, 72, 70, 90], [-1, 0, 0, 1, 3, 4])
    rows: list[int] = []
    original = target.logits
    with torch.inference_mode():
        hidden = target.upper(target.lower(target.embed(tree.tokens), tree.rows()), tree.rows())
        together = original(hidden)
        target.logits = lambda part: rows.append(len(part)) or original(part)  # type: ignore[method-assign]
        try:
            lazy = VisitedLogits(target, hidden, tree)
            assert torch.equal(lazy[0], together[0]) and rows == [4], "node 0 and the first children below it"
            assert torch.equal(lazy[3], together[3]) and rows == [4]
            assert torch.equal(lazy[2], together[2]) and rows == [4, 1], "a node without children comes alone"
            assert torch.equal(lazy[5], together[5]) and rows == [4, 1, 1]
            assert max(rows) <= VERIFY_ROWS
        finally:
            del target.logits


def test_a_group_of_nodes_has_the_bits_of_one_node_at_a_time(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    tree = DraftTree(len(PROMPT), [65, 70, 71, 72, 70, 90, 91], [-1, 0, 0, 1, 1, 2, 3])
    sampler = Sampler(params(temperature=0.9), engine.config.vocab_size, engine.text.vocab_size)
    assert engine.head is not None
    drafter = HeadDrafter(engine.head, engine.target, sampler)
    found = []
    for groups in ([[0], [1, 2], [3, 4, 5], [6]], [[n] for n in range(7)]):
        fresh_caches(engine, PROMPT)
        choices: list[list[Choice]] = []
        with torch.inference_mode():
            for group in groups:
                rows = tree.rows_of(group)
                states = engine.target.lower(engine.target.embed([tree.tokens[n] for n in group]), rows)
                history = [tree.ids_before(node, [*PROMPT, 65]) for node in group]
                places = [len(ids) for ids in history]
                choices += drafter.branches(states, rows, position=places, history=history, count=5)
        found.append(choices)
    assert found[0] == found[1]
    fresh_caches(
        engine, [*PROMPT, 65, 70]
    )  # node 1 as the last token of a chain: its first branch is the chain's draft
    with torch.inference_mode():
        rows = Rows.chain(len(PROMPT) + 1, 1)
        state = engine.target.lower(engine.target.embed([70]), rows)
        choice = drafter.propose(state, rows, position=len(PROMPT) + 2, history=[*PROMPT, 65, 70])
    assert choice is not None and choice.token_id == found[0][1][0].token_id


class Script:
    """Below every node the same two tokens; remembers how many nodes it was asked about together."""

    def __init__(self, confidences: tuple[float, ...] = (0.6, 0.3)) -> None:
        self.groups: list[int] = []
        self._confidences = confidences

    def branches(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]], count: int
    ) -> list[list[Choice]]:
        self.groups.append(len(rows))
        return [[Choice(66 + n, c) for n, c in enumerate(self._confidences)] for _ in position]

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        raise AssertionError("trees ask for branches")

    def keep(self, states: Tensor, first: int) -> None: ...

    def move(self, sources: list[int], targets: list[int]) -> None: ...


@torch.inference_mode()
def grown(engine: Engine, script: Script | None, nodes: int, **options: Any) -> Draft:
    fresh_caches(engine, PROMPT)
    options = {"limit": 64, "depth": 64, "stop_ids": frozenset(), **options}
    return grow(engine.target, script, FixedTree(nodes), visible=[*PROMPT, 65], **options)


def test_a_fixed_tree_holds_the_likeliest_paths_and_groups_nodes_into_steps(engine_of: EngineOf) -> None:
    script = Script()
    found = grown(engine_of(SPEC, **OPTIONS), script, 30)
    reaches = sorted(0.6**a * 0.3 ** (d - a) for d in range(1, 14) for a in range(d + 1) for _ in range(_ways(d, a)))
    best = sum(reaches[-30:])
    assert len(found.tree) == 31 and len(found.reach) == 31
    assert sum(found.reach[1:]) >= 0.97 * best
    assert found.steps <= 10 < 30, "nodes came one by one"
    assert found.states.shape == (31, SPEC.hidden)
    for node, parent in enumerate(found.tree.parents[1:], start=1):
        chance = 0.6 if found.tree.tokens[node] == 66 else 0.3
        assert found.reach[node] == pytest.approx(found.reach[parent] * chance)
    assert len(found.proposed_from) == sum(script.groups) < 31, "leaves need no head"


def _ways(depth: int, firsts: int) -> int:
    result = 1
    for n in range(firsts):
        result = result * (depth - n) // (n + 1)
    return result


@pytest.mark.parametrize(("limits", "nodes", "depth"), [({"limit": 5}, 5, None), ({"depth": 2}, 6, 2)])
def test_a_tree_keeps_to_its_limits(engine_of: EngineOf, limits: dict[str, int], nodes: int, depth: int | None) -> None:
    found = grown(engine_of(SPEC, **OPTIONS), Script(), 30, **limits)
    assert len(found.tree) - 1 == nodes and (depth is None or found.tree.depth == depth)


def test_nothing_grows_without_a_drafter_without_room_or_below_a_stop_token(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    assert grown(engine, None, 9).tree.tokens == [65]
    assert grown(engine, Script(), 9, limit=0).tree.tokens == [65]
    assert grown(engine, Script(), 9, depth=0).tree.tokens == [65]
    stopped = grown(engine, Script(), 9, stop_ids=frozenset({66})).tree
    assert len(stopped) > 3 and all(stopped.tokens[stopped.parents[n]] != 66 for n in range(1, len(stopped)))
    assert grown(engine, Script(()), 9).tree.tokens == [65]


def test_lessons_are_what_visited_nodes_proposed_and_whether_the_target_chose_it() -> None:
    tree = DraftTree(4, [1, 10, 20, 30], [-1, 0, 0, 1])
    proposals = {
        0: [Choice(10, 0.5), Choice(20, 0.2), Choice(21, 0.1)],
        1: [Choice(30, 0.9), Choice(31, 0.05)],
        2: [Choice(40, 0.8)],
    }
    drafted = Draft(tree, torch.zeros(4, 1), frozenset(proposals), proposals)
    accepted = accept(tree, torch.zeros(4, 1), lambda logits, position, history: {1: 10, 2: 31}[position], [1])
    assert accepted == Accepted((1,), (10, 31))
    assert lessons(drafted, accepted) == [
        [(0.5, True), (0.2, False), (0.1, False)],
        [(0.9, False), (0.05, True)],  # a proposal that did not join the tree was judged all the same
    ]


@given(
    reaches=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40).map(lambda r: sorted(r, reverse=True)),
    room=st.integers(1, 64),
)
def test_a_group_is_never_empty_and_never_too_large(reaches: list[float], room: int) -> None:
    count = group_size(reaches, room)
    assert 1 <= count <= min(room, len(reaches))
    assert sum(reaches[: count - 1]) <= room * reaches[count - 1]


def test_a_controller_may_not_want_more_nodes_than_there_are_slots(engine_of: EngineOf) -> None:
    for spec in ("tree:65", "tree:0", "tree:", "tree:x"):
        with pytest.raises(EesdError, match="from 1 to 64"):
            engine_of(SPEC, **OPTIONS).set_controller(spec)
    engine = engine_of(SPEC, **{**OPTIONS, "draft_limit": 3})
    engine.set_controller("tree:64")
    expected = plain_ids(engine, PROMPT, params())
    assert ids_of(engine, PROMPT, params()) == expected
    assert engine.stats.drafted <= 3 * engine.stats.rounds


class Silent:
    """A head that proposes what it is told."""

    def __init__(self, *choices: Choice) -> None:
        self.choices = list(choices)

    def branches(
        self, states: Tensor, rows: Rows, *, position: Sequence[int], history: Sequence[Sequence[int]], count: int
    ) -> list[list[Choice]]:
        return [self.choices[:count] for _ in history]

    def propose(self, state: Tensor, rows: Rows, *, position: int, history: Sequence[int]) -> Choice | None:
        raise AssertionError("trees ask for branches")

    def keep(self, states: Tensor, first: int) -> None: ...

    def move(self, sources: list[int], targets: list[int]) -> None: ...


def asked(drafter: NgramTreeDrafter, *histories: list[int], count: int = 8) -> list[list[Choice]]:
    rows, places = Rows.chain(0, len(histories)), [len(ids) for ids in histories]
    return drafter.branches(torch.zeros(len(histories), 1), rows, position=places, history=histories, count=count)


def test_look_ups_join_the_heads_branches_and_the_surer_belief_holds() -> None:
    visible = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]  # 8 followed lately, 9 before
    alone = asked(NgramTreeDrafter(), visible)[0]
    assert [choice.token_id for choice in alone] == [8, 9]
    belief = alone[0].confidence
    assert belief is not None
    drafter = NgramTreeDrafter(Silent(Choice(7, 0.95), Choice(9, 0.01)))
    both = asked(drafter, visible)[0]
    assert [choice.token_id for choice in both][0] == 7 and {choice.token_id for choice in both} == {7, 8, 9}
    assert len({choice.token_id for choice in both}) == len(both)
    assert next(c.confidence for c in both if c.token_id == 9) == belief
    assert len(asked(drafter, visible, count=1)[0]) == 1
    deeper = asked(NgramTreeDrafter(), visible, [*visible, 8])  # below a proposal: matches go on along the path
    assert [choice.token_id for choice in deeper[1]] == [1]


def test_look_ups_learn_from_what_became_visible_and_not_from_branches() -> None:
    drafter = NgramTreeDrafter()
    visible = [5, 6, 7, 5, 6]
    asked(drafter, visible)
    before = drafter.index.belief(2)
    asked(drafter, [*visible, 7], [*visible, 7, 5])
    assert drafter.index.belief(2) == before, "a branch was taken for the truth"
    asked(drafter, [*visible, 7, 5, 9])  # the next round: 7 and 5 were proposed, and right
    assert drafter.index.belief(2) > before
    assert drafter.index.ids == [*visible, 7, 5, 9]


@pytest.mark.parametrize("drafter", ["ngram", "both"])
@pytest.mark.parametrize("controller", ["tree", "tree:12"])
def test_trees_with_look_ups_give_the_plain_ids(engine_of: EngineOf, drafter: str, controller: str) -> None:
    options = {**OPTIONS, "head": "random" if drafter == "both" else "off"}
    if drafter == "ngram":
        del options["exit_layer"]
    engine = engine_of(SPEC, **options, drafter=drafter)
    prompt = list(b"abcabdabcabdabcab")
    for name in SETTINGS:
        chosen = params(max_new_tokens=30, **SETTINGS[name])
        expected = plain_ids(engine, prompt, chosen)
        engine.set_controller(controller)
        assert ids_of(engine, prompt, chosen) == expected
    assert engine.stats.drafted > 0
