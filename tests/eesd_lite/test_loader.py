"""Loading: what a checkpoint must hold, kinds of modules side by side, one storage per tensor, bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eesd_lite import SamplingParams
from eesd_lite.blob_reader import BlobReader
from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from eesd_lite.errors import ModelError, StreamError
from eesd_lite.layer_blob import BLOCK, page_buffer
from quant.errors import CheckpointError
from tests.numpy_gptq import draw
from tests.puppets import ids_of
from tests.tiny import Tiny, TinySpec, build

TinyOf = Callable[[TinySpec], Tiny]
PROMPT = list(b"Load me")


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """A model of its own, to be changed."""
    return build(tmp_path / "model", TinySpec(layers=3))


def change(tiny: Tiny, put: dict[str, Tensor] | None = None, *, drop: str | None = None, **config: Any) -> None:
    """Add or replace tensors, drop those whose name contains `drop`, change keys of config.json (None removes)."""
    path = tiny.folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if drop is None or drop not in name}
    save_file({**tensors, **(put or {})}, path)
    raw = json.loads((tiny.folder / "config.json").read_text()) | config
    (tiny.folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


@torch.inference_mode()
def logits(engine: Engine, ids: list[int] = PROMPT) -> Tensor:
    target = engine.target
    return target.logits(target.upper(target.embed(ids), Rows.chain(0, len(ids))))


def logits_of(tiny: Tiny, **options: Any) -> Tensor:
    with tiny.engine(**{"dtype": "float32", **options}) as engine:
        return logits(engine)


def test_zero_biases_and_stored_inv_freq_change_nothing(tiny: Tiny) -> None:
    before = logits_of(tiny)
    names = [
        name.removesuffix(".qweight") for name in load_file(tiny.folder / "model.safetensors") if "qweight" in name
    ]
    zeros = {f"{name}.bias": torch.zeros(tiny.weights[f"{name}.weight"].shape[0]).half() for name in names}
    change(tiny, {**zeros, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((8,), 7.0)})
    assert torch.equal(logits_of(tiny), before)


def test_a_model_without_biases_loads_the_same_from_memory_full_of_rubbish(tiny: Tiny) -> None:
    before = logits_of(tiny)
    rubbish = [torch.full((1 << 16,), float("nan")) for _ in range(64)]
    del rubbish
    assert torch.equal(logits_of(tiny), before)


def test_modules_of_different_kinds_stand_side_by_side(tiny: Tiny) -> None:
    """What a module is follows from its tensors: another group size, 16 bit, act-order in one part of a product."""
    rng = np.random.default_rng(5)
    other = draw(rng, 96, 64, group=64, spread=0.15)
    ordered = draw(rng, 64, 64, group=32, desc_act=True, spread=0.15)
    plain = torch.from_numpy(rng.standard_normal((64, 96)) * 0.1).half()
    change(tiny, drop="model.layers.1.mlp.down_proj")
    put = {f"model.layers.0.mlp.gate_proj.{name}": torch.from_numpy(value) for name, value in other.tensors.items()}
    put |= {
        f"model.layers.2.self_attn.q_proj.{name}": torch.from_numpy(value) for name, value in ordered.tensors.items()
    }
    change(tiny, {**put, "model.layers.1.mlp.down_proj.weight": plain})
    expected = {
        "model.layers.0.mlp.gate_proj": torch.from_numpy(other.dequantized),
        "model.layers.2.self_attn.q_proj": torch.from_numpy(ordered.dequantized),
        "model.layers.1.mlp.down_proj": plain.float(),
    }
    mixed = logits_of(tiny)
    for name, weight in expected.items():  # the same model, all of these in 16 bit or wider
        change(tiny, drop=name)
        change(tiny, {f"{name}.weight": weight})
    assert torch.allclose(mixed, logits_of(tiny), rtol=1e-5, atol=1e-4)
    # bfloat16 rounds weights and activations to 8 bits, here through three layers.
    assert (logits_of(tiny, dtype="bfloat16") - mixed).norm() / mixed.norm() < 0.05


def test_weights_chooses_between_two_files_and_each_has_packed_layers_of_its_own(tiny: Tiny, tmp_path: Path) -> None:
    other = build(tmp_path / "other", TinySpec(layers=3, seed=77, bits=8))
    shutil.copyfile(other.folder / "model.safetensors", tiny.folder / "model-8bit.safetensors")
    with pytest.raises(CheckpointError, match=r"2 weight files .*\(model-8bit.safetensors, model.saf.*--weights"):
        tiny.engine()
    eight, four = (logits_of(tiny, weights=name) for name in ("model-8bit.safetensors", "model.safetensors"))
    assert torch.equal(eight, logits_of(other)) and not torch.equal(four, eight)
    assert len(list((tiny.home / "packed").iterdir())) == 2
    with tiny.engine(weights="model-8bit.safetensors") as engine:
        assert any("8-bit, the settings say 4; the tensors win" in notice for notice in engine.notices)


def test_a_quantized_lm_head_is_used(tiny_of: TinyOf) -> None:
    tiny = tiny_of(TinySpec(layers=3, quantized_lm_head=True))
    with tiny.engine(dtype="float32") as engine:
        assert torch.equal(engine.target.lm_head, tiny.weights["lm_head.weight"])


def test_a_tied_lm_head_is_the_embedding_itself_even_if_a_copy_is_stored(tmp_path: Path) -> None:
    tiny = build(tmp_path / "model", TinySpec(layers=3, tied=True))
    copy = load_file(tiny.folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    change(tiny, {"lm_head.weight": copy})
    with tiny.engine() as engine:
        assert engine.target.lm_head is engine.target.embedding
        assert "lm_head" not in dict(engine.plan.items)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("lm_head", "'lm_head.weight' is missing and config.json does not tie it"),
        ("model.norm", "'model.norm.weight' is missing"),
        ("embed_tokens", "'model.embed_tokens.weight' is missing"),
        ("layers.1.", "layer 1 of 3 has no tensors"),
        ("layers.2.mlp.up_proj", "up_proj.weight' is missing"),
        ("layers.0.self_attn.o_proj.scales", "o_proj.scales' is missing"),
        ("layers.0.self_attn.o_proj.qweight", "o_proj.qweight' is missing"),
        ("layers.1.post_attention_layernorm", "post_attention_layernorm.weight' is missing"),
    ],
)
def test_a_tensor_that_is_missing_is_named(tiny: Tiny, drop: str, message: str) -> None:
    change(tiny, drop=drop)
    with pytest.raises(ModelError, match=message):
        tiny.engine()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 300}, r"embed_tokens.weight' has shape \(288, 64\), config.json says \(300, 64\)"),
        ({"hidden_size": 128}, r"config.json says \(288, 128\)"),
        ({"num_hidden_layers": 4}, "layer 3 of 4 has no tensors"),
        ({"num_key_value_heads": 4}, r"k_proj' is 32 x 64 \(4-bit, qweight \(8, 32\)\), config.json says 64 x 64"),
        ({"intermediate_size": 128}, "gate_proj' is 96 x 64 .* config.json says 128 x 64"),
        ({"head_dim": 32}, "q_proj' is 64 x 64"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(tiny: Tiny, config: dict[str, Any], message: str) -> None:
    change(tiny, **config)
    with pytest.raises(ModelError, match=message):
        tiny.engine()


def test_an_lm_head_of_another_size_is_refused(tiny: Tiny) -> None:
    change(tiny, {"lm_head.weight": torch.zeros(300, 64)})
    with pytest.raises(ModelError, match="lm_head.weight' has shape"):
        tiny.engine()


def test_a_sliding_window_does_not_bound_the_context(tiny: Tiny) -> None:
    change(tiny, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=32)
    with tiny.engine(context=None) as engine:
        assert engine.plan.context == 512


def test_a_context_beyond_dynamic_ropes_original_one_is_refused_by_name(tiny: Tiny) -> None:
    change(tiny, rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    with tiny.engine(context=None) as engine:
        assert engine.plan.context == 64
    with pytest.raises(ModelError, match="96 positions: rope scaling 'dynamic' is supported up to .* context of 64"):
        tiny.engine(context=96)


def test_a_float16_checkpoint_runs_on_a_cpu(tiny: Tiny) -> None:
    change(tiny, torch_dtype="float16", quantization_config=None)
    for name, weight in tiny.weights.items():
        if name.endswith("proj.weight"):
            change(tiny, {name: weight.half()}, drop=name.removesuffix(".weight"))
    with tiny.engine() as engine:
        assert len(ids_of(engine, PROMPT, SamplingParams(max_new_tokens=4, ignore_eos=True))) == 4


# Reading blobs.


def test_a_blob_is_read_whole_and_files_are_opened_once(tmp_path: Path) -> None:
    path, data = tmp_path / "blob", np.random.default_rng(0).bytes(5 * BLOCK)
    path.write_bytes(data)
    reader, buffer = BlobReader(), page_buffer(6 * BLOCK)
    for _ in range(3):
        buffer.zero_()
        reader.read(path, buffer, 5 * BLOCK)
        assert bytes(buffer[: 5 * BLOCK].numpy()) == data and not buffer[5 * BLOCK :].any()
    assert len(reader._files) == 1
    reader.close()
    reader.read(path, buffer, BLOCK)
    reader.close()


def test_a_file_system_without_direct_reads_is_read_through_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(bytes(range(256)) * 32)
    reader, buffer = BlobReader(), page_buffer(2 * BLOCK)
    original, refused = os.open, []

    def refuse(file: Any, flags: int, *rest: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            refused.append(file)
            raise OSError(22, "no direct reads here")
        return original(file, flags, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        reader.read(path, buffer, 2 * BLOCK)
    assert bytes(buffer.numpy()) == path.read_bytes() and reader.mode == "buffered"
    assert len(refused) <= 1
    reader.close()


@pytest.mark.parametrize(("resident", "damaged"), [(3, 1), (1, 2)])
def test_a_packed_layer_whose_content_changed_is_named_before_it_is_used(
    tiny: Tiny, resident: int, damaged: int
) -> None:
    with tiny.engine(resident_layers=resident) as engine:
        good = logits(engine)
    (blob,) = tiny.home.glob(f"packed/*/layer-{damaged:03d}.bin")
    content = bytearray(blob.read_bytes())
    content[len(content) // 3] ^= 1
    blob.write_bytes(content)
    with pytest.raises(StreamError, match=rf"layer-{damaged:03d}.bin: the content does not match.*eesd cache rm"):
        logits_of(tiny, dtype="bfloat16", resident_layers=resident)
    shutil.rmtree(blob.parent)
    with tiny.engine(resident_layers=resident) as engine:
        assert torch.equal(logits(engine), good)


def test_a_blob_that_is_missing_or_too_short_is_named(tmp_path: Path) -> None:
    reader, buffer = BlobReader(), page_buffer(2 * BLOCK)
    with pytest.raises(StreamError, match="blob: reading offloaded weights failed"):
        reader.read(tmp_path / "blob", buffer, BLOCK)
    (tmp_path / "blob").write_bytes(bytes(BLOCK))
    with pytest.raises(StreamError, match=f"blob: {BLOCK} of {2 * BLOCK} bytes"):
        reader.read(tmp_path / "blob", buffer, 2 * BLOCK)
    with pytest.raises(StreamError, match="throttle must be above 0"):
        BlobReader(0)


# 6. Memory while loading is bounded by the plan plus one layer.

MEASURE = """
import sys, threading, gc
from eesd_lite import Engine

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def peak_of_loading(folder, resident):
    gc.collect()
    before, peak, stop = anonymous(), [0], threading.Event()
    def sample():
        while not stop.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    sampler = threading.Thread(target=sample)
    sampler.start()
    engine = Engine.from_pretrained(folder, head="off", context=64, threads=1, resident_layers=resident)
    stop.set(); sampler.join()
    planned = engine.plan.total_bytes
    engine.close()
    return peak[0] - before, planned

small, large = sys.argv[1:]
peak_of_loading(small, 2)  # what every later load finds in place already
print(*peak_of_loading(small + "-again", 2), *peak_of_loading(large, 2), *peak_of_loading(large, 24))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_while_loading_is_bounded_however_large_the_checkpoint_is(tmp_path: Path) -> None:
    shape = {"hidden": 512, "inner": 1024, "heads": 8, "head_dim": 64, "group": 64}
    small = build(tmp_path / "small", TinySpec(layers=4, **shape)).folder  # type: ignore[arg-type]
    large = build(tmp_path / "large", TinySpec(layers=24, **shape)).folder  # type: ignore[arg-type]
    shutil.copytree(small, tmp_path / "small-again")
    environment = {**os.environ, "EESD_HOME": str(tmp_path / "home"), "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large)], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak_small, _, peak_large, _, peak_resident, planned = map(int, done.stdout.split())
    layer = 2_621_440 // 2  # packed; 24 of them are 31 MB, and 63 MB as one byte per code
    # Packing works on one layer at a time, in a wider form; twenty layers more must not show.
    assert peak_large - peak_small < 6 * layer, (peak_small, peak_large)
    assert peak_resident < planned + 8 * layer, (peak_resident, planned)
