"""Exit heads and their copy of lm_head in 8 and 4 bits: the ids of plain decoding, caches, counted bytes, rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eesd_lite import SamplingParams
from eesd_lite.allocated import allocated_bytes
from eesd_lite.cache import Rows
from eesd_lite.config import ModelConfig
from eesd_lite.distill.head_module import ExitHead as HeadModule
from eesd_lite.draft_vocabulary import DraftVocabulary
from eesd_lite.draft_weights import DraftWeights
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError
from eesd_lite.head_choice import random_head
from eesd_lite.head_packing import pack_rounded, rounded, rounded_kernels
from eesd_lite.loader import LoadOptions, choose_kernels
from eesd_lite.packing import KernelSet
from eesd_lite.planning import PlanWishes, plan_model
from eesd_lite.sizing import Part, draft_part_bytes, head_bytes
from tests.puppets import assert_caches_are_those_of, caches, ids_of, plain_ids
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5, hidden=128, inner=192)
EXIT = 2
MEMORY: dict[str, Any] = {"head": "random", "exit_layer": EXIT, "draft_limit": 64}
PLACES: dict[str, dict[str, Any]] = {"in memory": MEMORY, "on disk": {**MEMORY, "resident_layers": EXIT}}
DRAFTS: dict[str, dict[str, Any]] = {
    "8 bits": {"head_bits": 8},
    "4 bits": {"head_bits": 4},
    "8 bits, 50 tokens": {"head_bits": 8, "draft_vocab": 50},
    "4 bits, 50 tokens": {"head_bits": 4, "draft_vocab": 50},
    "4 bits, all tokens": {"head_bits": 4, "draft_vocab": "all"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 3},
}
PROMPT = list(b"Few bits will do")
EngineOf, TinyOf = Callable[..., Engine], Callable[[TinySpec], Tiny]


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 20, "ignore_eos": True, **options})


def kernels_of(dtype: str = "bfloat16") -> KernelSet:
    return choose_kernels(LoadOptions("cpu", dtype, None, None, 64, 4, 1, None))[1]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("place", PLACES)
def test_ids_are_those_of_plain_decoding_and_caches_those_of_a_fresh_prefill(
    engine_of: EngineOf, place: str, drafts: str
) -> None:
    engine = engine_of(SPEC, **PLACES[place], **DRAFTS[drafts])
    for name, settings in SETTINGS.items():
        expected = plain_ids(engine, PROMPT, params(**settings))
        for controller in ("fixed:4", "tree:24"):
            engine.set_controller(controller)
            assert ids_of(engine, PROMPT, params(**settings)) == expected, (name, controller)
            held = list(engine.cached_ids)
            assert_caches_are_those_of(engine, held, caches(engine, len(held)))
    assert engine.stats.drafted > 0


def test_rounded_heads_draft_otherwise_but_not_at_random(engine_of: EngineOf) -> None:
    """The hidden states that lm_head gets: near those of 16 bits, nearer in 8 than in 4, and not the same."""
    state, rows = randn(6, SPEC.hidden), Rows.chain(0, 6)
    found = {}
    for bits in (16, 8, 4):
        head = engine_of(SPEC, **MEMORY, head_bits=bits).head
        assert head is not None and head.bits == bits
        found[bits] = head.forward(state, rows).double()
    far = {bits: float((found[bits] - found[16]).norm() / found[16].norm()) for bits in (8, 4)}
    assert 0 < far[8] < 0.02 < far[4] < 0.3  # a step of 1/127 of the largest weight of a row, or of 1/15 of a group


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rounded_head_computes_what_its_dequantized_weights_give_in_float64(
    engine_of: EngineOf, bits: int, dtype: str
) -> None:
    engine = engine_of(SPEC, **MEMORY, head_bits=bits, dtype=dtype)
    assert engine.head is not None
    tensors = dict(random_head(engine.config, EXIT).tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:  # rounded by rows: fused products round as their parts do
            groups = DraftWeights(bits).groups(tensor.shape[1])
            assert groups is not None
            tensors[name] = rounded([tensor], bits, groups).dequantize()
    oracle = HeadModule(
        random_head(engine.config, EXIT).shape, engine.target.reaches[EXIT], eps=engine.config.rms_norm_eps,
        compute=torch.float64,
    ).load(tensors)  # fmt: skip
    count = 7
    state, one = randn(count, SPEC.hidden, seed=5), torch.arange(count)
    expected = oracle(state, one, one[None], one).double().detach()
    found = engine.head.forward(state, Rows.chain(0, count)).double()
    # bfloat16 activations through four products and a softmax: 2**-9 each; float32 rounds the rest of the way.
    assert float((found - expected).norm() / expected.norm()) < (1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_logits_of_a_rounded_copy_are_those_of_its_dequantized_rows(engine_of: EngineOf, bits: int) -> None:
    engine = engine_of(SPEC, **MEMORY)
    table, kernels = engine.target.lm_head, kernels_of()
    ids = list(range(3, 60, 2))
    vocabulary = DraftVocabulary.of(table, ids, bits=bits, kernels=kernels)
    x = randn(9, SPEC.hidden, seed=2).to(torch.bfloat16)
    groups = DraftWeights(bits).groups(SPEC.hidden)
    assert groups is not None
    exact = x.double() @ rounded([table[ids]], bits, groups).dequantize().double().t()
    found = vocabulary.logits(x, engine.target.ops)
    assert found.dtype == torch.float32 and found.shape == (9, len(ids))
    assert float((found.double() - exact).norm() / exact.norm()) < 6e-3  # results and offsets in bfloat16
    alone = torch.cat([vocabulary.logits(x[row : row + 1], engine.target.ops) for row in range(9)])
    assert torch.equal(alone, found), "a row's bits do not depend on the rows beside it"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("odd", [False, True], ids=["even", "odd sizes"])
def test_bytes_that_are_planned_are_allocated(
    tiny_of: TinyOf, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, odd: bool, drafts: str, dtype: str
) -> None:
    spec = TinySpec(layers=4, heads=3, kv_heads=1, head_dim=8, inner=160, bias="real") if odd else SPEC
    engine = engine_of(spec, **MEMORY, **DRAFTS[drafts], dtype=dtype)
    found, planned = allocated_bytes(engine)["device"], dict(engine.plan.items)
    for item in ("exit head", "draft vocabulary"):
        assert found.get(item) == planned.get(item), item
    assert ("draft vocabulary" in planned) == ("draft_vocab" in DRAFTS[drafts])
    monkeypatch.setenv("EESD_HOME", str(tiny_of(spec).home))
    wishes = PlanWishes(exit_layer=EXIT, context=128, draft_limit=64, dtype=dtype, **DRAFTS[drafts])
    told = dict(plan_model(tiny_of(spec).folder, wishes).plan.items)
    assert {item: told[item] for item in planned if "draft" in item or "head" in item} == {
        item: planned[item] for item in planned if "draft" in item or "head" in item
    }


@pytest.mark.parametrize("shape", [(48, 64), (40, 96), (24, 72), (64, 40), (1, 16)])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_rounded_matrix_takes_the_bytes_that_are_computed_for_it(shape: tuple[int, int], bits: int) -> None:
    draft = DraftWeights(bits)
    for bias in (None, randn(shape[0])):
        _, stored = pack_rounded([randn(*shape)], draft, rounded_kernels(kernels_of(), bits), bias)
        part = Part(out_features=shape[0], in_features=shape[1], bias=bias is not None)
        assert draft_part_bytes(part, draft, "int4-cpu", 2) == tuple(tensor.nbytes for tensor in stored.values())


def test_a_head_of_a_70b_in_4_bits_has_the_bytes_that_are_computed_by_hand() -> None:
    config = ModelConfig(
        model_type="llama", vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    weights = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 8192 * 8192
    rest = 4 * 8192 * 2  # three norms and the bias
    assert head_bytes(config, 2, DraftWeights(4), "int4-cpu") == weights // 2 + weights // 64 * 4 + rest
    outputs = 2 * 8192 + 2 * 1024 + 2 * 28672 + 8192 + 8192
    assert head_bytes(config, 2, DraftWeights(8), "int4-cpu") == -(-(weights + 2 * outputs + rest) // 4096) * 4096


def test_rounding_keeps_the_clipping_with_the_least_error_in_rows_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = randn(40, 128)
    weight[3, 5] = 9.0  # far out: the others of its group should not all pay for it
    whole = rounded([weight], 4, 2)
    monkeypatch.setattr("eesd_lite.head_packing._ROUND_ROWS", 16)
    parts = rounded([weight[:24], weight[24:]], 4, 2)
    assert torch.equal(whole.dequantize(), parts.dequantize()), "pieces and parts do not show"
    step = (weight.view(40, 2, 64).amax(2) - weight.view(40, 2, 64).amin(2)) / 15
    unclipped = step.square().sum() * 64 / 12  # of even rounding errors
    assert (whole.dequantize() - weight).square().sum() < unclipped


def test_what_no_kernel_takes_is_kept_dequantized_and_said(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **MEMORY, head_bits=8, dtype="float32")
    assert [note for note in engine.notices if note.startswith("head_bits 8: no kernel for that here")]
    assert not [note for note in engine_of(SPEC, **MEMORY, head_bits=8).notices if "head_bits" in note]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_bits": 5}, "head_bits must be 16, 8 or 4, not 5"),
        ({"head_bits": "8"}, "head_bits must be 16, 8 or 4, not '8'"),
        (
            {"draft_vocab": "all", "head_bits": 16},
            "draft_vocab all is a copy of lm_head in fewer bits; set head_bits 8 or 4 with it",
        ),
        ({"draft_vocab": "most", "head_bits": 4}, "draft_vocab must be a number of tokens, or all, not 'most'"),
    ],
)
def test_bits_and_tokens_that_cannot_be_are_one_line(tiny_of: TinyOf, options: dict[str, Any], words: str) -> None:
    with pytest.raises(EesdError) as caught:
        tiny_of(SPEC).engine(**MEMORY, **options)
    assert str(caught.value) == words


def test_where_nothing_is_asked_there_are_8_bits_if_a_kernel_has_them(engine_of: EngineOf) -> None:
    found = {}
    for dtype in ("bfloat16", "float32"):
        engine = engine_of(SPEC, **MEMORY, dtype=dtype)
        assert engine.head is not None and not [note for note in engine.notices if "head_bits" in note]
        found[dtype] = engine.head.bits
    assert found == {"bfloat16": 8, "float32": 16}


def test_heads_in_other_bits_are_other_heads_to_a_saved_cache(engine_of: EngineOf, tmp_path: Path) -> None:
    kept = tmp_path / "prefix"
    engines = {bits: engine_of(SPEC, **MEMORY, head_bits=bits, controller="fixed:2") for bits in (16, 8)}
    ids_of(engines[8], PROMPT, params(max_new_tokens=4))
    engines[8].save_prefix(kept)
    assert engines[16].load_prefix(kept) == 0 and engines[8].load_prefix(kept) > 0


@pytest.mark.real
def test_the_demo_model_in_few_bits_gives_the_plain_ids(demo_model: Path) -> None:
    settings = replace(params(max_new_tokens=24), temperature=0.8, top_k=40, seed=7)
    with Engine.from_pretrained(
        demo_model, exit_layer=10, resident_layers=10, context=128, threads=1, draft_limit=32, head_bits=4,
        draft_vocab=4096,
    ) as engine:  # fmt: skip
        prompt = engine.text.render_chat([{"role": "user", "content": "Name three rivers."}])
        for chosen in (params(max_new_tokens=24), settings):
            expected = plain_ids(engine, prompt, chosen)
            for controller in ("fixed:4", "tree:16"):
                engine.set_controller(controller)
                assert ids_of(engine, prompt, chosen) == expected
        assert engine.stats.accepted > 0
        held = list(engine.cached_ids)
        assert_caches_are_those_of(engine, held, caches(engine, len(held)))
        found = allocated_bytes(engine)["device"]
        assert {item: found[item] for item in ("exit head", "draft vocabulary")} == {
            "exit head": dict(engine.plan.items)["exit head"],
            "draft vocabulary": 4096 * (576 // 2 + 576 // 64 * 4),
        }
