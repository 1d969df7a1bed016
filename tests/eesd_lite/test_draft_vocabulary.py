"""Drafting over the most frequent tokens: the same ids and the same noise, counted bytes, lists that are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eesd_lite import SamplingParams
from eesd_lite.allocated import allocated_bytes
from eesd_lite.config import ModelConfig
from eesd_lite.draft_vocabulary import frequency_order, most_frequent
from eesd_lite.engine import Engine
from eesd_lite.errors import BudgetError, EesdError
from eesd_lite.head_choice import ids_by_frequency, random_head
from eesd_lite.head_file import save_head
from eesd_lite.prepare import ModelSource
from eesd_lite.sampling import Sampler, SubsetSampler
from models import find_recipe
from tests.puppets import plain_ids
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5)
SIZE, EXIT = 64, 2
OPTIONS: dict[str, Any] = {
    "head": "random", "exit_layer": EXIT, "resident_layers": 3, "draft_limit": 64, "head_bits": 16,
}  # fmt: skip
PROMPT = list(b"Some words are rare")
SAMPLED: dict[str, Any] = {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 3}
EngineOf, TinyOf = Callable[..., Engine], Callable[[TinySpec], Tiny]


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, **options})


def ids_and_drafts(engine: Engine, chosen: SamplingParams) -> tuple[list[int], list[list[int]]]:
    """The ids of one generation, and what was drafted in each of its rounds."""
    ids, rounds, engine.last_round = [], [], None
    for event in engine.generate(PROMPT, chosen):
        ids += [] if event.token_id is None else [event.token_id]
        if engine.last_round is not None and (not rounds or engine.last_round is not rounds[-1]):
            rounds.append(engine.last_round)
    return ids, [seen.drafted.tree.tokens[1:] for seen in rounds]


@pytest.mark.parametrize("controller", ["fixed:4", "tree:32"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}, SAMPLED], ids=["greedy", "sampled", "all"])
def test_a_draft_vocabulary_leaves_the_ids_those_of_plain_decoding(
    engine_of: EngineOf, controller: str, sampling: dict[str, Any]
) -> None:
    engine = engine_of(SPEC, **OPTIONS, draft_vocab=SIZE)
    expected = plain_ids(engine, PROMPT, params(**sampling))
    engine.set_controller(controller)
    ids, drafts = ids_and_drafts(engine, params(**sampling))
    assert ids == expected
    assert engine.head is not None and engine.head.vocabulary is not None
    drafted = {token for tokens in drafts for token in tokens}
    assert drafted and drafted <= set(engine.head.vocabulary.ids.tolist())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 8}, SAMPLED], ids=["greedy", "sampled", "all"])
def test_choosing_among_some_ids_is_choosing_among_all_with_the_others_made_impossible(
    sampling: dict[str, Any],
) -> None:
    sampler, rng = Sampler(params(**sampling), 300, 290), np.random.default_rng(1)
    ids = np.sort(rng.choice(290, 70, replace=False))
    some = SubsetSampler(sampler, ids)
    for position in range(20):
        logits = rng.normal(size=300).astype(np.float32) * 3
        history = rng.integers(0, 290, 30).tolist()
        impossible = np.full(300, -1e9, np.float32)
        impossible[ids] = logits[ids]
        chosen = sampler.choose(impossible, position, history, with_confidence=True)
        found = some.choose(logits[ids], position, history, with_confidence=True)
        assert found.token_id == chosen.token_id
        assert found.confidence == pytest.approx(chosen.confidence, rel=1e-6)
        ranked = some.ranked(logits[ids], position, history, 5)
        assert [c.token_id for c in ranked] == [c.token_id for c in sampler.ranked(impossible, position, history, 5)]
        assert ranked[0].token_id == found.token_id, "the first branch is what a chain would draft"


def test_an_id_has_the_same_noise_in_every_vocabulary() -> None:
    sampler = Sampler(params(temperature=1.0, seed=4), 500)
    ids = np.array([0, 3, 77, 78, 250, 499])
    logits = torch.zeros(len(ids))  # the noise alone decides
    for position in range(50):
        noise = sampler.noise.gumbel(position, None)[ids]
        assert SubsetSampler(sampler, ids).choose(logits, position, []).token_id == ids[noise.argmax()]


def test_everything_as_draft_vocabulary_drafts_what_no_draft_vocabulary_drafts(engine_of: EngineOf) -> None:
    drafts = []
    for options in ({}, {"draft_vocab": engine_of(SPEC, **OPTIONS).text.vocab_size}):
        engine = engine_of(SPEC, **OPTIONS, **options, controller="tree:16")
        drafts.append(ids_and_drafts(engine, params(temperature=1.0, seed=6)))
    assert drafts[0] == drafts[1] and any(drafts[0][1])


def test_its_bytes_are_planned_and_allocated(tiny_of: TinyOf, engine_of: EngineOf) -> None:
    with_it, without = engine_of(SPEC, **OPTIONS, draft_vocab=SIZE), engine_of(SPEC, **OPTIONS)
    size = SIZE * SPEC.hidden * 2  # bfloat16
    assert dict(with_it.plan.items)["draft vocabulary"] == size
    assert with_it.plan.total_bytes == without.plan.total_bytes + size
    assert allocated_bytes(with_it)["device"] == allocated_bytes(without)["device"] | {"draft vocabulary": size}
    plain = engine_of(SPEC, head="off", draft_vocab=SIZE)
    assert "draft vocabulary" not in dict(plain.plan.items), "who does not draft needs none"


@pytest.mark.parametrize("size", [15, 0, -3, 287, 10**9])
def test_sizes_that_are_too_small_or_too_large_are_refused_in_one_line(tiny_of: TinyOf, size: int) -> None:
    with pytest.raises(EesdError, match=f"draft_vocab must be from 16 to .*, not {size}$") as caught:
        tiny_of(SPEC).engine(**OPTIONS, draft_vocab=size)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, BudgetError)


def test_a_text_gives_its_ids_by_frequency_and_ties_by_id() -> None:
    text = np.array([9, 5, 5, 2, 9, 9, 7, 2, 1], dtype="<i4")
    assert frequency_order(text).tolist() == [9, 2, 5, 1, 7]
    assert frequency_order(text, 2).tolist() == [9, 2] and frequency_order(text).dtype == np.int32


def test_ends_come_first_then_the_list_then_ids_in_order() -> None:
    assert most_frequent(7, order=[9, 2, 40, 5], always={30, 9}, vocabulary=40) == [9, 30, 2, 5, 0, 1, 3]
    assert sorted(most_frequent(40, order=[39, 3], always=(), vocabulary=40)) == list(range(40))


def test_a_heads_own_list_decides_and_the_end_of_a_turn_is_always_there(tiny_of: TinyOf, tmp_path: Path) -> None:
    tiny = tiny_of(SPEC)
    config = ModelConfig.from_folder(tiny.folder)
    wanted = [200, 199, *range(100, 160)]
    save_head(
        tmp_path / "exit-02.safetensors", random_head(config, EXIT).tensors, config=config, exit_layer=EXIT,
        fingerprint="other", summary={}, draft_vocab=torch.tensor(wanted, dtype=torch.int32),
    )  # fmt: skip
    options = {"head": tmp_path / "exit-02.safetensors", "force_head": True, "draft_vocab": 20, "head_bits": 16}
    with tiny.engine(**options) as engine:
        assert engine.head is not None and engine.head.vocabulary is not None
        vocabulary = engine.head.vocabulary
        (end,) = engine.text.eos_token_ids
        assert vocabulary.ids.tolist() == sorted({end, *wanted[:19]})
        assert torch.equal(vocabulary.lm_head, engine.target.lm_head[torch.from_numpy(vocabulary.ids)])


def test_without_a_list_in_the_head_the_recipes_is_taken_and_without_any_ids_stand_in_order() -> None:
    config = ModelConfig(
        model_type="llama", vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    head, recipe = random_head(config, 2), find_recipe("smollm2-135m")
    source = ModelSource(folder=Path("nowhere"), recipe=recipe, name="x")
    assert list(ids_by_frequency(source, head)) == recipe.ids_by_frequency()
    assert ids_by_frequency(replace(source, recipe=None), head) == ()
    own = replace(head, draft_vocab=torch.tensor([4, 2], dtype=torch.int32))
    assert ids_by_frequency(source, own) == (4, 2)
