"""Synthetic targets: true shape and size, real bytes, finite activations, and packed layers that load as packed."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eesd_lite import synth, synth_packed
from eesd_lite.config import ModelConfig
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError, PrepareError
from eesd_lite.packed_beside import PACKED_FOLDER, packed_beside
from eesd_lite.packed_store import open_store
from eesd_lite.params import SamplingParams
from eesd_lite.planning import PlanWishes, plan_model, shape_config
from eesd_lite.sizing import shape_layers
from eesd_lite.synth import SynthSettings, write_checkpoint
from eesd_lite.synth_packed import kernels_of, write_packed
from models.shapes import Shape, find_shape
from quant.checkpoint import Checkpoint
from quant.model_folder import ModelFolder

SMALL = Shape(
    name="small", model_type="qwen2", hidden_size=128, intermediate_size=256, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=256,
    attention_bias=True,
)  # fmt: skip
PROMPT, GREEDY = [72, 101, 108, 108, 111], SamplingParams(max_new_tokens=12, ignore_eos=True)


def settings_of(shape: Shape = SMALL, **options: object) -> SynthSettings:
    return SynthSettings.of(shape, **options)  # type: ignore[arg-type]


def ids_of(folder: Path, **options: object) -> list[int | None]:
    with Engine.from_pretrained(folder, head="off", threads=1, context=64, **options) as engine:  # type: ignore[arg-type]
        state = engine.target.embed(PROMPT)
        assert bool(torch.isfinite(state).all())
        return [event.token_id for event in engine.generate(PROMPT, GREEDY)]


def test_a_synthetic_checkpoint_has_every_tensor_of_its_shape_in_real_bytes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", settings_of())
    folder = ModelFolder(tmp_path / "model")
    assert folder.module("model.layers.2.mlp.down_proj").group_size == 128
    assert folder.info("model.layers.0.self_attn.k_proj.bias").shape == (64,)
    assert folder.info("lm_head.weight").shape == (512, 128)
    (file,) = folder.index.files
    assert file.stat().st_blocks * 512 >= file.stat().st_size
    checkpoint = Checkpoint(tmp_path / "model")
    matrix = checkpoint.matrix("model.layers.1.mlp.up_proj")
    counts = np.bincount(matrix.codes.numpy().ravel(), minlength=16)
    assert counts.min() > 0.8 * counts.mean() and bool((matrix.zeros == 8).all())
    weights = matrix.dequantize()
    assert float(weights.std()) == pytest.approx(128**-0.5, rel=0.05)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["eesd_synthetic"] == {"shape": "small", "seed": 0, "content": "random"}


def test_a_synthetic_checkpoint_runs_and_packs_to_the_bytes_of_its_shape(tmp_path: Path, cache_home: Path) -> None:
    write_checkpoint(tmp_path / "model", settings_of())
    expected = shape_layers(shape_config(SMALL), group_size=128, kernel="int4-cpu", itemsize=2)
    with Engine.from_pretrained(tmp_path / "model", head="off", threads=1, context=64) as engine:
        assert engine.target.bank.layer_bytes == expected
    assert ids_of(tmp_path / "model") == ids_of(tmp_path / "model", resident_layers=1)


def test_activations_stay_finite_through_many_layers(tmp_path: Path, cache_home: Path) -> None:
    deep = replace(SMALL, model_type="llama", num_hidden_layers=80, attention_bias=False)
    write_packed(tmp_path / "model", settings_of(deep), kernels_of("cpu"))
    with Engine.from_pretrained(tmp_path / "model", head="random", exit_layer=2, threads=1, context=64) as engine:
        seen: list[torch.Tensor] = []
        logits = engine.target.logits
        engine.target.logits = lambda hidden: seen.append(hidden) or logits(hidden)  # type: ignore[method-assign,func-returns-value]
        list(engine.generate(PROMPT, GREEDY))
    states = torch.cat(seen)
    assert bool(torch.isfinite(states).all()) and 0.1 < float(states.std()) < 100


@pytest.mark.parametrize("group_size", [64, -1])
def test_packed_layers_are_laid_out_as_packing_would_and_load_without_it(
    tmp_path: Path, cache_home: Path, group_size: int
) -> None:
    settings, kernels = settings_of(group_size=group_size), kernels_of("cpu")
    write_packed(tmp_path / "packed", settings, kernels)
    write_checkpoint(tmp_path / "checkpoint", settings)
    config = ModelConfig.from_folder(tmp_path / "packed")
    packed = open_store(Checkpoint(tmp_path / "packed"), config, kernels)
    assert packed.folder == tmp_path / "packed" / PACKED_FOLDER
    assert not (cache_home / "packed").exists()
    assert packed.layouts == open_store(Checkpoint(tmp_path / "checkpoint"), config, kernels).layouts
    assert len({packed.path(n).read_bytes() for n in range(3)}) == 3
    assert ids_of(tmp_path / "packed") == ids_of(tmp_path / "packed", resident_layers=1)
    planned = plan_model(tmp_path / "packed", PlanWishes())
    assert planned.plan.layer_bytes == tuple(layout.nbytes for layout in packed.layouts)


def test_the_layout_for_cuda_is_the_one_that_torch_converts_to() -> None:
    """By torch's own shape rules, which need no such device."""
    layout = synth_packed.packed_layout(settings_of(find_shape("llama-2-7b")), kernels_of("cuda"))
    for slot in layout.slots:
        if slot.name == "qkv.0.packed":
            codes = torch.empty(3 * 4096, 4096 // 2, dtype=torch.uint8, device="meta")
            converted = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
            assert (slot.shape, slot.dtype) == (tuple(converted.shape), "int32") and converted.dtype == torch.int32


def test_packed_layers_for_another_kernel_are_refused_by_name(tmp_path: Path, cache_home: Path) -> None:
    write_packed(tmp_path / "model", settings_of(), kernels_of("cuda"))
    beside = packed_beside(tmp_path / "model")
    assert beside is not None and beside.made_for.startswith("int4-cuda-8-torch")
    with pytest.raises(PrepareError, match=r"packed for int4-cuda.*this run needs int4-cpu"):
        ids_of(tmp_path / "model")


@pytest.mark.parametrize("damage", ["cut", "content"])
def test_damaged_packed_layers_are_named(tmp_path: Path, cache_home: Path, damage: str) -> None:
    write_packed(tmp_path / "model", settings_of(), kernels_of("cpu"))
    blob = tmp_path / "model" / PACKED_FOLDER / "layer-001.bin"
    data = bytearray(blob.read_bytes())
    if damage == "cut":
        del data[-4096:]
    else:
        data[100] ^= 1
    blob.write_bytes(data)
    with pytest.raises(EesdError, match=r"layer-001\.bin: .*"):
        ids_of(tmp_path / "model")


def test_headers_alone_take_no_space_and_say_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "full", settings_of())
    write_checkpoint(tmp_path / "headers", settings_of(content=False))
    full, headers = ModelFolder(tmp_path / "full"), ModelFolder(tmp_path / "headers")
    assert [(t.name, t.shape, t.begin, t.end) for t in full.tensors.values()] == [
        (t.name, t.shape, t.begin, t.end) for t in headers.tensors.values()
    ]
    (file,) = headers.index.files
    assert file.stat().st_size == full.index.files[0].stat().st_size
    assert file.stat().st_blocks * 512 < file.stat().st_size / 4


def test_a_seed_fixes_every_byte(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, settings_of(layers=1, seed=seed))
    one, two, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert one == two != other


def test_memory_is_bounded_by_pieces_and_shards_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth, "PIECE", 1 << 16)
    monkeypatch.setattr("quant.tensor_stream.shards.__defaults__", (1 << 20,))
    large = replace(
        SMALL, hidden_size=512, intermediate_size=2048, vocab_size=4096, model_type="llama", attention_bias=False
    )
    steps: list[tuple[int, int]] = []
    tracemalloc.start()
    write_checkpoint(tmp_path / "model", settings_of(large), lambda stage, done, total: steps.append((done, total)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size > 12 << 20 and peak < 4 << 20
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 5
    assert len(ModelFolder(tmp_path / "model").tensors) == 3 + 3 * (7 * 4 + 2)
    assert steps == sorted(steps) and steps[-1][0] in (steps[-1][1] - 1, steps[-1][1])


def test_a_full_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(path: Path, needed: int, what: str) -> None:
        asked.append(needed)
        raise PrepareError("no room")

    for module, write in (
        (synth, write_checkpoint),
        (synth_packed, lambda t, s: write_packed(t, s, kernels_of("cpu"))),
    ):
        monkeypatch.setattr(module, "require_free", refuse)
        with pytest.raises(PrepareError, match="no room"):
            write(tmp_path / "model", SynthSettings.of(find_shape("llama-2-70b")))
    assert list(tmp_path.iterdir()) == []
    # Half a byte per weight and what belongs to it: 36.4 GB of layers, 1.05 GB of tables, as the planner has it.
    assert asked[1] == 36_367_237_120 + 2 * 32000 * 8192 * 2 + 8192 * 2
    assert 0.97 < asked[0] / asked[1] < 1.0


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(EesdError, match="group size 96 does not divide 128 and 256 of small"):
        settings_of(group_size=96)
    with pytest.raises(EesdError, match="small has 3 layers; --layers cuts that"):
        settings_of(layers=4)
