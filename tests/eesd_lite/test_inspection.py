"""`inspect_model`: headers told truly, contradictions named, and broken folders described instead of refused."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eesd_lite.config import ModelConfig
from eesd_lite.errors import ModelError
from eesd_lite.inspection import Inspection, Weights, inspect_model
from eesd_lite.preflight import check_tensors
from quant.checkpoint import Checkpoint
from quant.model_folder import ModelFolder
from quant.small_reads import zero_version_of
from tests.numpy_gptq import pack_bits
from tests.tiny import Tiny, TinySpec, build

OPEN = "asymmetric: the data cannot show it"
TinyOf = Callable[[TinySpec], Tiny]


def weights_of(found: Inspection) -> Weights:
    assert found.weights is not None
    return found.weights


def copy_of(tiny: Tiny, target: Path) -> Path:
    return Path(shutil.copytree(tiny.folder, target))


def change(path: Path, **values: Any) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    raw.update(values)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def test_a_sound_folder_is_described_from_its_headers(tiny_of: TinyOf) -> None:
    tiny = tiny_of(TinySpec(layers=3, group=32))
    found = inspect_model(tiny.folder)
    weights = weights_of(found)
    assert found.refusals == () and found.config["num_hidden_layers"] == 3 and found.rope == "theta 10000"
    assert weights.bits == {"4-bit GPTQ": 21} and weights.group_sizes == {32: 21} and weights.plain_modules == 0
    assert (weights.sym, weights.act_order, weights.lm_head) == (True, "no", "own")
    assert weights.zero_points == "version 1 claimed, version 1 detected"
    file = tiny.folder / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert weights.total_bytes == file.stat().st_size - header
    assert sum(weights.stored_layers) + sum(weights.outside_layers.values()) == weights.total_bytes
    assert len(weights.packed_layers) == 3 and weights.packed_layers[0] % 4096 == 0
    assert found.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert found.text.template.startswith("own") and found.text.bos == "<|begin|>"
    assert found.text.eos_ids == (json.loads((tiny.folder / "config.json").read_text())["eos_token_id"],)
    assert any("rows without a token are never chosen" in note for note in found.notes)


@pytest.mark.parametrize(
    ("spec", "act_order", "zero_points", "lm_head"),
    [
        (TinySpec(layers=2, desc_act=True), "yes", "version 1 claimed, version 1 detected", "own"),
        (TinySpec(layers=2, version=2), "no", "version 2 claimed, version 2 detected", "own"),
        (
            TinySpec(layers=2, sym=False, version=2),
            "no",
            "version 2 claimed, asymmetric: the data cannot show it",
            "own",
        ),
        (TinySpec(layers=2, tied=True), "no", "version 1 claimed, version 1 detected", "tied to the embedding"),
        (TinySpec(layers=2, quantized_lm_head=True), "no", "version 1 claimed, version 1 detected", "quantized"),
        (TinySpec(layers=2, group=-1, g_idx=False), "no", "version 1 claimed, version 1 detected", "own"),
    ],
)
def test_formats_are_told_apart(
    tiny_of: TinyOf, spec: TinySpec, act_order: str, zero_points: str, lm_head: str
) -> None:
    weights = weights_of(inspect_model(tiny_of(spec).folder))
    assert (weights.act_order, weights.zero_points, weights.lm_head) == (act_order, zero_points, lm_head)
    assert weights.group_sizes.keys() == {spec.group}


def test_claims_that_the_data_contradict_are_noted(tiny_of: TinyOf, tmp_path: Path) -> None:
    folder = copy_of(tiny_of(TinySpec(layers=2, desc_act=True)), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings |= {"desc_act": False, "checkpoint_format": "gptq_v2", "group_size": 64}
    change(folder / "config.json", quantization_config=settings)
    found = inspect_model(folder)
    notes = " | ".join(found.notes)
    assert "desc_act is false, but g_idx is permuted" in notes
    assert "zero points are stored as version 1, the settings claim 2" in notes
    assert "of group size 32, the settings say 64; the tensors win" in notes
    assert weights_of(found).zero_points == "version 2 claimed, version 1 detected"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("out_features", [32, 40])
def test_the_version_is_detected_at_every_width_and_behind_padding(
    tmp_path: Path, bits: int, version: int, out_features: int
) -> None:
    stored = np.full((out_features, 3), (1 << (bits - 1)) - (version == 1))
    qzeros = torch.from_numpy(pack_bits(stored, bits, junk=1).T.copy())
    tensors = {
        "m.qweight": torch.zeros(96 * bits // 32, out_features, dtype=torch.int32),
        "m.qzeros": qzeros,
        "m.scales": torch.ones(3, out_features, dtype=torch.float16),
        "m.g_idx": torch.arange(96, dtype=torch.int32) // 32,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"bits": bits, "group_size": 32, "sym": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    assert zero_version_of(ModelFolder(tmp_path), "m") == version
    assert Checkpoint(tmp_path).zero_version()[0] == version  # what loading decides
    tensors["m.qzeros"] = torch.zeros_like(qzeros)
    save_file(tensors, tmp_path / "model.safetensors")
    assert zero_version_of(ModelFolder(tmp_path), "m") is None


def lose_a_matrix(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "layers.1.mlp.up_proj" not in n}, folder / "model.safetensors")


def more_layers(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=4)


def cut_the_file(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)


def another_family(folder: Path) -> None:
    change(folder / "config.json", model_type="mamba")


def narrower(folder: Path) -> None:
    change(folder / "config.json", intermediate_size=64)


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def other_method(folder: Path) -> None:
    change(folder / "config.json", quantization_config={"quant_method": "awq", "bits": 4})


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_a_matrix, "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
        (more_layers, "layer 2 of 4 has no tensors and 1 more"),
        (cut_the_file, "incomplete download"),
        (another_family, "model_type 'mamba' is not supported"),
        (narrower, "is 96 x 64 (4-bit, qweight (8, 96)), config.json says 64 x 64"),
        (lfs_pointer, "Git LFS pointer"),
        (no_weights, "no weights"),
        (other_method, "awq"),
        (no_tokenizer, "has no tokenizer"),
        (broken_tokenizer, "tokenizer.json is not readable JSON"),
        (broken_config, "config.json"),
    ],
)
def test_a_folder_that_does_not_load_is_described_with_the_reason(
    tiny_of: TinyOf, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = copy_of(tiny_of(TinySpec(layers=2)), tmp_path / "model")
    damage(folder)
    found = inspect_model(folder)
    assert any(words in line for line in found.refusals), found.refusals
    assert all("\n" not in line for line in found.refusals)
    json.dumps(found.config)


def as_link(path: Path) -> None:
    path.rename(path.with_suffix(".gone"))
    path.symlink_to("nowhere")


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def in_capitals(path: Path) -> None:
    path.rename(path.with_name("MODEL.SAFETENSORS"))


def one_folder_down(path: Path) -> None:
    (path.parent / "sub").mkdir()
    path.rename(path.parent / "sub" / path.name)


def in_latin_1(path: Path) -> None:
    os.rename(path, os.fsencode(path.parent) + b"/a\xe9.safetensors")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (as_link, "model.safetensors is a link to nothing"),
        (as_pipe, "model.safetensors is not a regular file"),
        (in_capitals, "rename MODEL.SAFETENSORS to model.safetensors"),
        (one_folder_down, "copy them here with config.json"),
        (in_latin_1, "is not UTF-8; rename the file"),
    ],
)
def test_weights_that_are_almost_there_are_named(
    tiny_of: TinyOf, tmp_path: Path, place: Callable[[Path], None], words: str
) -> None:
    folder = copy_of(tiny_of(TinySpec(layers=2)), tmp_path / "model")
    place(folder / "model.safetensors")
    assert any(words in line for line in inspect_model(folder).refusals), inspect_model(folder).refusals


def test_a_cache_folder_that_cannot_be_looked_into_does_not_matter(
    tiny_of: TinyOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Path.is_dir

    def guarded(path: Path) -> bool:
        if "heads" in path.parts:  # as stat() answers below a folder without permission (tests may run as root)
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    folder = tiny_of(TinySpec(layers=2)).folder
    monkeypatch.setattr(Path, "is_dir", guarded)
    assert inspect_model(folder).refusals == () and inspect_model(folder).heads == ()


FIRST = "model.layers.0."


@pytest.mark.parametrize(
    ("put", "drop", "config"),
    [
        ({}, (), {}),  # sound
        ({}, ("layers.0.self_attn.q_proj.bias", "layers.1.self_attn.k_proj.bias"), {}),
        ({f"{FIRST}self_attn.v_proj.bias": torch.zeros(7)}, (), {}),
        ({f"{FIRST}self_attn.q_norm.weight": torch.ones(16)}, (), {}),
        ({f"{FIRST}input_layernorm.weight": torch.ones(64, dtype=torch.int32)}, (), {}),
        ({"model.norm.weight": torch.ones(63), "model.embed_tokens.weight": torch.ones(5, 64)}, (), {}),
        ({}, (), {"num_hidden_layers": 1}),
        ({}, (), {"vocab_size": 300}),
        ({}, ("layers.1.mlp.up_proj.scales",), {}),
        ({}, ("layers.1.",), {}),
    ],
)
def test_what_loading_refuses_is_listed_line_by_line_and_once(
    tiny_of: TinyOf, tmp_path: Path, put: dict[str, torch.Tensor], drop: tuple[str, ...], config: dict[str, Any]
) -> None:
    folder = copy_of(tiny_of(TinySpec(model_type="qwen2", layers=2)), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not any(piece in name for piece in drop)}
    save_file(kept | put, folder / "model.safetensors")
    change(folder / "config.json", **config)
    found = inspect_model(folder).refusals
    try:
        check_tensors(Checkpoint(folder, tolerant=True), ModelConfig.from_folder(folder))
    except ModelError as error:
        message = str(error)
        assert found and message.startswith(f"{folder}: " + (f"{len(found)} problems: " if len(found) > 1 else ""))
        assert all(line in message for line in found[:6]) and len(set(found)) == len(found)
    else:
        assert not (put or drop or config) and found == ()


def test_text_settings_are_joined_from_all_files(tiny_of: TinyOf, tmp_path: Path) -> None:
    folder = copy_of(tiny_of(TinySpec(layers=2)), tmp_path / "model")
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    change(folder / "generation_config.json", eos_token_id=[5, 7])
    assert inspect_model(folder).text.eos_ids == (5, 7, end)
    change(folder / "tokenizer_config.json", chat_template=..., eos_token=...)
    change(folder / "config.json", eos_token_id=...)
    (folder / "generation_config.json").unlink()
    found = inspect_model(folder)
    assert found.text.template == "none (fallback plain)" and found.text.eos_ids == ()
    assert any("no chat template" in note for note in found.notes)
    assert any("no file names a token that ends an answer" in note for note in found.notes)
    assert found.refusals == ()


def test_unigram_and_foreign_tokenizers_are_counted_or_left_open(tiny_of: TinyOf, tmp_path: Path) -> None:
    folder = copy_of(tiny_of(TinySpec(layers=2)), tmp_path / "model")
    pieces = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": [{"id": 9, "content": "<|x|>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(pieces))
    assert inspect_model(folder).text.tokens == 10
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    text = inspect_model(folder).text
    assert (text.tokenizer, text.tokens) == ("tokenizer.model", None)


@pytest.mark.real
def test_the_demo_model_is_what_its_recipe_says() -> None:
    found = inspect_model("smollm2-135m")
    weights = weights_of(found)
    assert found.refusals == () and found.recipe == "smollm2-135m" and found.heads == (6, 10, 15, 20)
    assert weights.bits == {"4-bit GPTQ": 210} and weights.group_sizes == {64: 210} and weights.sym is False
    assert weights.packed_layers == (1_994_752,) * 30 and weights.lm_head == "tied to the embedding"
    assert found.text.tokens == found.config["vocab_size"] == 49152


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_of_small_files_or_headers_makes_it_fail(tiny_of: TinyOf, data: st.DataObject) -> None:
    """Bytes of config, tokenizer files or the weights' header replaced at random: a description, never an exception."""
    source = tiny_of(TinySpec(layers=2)).folder
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    name = data.draw(st.sampled_from(names))
    content = bytearray((source / name).read_bytes())
    limit = 9000 if name == "model.safetensors" else len(content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, limit - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"-1", b"9" * 20, b"null", b"[]", b"{}", b"true", b"1e999", b'""', b"\xff", b"0", b""])
        )
    with tempfile.TemporaryDirectory() as place_for_it:
        folder = Path(place_for_it) / "model"
        folder.mkdir()
        for other in names:
            if other != name:
                os.link(source / other, folder / other)
        (folder / name).write_bytes(content)
        json.dumps(asdict(inspect_model(folder)))


def test_two_weight_files_are_refused_until_one_is_named(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", TinySpec(layers=2)).folder
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    assert any("--weights FILE" in line for line in inspect_model(folder).refusals)
    assert inspect_model(folder, "other.safetensors").refusals == ()
