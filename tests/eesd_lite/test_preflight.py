"""The look before the load: everything that is missing or wrong, by name, at once; and what is only worth a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eesd_lite.config import ModelConfig
from eesd_lite.errors import ModelError
from eesd_lite.preflight import check_tensors, has_own_lm_head
from quant.checkpoint import Checkpoint
from tests.tiny import Tiny, TinySpec, build


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(tmp_path_factory.mktemp("sound") / "model", TinySpec(layers=3))


@pytest.fixture
def folder(made: Tiny, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in made.folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def change(folder: Path, put: dict[str, Tensor] | None = None, *, drop: tuple[str, ...] = (), **config: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not any(piece in n for piece in drop)}
    save_file({**tensors, **(put or {})}, path)
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))


def shards(folder: Path, count: int = 4, *, index: bool = True) -> dict[str, str]:
    """Split the file so that the parts of one matrix lie in different shards; the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    held: dict[str, dict[str, Tensor]] = {}
    for number, name in enumerate(sorted(tensors)):
        held.setdefault(f"model-{number % count + 1:05d}-of-{count:05d}.safetensors", {})[name] = tensors[name]
    for file, part in held.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in held.items() for name in part}
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def look(folder: Path) -> tuple[str, ...]:
    return check_tensors(Checkpoint(folder, tolerant=True), ModelConfig.from_folder(folder))


def said(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        look(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sound_folder_has_nothing_to_say(folder: Path) -> None:
    assert look(folder) == ()
    shards(folder)
    assert look(folder) == ()


def test_every_fault_is_named_in_one_line(folder: Path) -> None:
    change(
        folder,
        {"model.norm.weight": torch.ones(65).half(), "model.layers.2.input_layernorm.weight": torch.ones(64).int()},
        drop=("layers.0.mlp.up_proj.qzeros", "layers.1."),
    )
    found = said(folder)
    assert found.startswith(f"{folder}: 4 problems: ")
    assert "layer 1 of 3 has no tensors" in found
    assert "'model.norm.weight' has shape (65,), config.json says (64,)" in found
    assert "tensor 'model.layers.0.mlp.up_proj.qzeros' is missing" in found
    assert "'model.layers.2.input_layernorm.weight' is stored as I32" in found


def test_many_faults_are_counted(folder: Path) -> None:
    change(folder, drop=(".scales",))
    found = said(folder)
    assert ": 21 problems: " in found and found.endswith("; and 15 more") and len(found) < 1500


def test_broken_files_and_wrong_tensors_come_together_and_nothing_twice(folder: Path) -> None:
    weight_map = shards(folder)
    names = sorted(set(weight_map.values()))
    (folder / names[0]).unlink()
    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-100])
    (folder / names[2]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    change_one = load_file(folder / names[3])
    wrong = next(name for name in change_one if name.endswith("_layernorm.weight") or name.endswith("scales"))
    change_one[wrong] = torch.zeros(7, 3).half()
    save_file(change_one, folder / names[3])
    found = said(folder)
    assert f"{names[0]}: named by model.safetensors.index.json" in found
    assert f"{names[1]}: incomplete download, 100 bytes are missing" in found
    assert f"{names[2]}: a Git LFS pointer" in found
    assert "(7, 3)" in found
    assert ": 4 problems: " in found and "is missing;" not in found  # lost with their files, so not named again


def test_a_tensor_that_the_index_forgot_is_said_to_be_there(folder: Path) -> None:
    weight_map = shards(folder)
    del weight_map["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "'model.norm.weight' is missing from the index, though model-" in said(folder)


def test_what_nothing_uses_is_a_note(folder: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.full(
            (8,), 7.0
        ),  # old files: never used, not worth a word
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(64).half(),
        "visual.patch.weight": torch.zeros(3),
        "model.layers.9.mlp.up_proj.weight": torch.zeros(3),
    }
    change(folder, extra)
    (note,) = look(folder)
    assert note == "tensors that nothing uses are ignored: 'model.layers.9.mlp.up_proj.weight' and 1 more"


def test_more_layers_than_config_json_counts_are_a_contradiction(folder: Path) -> None:
    change(folder, num_hidden_layers=2)
    assert "config.json says 2 layers, but layer 2 is stored too" in said(folder)


def test_absurd_settings_end_at_once(folder: Path) -> None:
    change(folder, num_hidden_layers=10_000)
    assert "layer 3 of 10000 has no tensors and 9996 more" in said(folder)
    change(folder, num_hidden_layers=3, vocab_size=2**31, intermediate_size=2**31)
    assert "config.json says (2147483648, 64)" in said(folder)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        ({"bias": torch.zeros(63).half()}, "up_proj.bias' has shape"),
        ({"qweight": torch.zeros(8, 96, dtype=torch.int64)}, "up_proj.qweight' is I64"),
        ({"scales": torch.zeros(2, 96, dtype=torch.float8_e4m3fn)}, "up_proj.scales' is F8_E4M3"),
        ({"qweight": torch.zeros(8, 100, dtype=torch.int32)}, "do not belong together"),
        ({"g_idx": torch.zeros(40, dtype=torch.int32)}, "do not belong together"),
    ],
)
def test_parts_of_a_matrix_that_do_not_fit_are_named(folder: Path, put: dict[str, Tensor], message: str) -> None:
    change(folder, {f"model.layers.1.mlp.up_proj.{part}": tensor for part, tensor in put.items()})
    assert message in said(folder)


def test_a_quantized_vector_and_weights_in_8_bit_floats_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    parts = {
        f"model.norm.{part}": tensors[f"model.layers.0.mlp.up_proj.{part}"] for part in ("qweight", "qzeros", "scales")
    }
    change(folder, parts, drop=("model.norm.weight",))
    assert "'model.norm' is quantized, where a vector of 64 belongs" in said(folder)
    eight = torch.zeros(96, 64, dtype=torch.float8_e4m3fn)
    change(
        folder, {"model.norm.weight": torch.ones(64).half(), "model.layers.0.mlp.up_proj.weight": eight},
        drop=("model.norm", "layers.0.mlp.up_proj"),
    )  # fmt: skip
    assert "up_proj.weight' is stored as F8_E4M3" in said(folder)


def test_a_claim_about_zero_points_that_the_data_contradict_is_named(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", TinySpec(layers=1, version=2)).folder
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["checkpoint_format"] = "gptq"
    (folder / "config.json").write_text(json.dumps(raw))
    (note,) = look(folder)
    assert "claim gptq (version 1) but all zero points are stored as 8: read as version 2" in note


def test_quantized_tensors_without_any_settings_are_refused(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert "has no quantization settings (quantize_config.json)" in said(folder)


def test_a_quantized_lm_head_counts_even_where_config_json_ties_it(tmp_path: Path) -> None:
    tiny = build(tmp_path / "model", TinySpec(layers=1, quantized_lm_head=True))
    config = ModelConfig.from_folder(tiny.folder)
    assert has_own_lm_head(Checkpoint(tiny.folder), config)
    change(tiny.folder, tie_word_embeddings=True)
    assert has_own_lm_head(Checkpoint(tiny.folder), ModelConfig.from_folder(tiny.folder))
