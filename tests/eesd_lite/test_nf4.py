"""16-bit folders loaded as nf4, and folders that transformers saved in bitsandbytes' 4-bit form.

The oracle is transformers with BitsAndBytesConfig in float32: it quantizes, saves and multiplies without us. Two
float32 implementations differ by rounding alone; 1e-5 is allowed, as in test_transformer_parity.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eesd_lite import SamplingParams
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError, HeadError, ModelError
from eesd_lite.evaluate import dequantized_state, transformers_model
from eesd_lite.evaluate_folders import EvalSettings, evaluate_folders
from eesd_lite.progress import no_progress
from eesd_lite.quantize import refuse_quantized
from quant.checkpoint import Checkpoint
from quant.errors import CheckpointError
from quant.kernels_bnb import cpu_product_missing
from quant.survey import survey
from tests.eesd_lite.test_transformer_parity import prefill, relative_errors, step_by_step
from tests.puppets import ids_of, plain_ids
from tests.tiny import Tiny, TinySpec, write_tokenizer

SPEC = TinySpec(hidden=128, inner=192, heads=4, kv_heads=2, head_dim=32, layers=5)
IDS = [(13 * n * n + 7) % 250 for n in range(80)]
PROMPT = list(b"Tell me more")


def shape(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 272, "hidden_size": SPEC.hidden, "intermediate_size": SPEC.inner,
        "num_hidden_layers": SPEC.layers, "num_attention_heads": SPEC.heads, "num_key_value_heads": SPEC.kv_heads,
        "head_dim": SPEC.head_dim, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "eos_token_id": 1,
        "bos_token_id": 0, **changes,
    }  # fmt: skip


def write_dense(folder: Path, **changes: Any) -> Tiny:
    """A random 16-bit Llama, written by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**shape(**changes)))
    for name, parameter in model.named_parameters():
        if "proj" in name and parameter.dim() == 2:
            parameter.data.mul_(4)  # so that layers matter
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return Tiny(folder, SPEC, {})


def nf4_model(folder: Path, *, double: bool = False, kind: str = "nf4") -> Any:
    """transformers' own nf4 model of a 16-bit folder, in float32."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=double,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=settings, dtype=torch.float32, device_map="cpu", attn_implementation="eager"
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # or it multiplies in bfloat16 whatever it was told
            module.support_avx512bf16_for_cpu = False
    return model


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    return model(torch.tensor([IDS])).logits[0]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_dense(tmp_path_factory.mktemp("nf4") / "dense")


@pytest.fixture(scope="module")
def saved(dense: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """The folder that transformers' save_pretrained makes of it, and its logits beside it."""
    made: dict[str, Tiny] = {}

    def get(**options: Any) -> Tiny:
        key = repr(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("nf4") / "saved"
            model = nf4_model(dense.folder, **options)
            model.save_pretrained(folder)
            write_tokenizer(folder)
            torch.save(logits_of(model), folder / "expected.logits")
            made[key] = Tiny(folder, SPEC, {})
        return made[key]

    return get


@pytest.fixture(scope="module")
def opened() -> Iterator[Callable[..., Engine]]:
    """Engines, loaded once per folder and options."""
    engines: dict[str, Engine] = {}

    def get(tiny: Tiny, **options: Any) -> Engine:
        key = repr((tiny.folder, sorted(options.items())))
        if key not in engines:
            engines[key] = tiny.engine(**options)
        return engines[key]

    yield get
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_float32_logits_of_a_16_bit_folder_are_those_of_transformers_quantizing_it(dense: Tiny, kind: str) -> None:
    expected = logits_of(nf4_model(dense.folder, kind=kind))
    with dense.engine(dtype="float32", quantize=kind) as engine:
        assert relative_errors(prefill(engine, IDS), expected).max() <= 1e-5
        assert relative_errors(step_by_step(engine, IDS[:20]), expected[:20]).max() <= 1e-5
    with dense.engine(dtype="float32") as engine:  # a control: quantizing matters
        assert relative_errors(prefill(engine, IDS), expected).max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"double": True}, {"kind": "fp4", "double": True}], ids=str)
def test_float32_logits_of_a_saved_folder_are_those_of_the_model_that_saved_it(
    saved: Callable[..., Tiny], options: dict[str, Any]
) -> None:
    tiny = saved(**options)
    expected = torch.load(tiny.folder / "expected.logits")
    with tiny.engine(dtype="float32") as engine:
        assert relative_errors(prefill(engine, IDS), expected).max() <= 1e-5
    model = transformers_model(tiny.folder, torch.float32)  # what `eesd eval` runs without --engine
    assert relative_errors(logits_of(model), expected).max() <= 1e-5


def test_bfloat16_multiplies_by_the_packed_form_and_stays_near(
    dense: Tiny, saved: Callable[..., Tiny], opened: Callable[..., Engine]
) -> None:
    name = "nf4-cpu" if cpu_product_missing() is None else "nf4-widening"
    for engine in (opened(dense, quantize="nf4"), opened(saved())):
        layer = engine.target.bank.layer(0)
        assert {linear.kernel.name for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)} == {name}
        expected = torch.load(saved().folder / "expected.logits")
        # bfloat16 rounds some twenty times on the way through five layers, by 2**-9 each time.
        assert relative_errors(prefill(engine, IDS), expected).median() < 3e-2


@pytest.mark.parametrize("options", [{}, {"resident_layers": 2}], ids=["in memory", "layers from 2 on disk"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 40, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("where", ["quantized now", "saved, double"])
def test_drafting_gives_the_plain_ids(
    dense: Tiny, saved: Callable[..., Tiny], opened: Callable[..., Engine], where: str, options: dict[str, Any],
    settings: dict[str, Any],
) -> None:  # fmt: skip
    tiny, quantize = (dense, "nf4") if where == "quantized now" else (saved(double=True), None)
    engine = opened(tiny, quantize=quantize, head="random", exit_layer=2, **options)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, **settings)
    expected = plain_ids(engine, PROMPT, params)
    for controller in ("fixed:3", "fixed:8", "calibrated"):
        engine.set_controller(controller)
        assert ids_of(engine, PROMPT, params) == expected, controller
    assert engine.stats.drafted > 0 and engine.stats.draft_offloaded_bytes == 0
    assert (engine.stats.verify_offloaded_bytes > 0) == ("resident_layers" in options)


def test_shapes_that_no_4_bit_kernel_takes_run_dense_and_biases_stay(tmp_path: Path) -> None:
    tiny = write_dense(tmp_path / "odd", intermediate_size=200, attention_bias=True)
    stored = load_file(tiny.folder / "model.safetensors")
    for name, tensor in stored.items():
        if name.endswith(".bias"):
            stored[name] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
            if "o_proj" in name:
                stored[name].zero_()
    save_file(stored, tiny.folder / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(nf4_model(tiny.folder))
    with tiny.engine(quantize="nf4", dtype="float32") as engine:
        assert relative_errors(prefill(engine, IDS), expected).max() <= 1e-5
    with tiny.engine(quantize="nf4", head="random", exit_layer=2) as engine:
        layer = engine.target.bank.layer(0)
        assert layer.down.kernel.name == "dense" and layer.qkv.kernel.name.startswith("nf4")  # type: ignore[union-attr]
        params = SamplingParams(max_new_tokens=12, ignore_eos=True)
        plain = plain_ids(engine, PROMPT, params)
        engine.set_controller("fixed:3")
        assert ids_of(engine, PROMPT, params) == plain


def test_the_packed_store_tells_nf4_and_16_bit_apart(dense: Tiny, opened: Callable[..., Engine]) -> None:
    sizes = {
        quantize: sum(size for name, size in opened(dense, quantize=quantize).plan.items if name == "resident layers")
        for quantize in ("nf4", None)
    }
    assert sizes["nf4"] < 0.4 * sizes[None], "4.5 bits, norms and pages against 16 bits"


def test_the_weights_for_transformers_are_the_quantized_ones(dense: Tiny) -> None:
    plain = dequantized_state(Checkpoint(dense.folder), torch.float32)
    quantized = dequantized_state(Checkpoint(dense.folder, quantize="nf4"), torch.float32)
    changed = {name for name in plain if not torch.equal(plain[name], quantized[name])}
    assert changed == {name for name in plain if "_proj" in name}


def test_both_forwards_evaluate_the_quantized_model(
    dense: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EESD_HOME", str(dense.home))
    (tmp_path / "ids.jsonl").write_text(json.dumps(IDS))
    asked = {"model": str(dense.folder), "reference": str(dense.folder), "ids": tmp_path / "ids.jsonl", "threads": 1}
    theirs, ours, plain = (
        evaluate_folders(EvalSettings(**asked, **options), no_progress)
        for options in ({"quantize": "nf4"}, {"quantize": "nf4", "engine": True, "dtype": "float32"}, {})
    )
    assert theirs["quantize"] == "nf4" and theirs["kld"] > 1e-4 and plain["kld"] == 0.0
    assert ours["nll"] == pytest.approx(theirs["nll"], rel=1e-5)
    assert ours["kld"] == pytest.approx(theirs["kld"], rel=1e-3)  # a difference of nearly equal numbers


def test_a_16_bit_folder_runs_as_it_is_and_one_notice_offers_nf4(dense: Tiny, opened: Callable[..., Engine]) -> None:
    offers = [line for line in opened(dense, quantize=None).notices if "--quantize nf4" in line]
    assert len(offers) == 1 and "run as they are" in offers[0]
    assert not any("--quantize" in line for line in opened(dense, quantize="nf4").notices)


def test_no_reader_is_left_behind_when_the_head_cannot_be_bound(dense: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        assert any(thread not in before for thread in threading.enumerate()), "nothing was reading yet"
        raise HeadError("no memory for a head")

    before = set(threading.enumerate())
    monkeypatch.setattr("eesd_lite.opening.load_head", fails)
    with pytest.raises(HeadError, match="no memory"):
        dense.engine(quantize="nf4", head="random", exit_layer=2, resident_layers=2)
    assert set(threading.enumerate()) <= before


def test_an_8_bit_folder_is_refused_by_name(saved: Callable[..., Tiny], dense: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "int8"
    shutil.copytree(dense.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="8-bit bitsandbytes checkpoint is not supported"):
        Checkpoint(folder)
    del config["quantization_config"]["load_in_8bit"]  # the tensors tell it too
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.SCB"] = torch.ones(SPEC.inner)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"8-bit bitsandbytes checkpoint .*up_proj.SCB"):
        Checkpoint(folder)


def test_wishes_that_make_no_sense_are_refused(saved: Callable[..., Tiny], dense: Tiny, tiny_of: Any) -> None:
    with pytest.raises(CheckpointError, match="quantized already"):
        saved().engine(quantize="nf4")
    with pytest.raises(CheckpointError, match="quantized already"):
        tiny_of(TinySpec()).engine(quantize="nf4")
    with pytest.raises(CheckpointError, match="must be nf4 or fp4, not 'int8'"):
        dense.engine(quantize="int8")


def test_a_4_bit_folder_is_not_quantized_again(saved: Callable[..., Tiny], dense: Tiny) -> None:
    refuse_quantized(dense.folder)
    with pytest.raises(EesdError, match="quantized already"):
        refuse_quantized(saved().folder)


def test_a_cut_4_bit_file_is_named_before_loading(saved: Callable[..., Tiny], tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(saved().folder, folder)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    stored[name] = stored[name][:-1].contiguous()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelError, match="down_proj.weight' has 12287 bytes, 128 x 192 codes of nf4 need 12288"):
        Tiny(folder, SPEC, {}).engine()
    stored.pop(f"{name}.absmax")
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelError, match="down_proj.weight.absmax' is missing"):
        Tiny(folder, SPEC, {}).engine()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    with pytest.raises(ModelError, match="up_proj' is 192 x 128 .nf4., config.json says 256 x 128"):
        Tiny(folder, SPEC, {}).engine()


def test_a_survey_knows_4_bit_matrices_without_reading_them(saved: Callable[..., Tiny], tmp_path: Path) -> None:
    found = survey(saved(double=True).folder)
    assert not found.problems and not found.other
    module = next(module for module in found.modules if module.name == "model.layers.0.mlp.down_proj")
    assert (module.kind, module.shape, module.bits, module.group_size) == ("nf4", (128, 192), 4, 64)
    assert module.nbytes > 128 * 192 // 2 and len(found.quantized) == 7 * SPEC.layers
    assert sum(module.nbytes for module in found.modules) == found.total_bytes


def test_nothing_in_a_saved_folder_is_called_unused(saved: Callable[..., Tiny]) -> None:
    with saved(double=True).engine(dtype="float32") as engine:
        assert not any("nothing uses" in line for line in engine.notices)
