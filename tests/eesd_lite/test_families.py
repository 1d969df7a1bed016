"""Every family, beyond its logits: exact under drafting, with a head of its shape, taught, quantized, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eesd_lite import SamplingParams
from eesd_lite.allocated import allocated_bytes
from eesd_lite.cache import KVCache, Rows
from eesd_lite.config import ModelConfig
from eesd_lite.dense import band
from eesd_lite.distill import head_module
from eesd_lite.distill.run import TrainRequest, head_name, train_heads
from eesd_lite.distill.teacher import DenseTarget, cache_texts
from eesd_lite.engine import Engine
from eesd_lite.errors import HeadError, ModelError
from eesd_lite.evaluate import transformers_model
from eesd_lite.exit_head import ExitHead
from eesd_lite.head_choice import random_head
from eesd_lite.head_file import load_head, save_head
from eesd_lite.packing import KernelSet
from eesd_lite.quantize import quantize_folder
from eesd_lite.rope import layer_reaches
from eesd_lite.sizing import kv_bytes_per_token
from quant.errors import CheckpointError
from quant.kernels import DenseKernel
from tests.families import prefill, reference_logits, relative_errors, text
from tests.puppets import (
    assert_caches_are_those_of,
    at_random,
    drafting,
    ids_of,
    plain_ids,
    right_for,
    watched_rounds,
    wrong,
)
from tests.tiny import Tiny, TinySpec, build

EngineOf = Callable[..., Engine]
TinyOf = Callable[[TinySpec], Tiny]

# One model a family with all that sets it apart; windows are shorter than the texts of these tests.
WINDOWED = {"use_sliding_window": True, "sliding_window": 16}
FAMILIES = {
    "llama with biases": TinySpec(seed=31, bias="real", config={"mlp_bias": True}),
    "mistral": TinySpec(seed=32, model_type="mistral", head_dim=32, config={"sliding_window": 16}),
    "qwen2": TinySpec(seed=33, model_type="qwen2", tied=True, config={**WINDOWED, "max_window_layers": 1}),
    "qwen3": TinySpec(
        seed=34, model_type="qwen3", head_dim=32, bias="real", config={**WINDOWED, "max_window_layers": 2}
    ),
    "smollm3": TinySpec(
        seed=35, model_type="smollm3", config={**WINDOWED, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": None}
    ),
}  # fmt: skip
OFFLOADED: dict[str, Any] = {"head": "random", "exit_layer": 1, "resident_layers": 2, "context": 64}
PROMPT = list(b"Tell me more")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 9},
}


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, "ignore_eos": True, **settings})


# Exactness.


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_gives_the_plain_ids_in_every_family(engine_of: EngineOf, family: str, settings: str) -> None:
    engine, wanted = engine_of(FAMILIES[family], **OFFLOADED), params(**SETTINGS[settings])
    expected = plain_ids(engine, PROMPT, wanted)
    for controller in ("calibrated", "fixed:3", "tree:6"):
        engine.set_controller(controller)
        assert ids_of(engine, PROMPT, wanted) == expected, controller
    written, vocab = PROMPT + expected, engine.config.vocab_size
    engine.set_controller("fixed:5")
    for proposal in (right_for(2, written, vocab), wrong(written, vocab), at_random(7, written, vocab)):
        with drafting(engine, proposal):
            assert ids_of(engine, PROMPT, wanted) == expected


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_drafting_gives_the_plain_ids_in_float32_too(engine_of: EngineOf, family: str) -> None:
    engine, wanted = engine_of(FAMILIES[family], dtype="float32", **OFFLOADED), params(max_new_tokens=14)
    expected = plain_ids(engine, PROMPT, wanted)
    engine.set_controller("fixed:4")
    with drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
        assert ids_of(engine, PROMPT, wanted) == expected


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "smollm3"])
def test_after_rounds_that_cross_the_window_every_cache_is_that_of_a_fresh_prefill(
    engine_of: EngineOf, family: str
) -> None:
    engine, wanted = engine_of(FAMILIES[family], **OFFLOADED), params()
    expected = plain_ids(engine, PROMPT, wanted)
    engine.set_controller("fixed:4")
    with watched_rounds(engine) as rounds, drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
        assert ids_of(engine, PROMPT, wanted) == expected
    for held, found in rounds[::3]:
        assert_caches_are_those_of(engine, held, found)


def test_a_row_sees_exactly_the_keys_of_its_window(engine_of: EngineOf) -> None:
    """Mistral, window 16 in each of 4 layers: position 63 depends on the last 4 * 15 + 1 tokens and on no other."""
    engine, ids = engine_of(FAMILIES["mistral"], **(OFFLOADED | {"context": 100})), text(70)
    last = prefill(engine, ids)[-1]
    for place, seen in ((8, False), (9, True), (69, True)):  # 69 - 60 = 9
        changed = list(ids)
        changed[place] ^= 1
        assert torch.equal(prefill(engine, changed)[-1], last) != seen, place


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_planned_is_what_is_allocated_in_every_family(engine_of: EngineOf, family: str) -> None:
    """Biases, norms of heads and tables that turn nothing are counted, to the byte, in layers and in the head."""
    engine = engine_of(FAMILIES[family], **OFFLOADED)
    lasting = {name: size for name, size in engine.plan.items if name != "scratch"}
    assert allocated_bytes(engine) == {"device": lasting, "host": {}}


# Heads, teachers and quantized copies of every family.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainable_head_computes_what_the_engines_head_does(engine_of: EngineOf, family: str) -> None:
    engine = engine_of(FAMILIES[family], **(OFFLOADED | {"dtype": "float32"}))
    config, head = engine.config, random_head(engine.config, 1)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator) for name, tensor in head.tensors.items()
    }
    states = torch.randn(40, config.hidden_size, generator=torch.Generator().manual_seed(2))
    reach = engine.target.reaches[1]
    ops, dense = engine.target.ops, DenseKernel(engine.target.ops.dense, torch.float32)
    kv = KVCache(1, 64, num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim, dtype=torch.float32)
    bound = ExitHead(
        config, replace(head, tensors=tensors), ops=ops, kernels=KernelSet(None, dense), reach=reach, kv=kv
    )
    with torch.inference_mode():
        ours = bound.forward(states, Rows.chain(0, 40))
    packing = head_module.Packing.of([40])
    trained = head_module.ExitHead(head.shape, reach, eps=config.rms_norm_eps).load(tensors)
    with torch.no_grad():
        theirs = trained(states, packing.positions, packing.to_grid, packing.from_grid)
    assert relative_errors(theirs, ours).max() < 1e-5  # float32 sums in another order
    assert set(trained.tensors()) == set(head.shape.tensor_shapes())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_computes_what_transformers_does(tiny_of: TinyOf, family: str) -> None:
    tiny, ids = tiny_of(FAMILIES[family]), text(50)
    expected = reference_logits(tiny, ids)
    target = DenseTarget(tiny.folder, context=50, dtype=torch.float32)
    whole = target.logits(target.forward(torch.tensor([ids]))[1])[0]
    assert relative_errors(whole, expected).max() <= 1e-5
    kv, tail = target.new_kv(1, 50), []
    target.forward(torch.tensor([ids[:40]]), kv=kv)
    for place in range(40, 50):
        final = target.forward(torch.tensor([[ids[place]]]), kv=kv, start=place)[1]
        tail.append(target.logits(final)[0])
    assert relative_errors(torch.cat(tail), expected[40:]).max() <= 1e-5


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_an_instant_head_of_the_family_loads_and_drafts_and_changes_no_id(
    tiny_of: TinyOf, tmp_path: Path, family: str
) -> None:
    tiny = tiny_of(FAMILIES[family])
    sequences = [[(7 * row + n * n) % 250 for n in range(40)] for row in range(60)]
    cache_texts(tiny.folder, tmp_path / "states", sequences, exit_layers=(2,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EESD_HOME", str(tiny.home))
        request = TrainRequest(
            model=str(tiny.folder), exit_layers=(2,), out=tmp_path / "out", cache=tmp_path / "states", instant=True
        )
        train_heads(request)
    path = tmp_path / "out" / head_name(2)
    found = load_head(path, ModelConfig.from_folder(tiny.folder)).tensors
    for name in found:
        if name.startswith("layer.") and (".bias" in name or "_norm" in name):
            exact = tiny.weights[f"model.layers.2.{name.removeprefix('layer.')}"]
            assert torch.equal(found[name], exact.bfloat16()), name
    with tiny.engine(head=path, resident_layers=2, context=64, controller="fixed:3") as engine:
        expected = plain_ids(engine, PROMPT, params())
        assert ids_of(engine, PROMPT, params()) == expected
        assert engine.stats.accepted > 0


def sixteen_bit(tiny: Tiny, folder: Path) -> Path:
    """The exact weights of a tiny model as a folder that was never quantized."""
    folder.mkdir()
    for path in tiny.folder.iterdir():
        if path.is_file() and path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((tiny.folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: w.half().contiguous() for name, w in tiny.weights.items() if name != "lm_head.weight"}
    if not tiny.spec.tied:
        weights["lm_head.weight"] = tiny.weights["lm_head.weight"].half().contiguous()
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["llama with biases", "qwen3", "smollm3"])
def test_a_quantized_copy_keeps_biases_and_norms_and_runs_as_transformers_says(
    tiny_of: TinyOf, tmp_path: Path, family: str
) -> None:
    tiny, ids = tiny_of(FAMILIES[family]), text(60)
    source, copy = sixteen_bit(tiny, tmp_path / "source"), tmp_path / "copy"
    quantize_folder(
        source, copy, group_size=32, calibration=[[(5 * r + n * n) % 250 for n in range(40)] for r in range(8)]
    )
    with torch.inference_mode():
        expected = transformers_model(copy, torch.float32)(torch.tensor([ids])).logits[0]
    with Tiny(copy, tiny.spec, {}).engine(dtype="float32", context=64) as engine:
        assert relative_errors(prefill(engine, ids), expected).max() <= 1e-5
    # Four bits of random weights: near enough to be the same model, in every layer.
    assert relative_errors(expected, reference_logits(tiny, ids)).median() < 0.5


def test_a_zero_bias_that_the_family_has_survives_quantizing(tiny_of: TinyOf, tmp_path: Path) -> None:
    tiny = tiny_of(TinySpec(seed=36, bias="zero", layers=2))
    copy = tmp_path / "copy"
    quantize_folder(sixteen_bit(tiny, tmp_path / "source"), copy, group_size=32, method="rtn")
    transformers_model(copy, torch.float32)  # would say which tensors it lacks
    with Tiny(copy, tiny.spec, {}).engine() as engine:
        assert len(ids_of(engine, PROMPT, params(max_new_tokens=3))) == 3


# What must be there, and what must fit.


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.k_norm.weight"])
def test_a_bias_or_norm_that_the_family_needs_is_missed_by_name(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file

    tiny = build(tmp_path / "model", FAMILIES["qwen3"])
    stored = load_file(tiny.folder / "model.safetensors")
    del stored[f"model.layers.2.{name}"]
    save_file(stored, tiny.folder / "model.safetensors")
    with pytest.raises((ModelError, CheckpointError), match=rf"model\.layers\.2\.{name}"):
        tiny.engine()


def test_a_norm_that_the_family_lacks_is_not_left_out_in_silence(tmp_path: Path) -> None:
    tiny = build(tmp_path / "model", FAMILIES["qwen3"])
    config = json.loads((tiny.folder / "config.json").read_text())
    config |= {"model_type": "llama", "use_sliding_window": False, "architectures": ["LlamaForCausalLM"]}
    (tiny.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"layers.0.self_attn.k_norm.weight' is stored, and model_type llama has no such"
    ):
        tiny.engine()


def test_a_bias_is_added_once_and_after_the_product(tiny_of: TinyOf, engine_of: EngineOf) -> None:
    """Against float64 on one row; the parity with transformers says the same for whole models."""
    spec = replace(FAMILIES["qwen2"], config={})
    engine, tiny = engine_of(spec, dtype="float32"), tiny_of(spec)
    x = torch.randn(1, spec.hidden, generator=torch.Generator().manual_seed(0))
    parts = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    wanted = torch.cat(
        [x.double() @ tiny.weights[f"{p}.weight"].double().T + tiny.weights[f"{p}.bias"].double() for p in parts], dim=1
    )
    assert relative_errors(engine.target.bank.layer(0).qkv(x).double(), wanted).item() < 1e-6


@pytest.mark.parametrize("kv_heads", [1, 2, None])
def test_keys_and_values_are_kept_for_key_value_heads_only(engine_of: EngineOf, kv_heads: int | None) -> None:
    changes = {"num_key_value_heads": None} if kv_heads is None else {}
    spec = TinySpec(seed=37, heads=8, kv_heads=kv_heads or 8, head_dim=8, layers=2, config=changes)
    engine = engine_of(spec)
    assert engine.config.num_key_value_heads == spec.kv_heads
    per_token = kv_bytes_per_token(engine.config, torch.bfloat16.itemsize)
    assert per_token == 2 * spec.kv_heads * 8 * 2
    assert engine.target.kv.nbytes == per_token * spec.layers * engine.plan.context


@pytest.mark.parametrize("rows", [-1, 8])
def test_a_head_made_for_another_vocabulary_is_refused(tiny_of: TinyOf, tmp_path: Path, rows: int) -> None:
    config = ModelConfig.from_folder(tiny_of(TinySpec()).folder)
    other = replace(config, vocab_size=config.vocab_size + rows)
    tensors = random_head(config, 1).tensors
    path = tmp_path / "head.safetensors"
    save_head(path, tensors, config=other, exit_layer=1, fingerprint="a" * 64, summary={})
    for force in (False, True):
        with pytest.raises(HeadError, match=f"vocab_size {other.vocab_size}, this model has {config.vocab_size}"):
            load_head(path, config, "a" * 64, force=force)


def test_a_head_with_an_output_matrix_of_its_own_is_refused(tiny_of: TinyOf, tmp_path: Path) -> None:
    config = ModelConfig.from_folder(tiny_of(TinySpec()).folder)
    tensors = random_head(config, 1).tensors | {
        "lm_head.weight": torch.zeros(config.vocab_size - 1, config.hidden_size)
    }
    with pytest.raises(HeadError, match=r"unknown tensor lm_head.weight"):
        save_head(tmp_path / "h", tensors, config=config, exit_layer=1, fingerprint="a", summary={})


def test_a_scale_that_overflows_is_traced_to_its_layer(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tiny = build(tmp_path / "model", TinySpec(seed=38))
    stored = load_file(tiny.folder / "model.safetensors")
    stored["model.layers.1.mlp.down_proj.scales"][0, 0] = float("inf")
    save_file(stored, tiny.folder / "model.safetensors")
    for dtype, hint in (("bfloat16", "dtype float32 helps if bfloat16 overflowed"), ("float32", "checkpoint itself")):
        with tiny.engine(dtype=dtype, head="random", exit_layer=1, resident_layers=2) as engine:
            with pytest.raises(ModelError, match=f"logit of token .* come out of layer 1 of 4; .*{hint}"):
                ids_of(engine, PROMPT, params())


def test_a_band_holds_the_last_keys_of_every_query() -> None:
    found = band(5, 2, torch.device("cpu"))
    assert found is not None and found.int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip
    assert band(5, 5, torch.device("cpu")) is None and band(5, None, torch.device("cpu")) is None


def test_layers_share_tables_and_a_layer_that_does_not_rotate_has_a_still_one(tiny_of: TinyOf) -> None:
    config = ModelConfig.from_folder(tiny_of(FAMILIES["smollm3"]).folder)
    reaches = layer_reaches(config, 50)
    assert reaches[0].rope is reaches[2].rope and reaches[1].rope is reaches[3].rope
    assert bool((reaches[1].rope[0] == 1).all()) and not reaches[1].rope[1].any()
    assert [reach.window for reach in reaches] == [None, 16, None, 16]
