"""Reading GPTQ folders of every kind that is around, and naming what is wrong with those that cannot be read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.checkpoint import Checkpoint
from quant.config import read_quant_config
from quant.errors import CheckpointError
from tests.numpy_gptq import Drawn, draw, pack_bits

MODULE = "model.layers.0.mlp.up_proj"
SETTINGS = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "quant_method": "gptq"}


def write(folder: Path, drawn: Drawn, settings: dict[str, Any] | None = None, *, without: tuple[str, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {f"{MODULE}.{n}": torch.from_numpy(a) for n, a in drawn.tensors.items() if n not in without}
    save_file(tensors, folder / "model.safetensors")
    settings = SETTINGS if settings is None else settings
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


def add(folder: Path, **tensors: Tensor) -> None:
    """Add or replace tensors of the module."""
    present = load_file(folder / "model.safetensors")
    save_file({**present, **{f"{MODULE}.{n}": t for n, t in tensors.items()}}, folder / "model.safetensors")


def drawn_with(seed: int = 0, out: int = 24, inner: int = 64, **options: Any) -> Drawn:
    return draw(np.random.default_rng(seed), out, inner, **options)


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize(("sym", "version"), [(True, 1), (False, 1), (False, 2)])
def test_the_matrix_is_the_one_that_was_packed(
    tmp_path: Path, sym: bool, version: int, group: int, desc_act: bool
) -> None:
    drawn = drawn_with(group=group, sym=sym, version=version, desc_act=desc_act)
    layout = "gptq" if version == 1 else "gptq_v2"
    settings = SETTINGS | {"group_size": group, "desc_act": desc_act, "sym": sym, "checkpoint_format": layout}
    checkpoint = Checkpoint(write(tmp_path / "m", drawn, settings))
    assert checkpoint.is_quantized(MODULE)
    assert np.array_equal(checkpoint.dequantized(MODULE).numpy(), drawn.dequantized)
    assert checkpoint.matrix(MODULE).bias is None


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize(("sym", "version"), [(True, 1), (True, 2), (False, 1), (False, 2)])
@pytest.mark.parametrize(("group", "desc_act"), [(32, False), (24, True), (-1, False)])
def test_every_width_is_read_with_its_zero_points(
    tmp_path: Path, bits: int, sym: bool, version: int, group: int, desc_act: bool
) -> None:
    drawn = drawn_with(bits=bits, out=20, inner=96, group=group, sym=sym, version=version, desc_act=desc_act)
    layout = "gptq" if version == 1 else "gptq_v2"
    claims = {"bits": bits, "group_size": group, "desc_act": desc_act, "sym": sym, "checkpoint_format": layout}
    found = Checkpoint(write(tmp_path / "m", drawn, SETTINGS | claims)).dequantized(MODULE).double().numpy()
    scales = drawn.tensors["scales"].astype(np.float64)[drawn.tensors["g_idx"]].T
    reference = (drawn.codes - drawn.zeros[drawn.tensors["g_idx"]].T) * scales  # float64
    assert np.abs(found - reference).max() <= 1e-6 * np.abs(reference).max()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_width_is_seen_in_the_tensors_whatever_the_settings_say(tmp_path: Path, bits: int) -> None:
    drawn = drawn_with(bits=bits, out=32)
    folder = write(tmp_path / "m", drawn, SETTINGS | {"bits": 4 if bits != 4 else 8})
    assert Checkpoint(folder).module(MODULE).bits == bits
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)


def test_one_group_for_every_stored_zero_point_is_read_by_the_stated_rule(tmp_path: Path) -> None:
    """Asymmetric version 1: stored z means z + 1, 15 means 16; see docs/checkpoints.md."""
    drawn = drawn_with(out=8, inner=512, group=32, sym=False)
    stored = np.tile(np.arange(16)[:, None], (1, 8))
    tensors = drawn.tensors | {"qzeros": pack_bits(stored.T, 4).T.copy()}
    folder = write(
        tmp_path / "m", Drawn(tensors, drawn.codes, stored + 1, drawn.dequantized), SETTINGS | {"sym": False}
    )
    checkpoint = Checkpoint(folder)
    assert checkpoint.matrix(MODULE).zeros.tolist() == (stored + 1).tolist()
    scales = drawn.tensors["scales"].astype(np.float64)
    expected = (drawn.codes - np.repeat(stored + 1, 32, axis=0).T) * np.repeat(scales, 32, axis=0).T
    assert np.allclose(checkpoint.dequantized(MODULE).double().numpy(), expected, rtol=1e-6, atol=0)
    assert any("15 meaning 16" in note for note in checkpoint.notes)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("quantizer", ["gptqmodel:7.7.0", ["gptqmodel:7.7.0", "another:1.0"]], ids=str)
def test_gptqmodel_took_one_off_whole_words_and_a_zero_point_of_0_is_read_back(
    tmp_path: Path, bits: int, quantizer: Any
) -> None:
    drawn = drawn_with(out=32, bits=bits, sym=False, version=2)
    zeros = np.random.default_rng(bits).integers(0, 3, drawn.zeros.shape)
    one_each = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
    words = (pack_bits(zeros.T, bits).T.view(np.uint32) - one_each).view(np.int32)
    g_idx, scales = drawn.tensors["g_idx"], drawn.tensors["scales"].astype(np.float32)
    exact = (drawn.codes - zeros[g_idx].T).astype(np.float32) * scales[g_idx].T
    drawn = replace(drawn, tensors=drawn.tensors | {"qzeros": np.ascontiguousarray(words)})
    folder = write(tmp_path / "m", drawn, SETTINGS | {"bits": bits, "sym": False, "meta": {"quantizer": quantizer}})
    checkpoint = Checkpoint(folder)
    assert np.array_equal(checkpoint.matrix(MODULE).zeros.numpy(), zeros)
    assert np.array_equal(checkpoint.dequantized(MODULE).numpy(), exact)
    assert not any("15 meaning 16" in note for note in checkpoint.notes)


@pytest.mark.parametrize(("stored", "claimed"), [(1, 2), (2, 1)])
def test_symmetric_zero_points_of_the_other_version_are_read_as_what_they_are(
    tmp_path: Path, stored: int, claimed: int
) -> None:
    drawn = drawn_with(version=stored)
    layout = "gptq" if claimed == 1 else "gptq_v2"
    folder = write(tmp_path / "m", drawn, SETTINGS | {"checkpoint_format": layout})
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)
    assert "read as version" in str(Checkpoint(folder).zero_version()[1])


def test_a_g_idx_of_zeros_in_a_file_with_groups_means_the_natural_order(tmp_path: Path) -> None:
    drawn = drawn_with(group=32)
    folder = write(tmp_path / "m", drawn)
    add(folder, g_idx=torch.zeros(64, dtype=torch.int32))
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)
    (folder / "quantize_config.json").write_text(json.dumps({"desc_act": True}))
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="desc_act is true but .*g_idx' is empty"):
        Checkpoint(folder).matrix(MODULE)


def test_groups_that_neither_g_idx_nor_the_settings_explain_are_refused(tmp_path: Path) -> None:
    drawn = drawn_with(inner=72, group=32)  # 3 groups: 24 each, or 32, 32 and 8
    folder = write(tmp_path / "m", drawn, SETTINGS | {"group_size": 128}, without=("g_idx",))
    with pytest.raises(CheckpointError, match="3 groups for 72 input features and neither g_idx nor a group_size"):
        Checkpoint(folder).matrix(MODULE)
    folder = write(tmp_path / "m", drawn, without=("g_idx",))
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)


@pytest.mark.parametrize("group", [32, -1])
def test_an_absent_g_idx_means_the_natural_order(tmp_path: Path, group: int) -> None:
    drawn = drawn_with(group=group)
    folder = write(tmp_path / "m", drawn, SETTINGS | {"group_size": group}, without=("g_idx",))
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)


def test_the_tensors_win_over_a_wrong_group_size(tmp_path: Path) -> None:
    drawn = drawn_with(group=32)
    folder = write(tmp_path / "m", drawn, SETTINGS | {"group_size": 64}, without=("g_idx",))
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)


def test_act_order_without_g_idx_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with(desc_act=True), SETTINGS | {"desc_act": True}, without=("g_idx",))
    with pytest.raises(CheckpointError, match="desc_act is true.*g_idx.*missing"):
        Checkpoint(folder).matrix(MODULE)


def test_a_partial_last_group_and_spare_zero_points_are_read_as_they_are(tmp_path: Path) -> None:
    drawn = drawn_with(out=20, inner=72, group=32, sym=False)  # three groups, the last of 8; 4 spare fields of junk
    assert drawn.tensors["scales"].shape == (3, 20) and drawn.tensors["qzeros"].shape == (3, 3)
    folder = write(tmp_path / "m", drawn)
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)


def test_a_zero_point_of_15_in_version_1_means_16(tmp_path: Path) -> None:
    drawn = drawn_with(out=16, inner=32, sym=False)
    drawn.tensors["qzeros"] = pack_bits(np.full((16, 1), 15), 4).T.copy()
    checkpoint = Checkpoint(write(tmp_path / "m", drawn, SETTINGS | {"sym": False}))
    assert checkpoint.matrix(MODULE).zeros.unique().tolist() == [16]
    assert checkpoint.quant_config is not None and "15 meaning 16" in checkpoint.quant_config.notes[0]


def test_a_zero_bias_is_dropped_and_a_real_one_kept(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with())
    add(folder, bias=torch.zeros(24, dtype=torch.float16))
    assert Checkpoint(folder).matrix(MODULE).bias is None
    add(folder, bias=torch.arange(24, dtype=torch.float16))
    bias = Checkpoint(folder).matrix(MODULE).bias
    assert bias is not None and bias.dtype == torch.float32 and torch.equal(bias, torch.arange(24.0))


def test_a_module_in_16_bit_is_read_as_it_is(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with())
    weight = torch.randn(4, 6).to(torch.float16)
    save_file({"model.layers.1.mlp.up_proj.weight": weight}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    assert not checkpoint.is_quantized("model.layers.1.mlp.up_proj")
    assert torch.equal(checkpoint.dequantized("model.layers.1.mlp.up_proj"), weight.float())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"qweight": torch.zeros(8, 24)}, "not GPTQ"),
        ({"scales": torch.zeros(2, 23)}, "do not belong together"),
        ({"qzeros": torch.zeros(2, 4, dtype=torch.int32)}, "do not belong together"),
        ({"g_idx": torch.zeros(40, dtype=torch.int32)}, r"g_idx \(40,\), which do not belong together"),
        ({"g_idx": torch.full((64,), 2, dtype=torch.int32)}, "points at group 2 of 2"),
        ({"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "points at group"),
    ],
    ids=["no integers", "scales too narrow", "zero points too wide", "g_idx too short", "no such group", "negative"],
)
def test_tensors_that_contradict_each_other_are_named(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    folder = write(tmp_path / "m", drawn_with())
    add(folder, **tensors)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder).matrix(MODULE)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with(), without=("scales",))
    with pytest.raises(CheckpointError, match=r"up_proj\.scales' is missing"):
        Checkpoint(folder).matrix(MODULE)


# Files: what a download may look like.


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def short(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"abc")


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")


def broken_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{")


def second_file(folder: Path) -> None:
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "model.safetensors: incomplete download, 100 bytes are missing"),
        (pointer, "model.safetensors: a Git LFS pointer"),
        (short, "not a safetensors file or an incomplete download"),
        (huge_header, "not a safetensors file or an incomplete download"),
        (broken_header, "header is damaged"),
        (second_file, "2 weight files and no model.safetensors.index.json"),
        (only_a_pickle, "pytorch_model.bin: not a file of torch 1.6 or later"),
        (lambda folder: index(folder, {}), "no weight_map"),
        (lambda folder: index(folder, {MODULE: "model-00002-of-00003.safetensors"}), "named by .* but missing"),
        (
            lambda folder: index(folder, {MODULE: "../model.safetensors"}),
            "not the name of a weight file inside the folder",
        ),
        (lambda folder: index(folder, {MODULE: "/etc/passwd"}), "not the name of a weight file inside the folder"),
        (lambda folder: index(folder, {MODULE: 7}), "not the name of a weight file inside the folder"),
        (lambda folder: index(folder, {"no.such.tensor": "model.safetensors"}), "lacks tensor 'no.such.tensor'"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: not readable as JSON"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line_that_names_the_file(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = write(tmp_path / "m", drawn_with())
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_no_folder_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
@pytest.mark.parametrize("value", [None, "F99", [-1, 4], [1.5], 3])
def test_a_damaged_header_entry_is_refused(tmp_path: Path, key: str, value: object) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], key: value}
    header = json.dumps({"x": entry}).encode()
    folder = write(tmp_path / "m", drawn_with())
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="tensor 'x'"):
        Checkpoint(folder)


def test_a_group_split_over_shards_is_found_through_the_index_and_decoys_are_not_read(tmp_path: Path) -> None:
    drawn = drawn_with()
    folder = write(tmp_path / "m", drawn)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {
        f"model-0000{n}-of-00007.safetensors": name for n, name in zip((1, 3, 5, 7), sorted(tensors), strict=True)
    }
    for file, name in shards.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "decoy").mkdir()
    (folder / "decoy" / "model.safetensors").write_text("decoy")
    (folder / "unnamed.safetensors").write_text("not named by the index")
    index(folder, {name: file for file, name in shards.items()})
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)


def second_of(folder: Path, value: float) -> None:
    """The module's file once more under another name, with other scales."""
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{MODULE}.scales"] = torch.full_like(tensors[f"{MODULE}.scales"], value)
    save_file(tensors, folder / "other.safetensors")


def test_of_several_weight_files_the_one_asked_for_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with())
    second_of(folder, 2.0)
    with pytest.raises(CheckpointError, match=r"2 weight files .*\(model.safetensors, other.saf.*--weights FILE"):
        Checkpoint(folder)
    assert bool((Checkpoint(folder, "other.safetensors").matrix(MODULE).scales == 2.0).all())
    assert not bool((Checkpoint(folder, "model.safetensors").matrix(MODULE).scales == 2.0).any())
    for name in ("none.safetensors", "../m/other.safetensors", "config.json", "", "/etc/passwd"):
        with pytest.raises(CheckpointError, match="no such weight file|not the name of a file|not a weight file"):
            Checkpoint(folder, name)


def test_the_file_that_the_settings_name_is_read_of_several(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with(), SETTINGS | {"model_file_base_name": "other"})
    second_of(folder, 2.0)
    assert bool((Checkpoint(folder).matrix(MODULE).scales == 2.0).all())


def test_a_complete_set_of_shards_needs_no_index_and_an_incomplete_one_is_named(tmp_path: Path) -> None:
    drawn = drawn_with()
    folder = write(tmp_path / "m", drawn)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, name in enumerate(sorted(tensors), start=1):
        save_file({name: tensors[name]}, folder / f"model-{number:05d}-of-00004.safetensors")
    checkpoint = Checkpoint(folder)
    assert np.array_equal(checkpoint.dequantized(MODULE).numpy(), drawn.dequantized)
    assert checkpoint.notes == ("no model.safetensors.index.json: read all 4 shards",)
    (folder / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00004.safetensors is missing, and so is the index"):
        Checkpoint(folder)


def test_an_index_of_another_name_is_followed(tmp_path: Path) -> None:
    drawn = drawn_with()
    folder = write(tmp_path / "m", drawn)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    name = "gptq_model-4bit-32g.safetensors"
    weight_map = dict.fromkeys(load_file(folder / name), name)
    (folder / "gptq_model-4bit-32g.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "other.safetensors").write_bytes(b"not read")
    assert np.array_equal(Checkpoint(folder).dequantized(MODULE).numpy(), drawn.dequantized)


def test_everything_wrong_with_the_files_is_in_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with())
    tensors = load_file(folder / "model.safetensors")
    names = dict(zip(sorted(tensors), [f"{letter}.safetensors" for letter in "abcd"], strict=True))
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file)
    index(folder, {**names, "elsewhere": "a.safetensors"})
    (folder / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes()[:-4])
    pointer(folder)
    (folder / "c.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "d.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    said = str(caught.value)
    assert said.startswith(f"{folder}: 4 problems: ") and "\n" not in said
    assert "b.safetensors: incomplete download, 4 bytes are missing" in said
    assert "c.safetensors: a Git LFS pointer" in said
    assert "d.safetensors: named by model.safetensors.index.json for 1 tensors but missing" in said
    assert "--weights model.safetensors" in said or "--weights a.safetensors" in said
    assert "a.safetensors: lacks tensor 'elsewhere'" in said


def header_of(folder: Path, header: object, data: int = 16) -> None:
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))


def entry(begin: int, end: int, **other: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end], **other}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": entry(0, 8), "y": entry(4, 16)}, "tensor 'y' overlaps the tensor before it"),
        ({"x": entry(0, 4), "y": entry(8, 16)}, "tensor 'y' lies behind a gap"),
        ({"x": entry(0, 8)}, "8 bytes behind the last tensor"),
        ({"x": entry(0, 16), "y": entry(16, 40)}, r"24 bytes are missing \(1 tensors are cut off, such as 'y'\)"),
        ({"x": entry(0, 16, shape=[2**40, 2**40])}, "takes 16 bytes where its shape"),
        ({"x": entry(0, 16, shape=[10**300])}, "damaged header entry"),
        ({"x": entry(0, 16, shape=[1] * 5000)}, "damaged header entry"),
        ({"x": entry(0, 16, data_offsets=[0, 10**30])}, "damaged header entry"),
        ('{"x": ' + json.dumps(entry(0, 16)) + ', "x": ' + json.dumps(entry(0, 16)) + "}", "'x' stands twice"),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "header is damaged"),
        ('{"x": {"shape": [' + "9" * 6000 + "]}}", "header is damaged"),
        ({"x": entry(0, 16), "__metadata__": {"a": 1}}, "damaged metadata"),
        ({"\x1b[31mred\n": 7}, r"tensor '\?\[31mred\?' has a damaged header entry"),
        ([1], "header is not an object"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(tmp_path: Path, header: object, message: str) -> None:
    folder = write(tmp_path / "m", drawn_with())
    header_of(folder, header)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


def test_files_that_are_no_files_are_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with())
    os.mkfifo(folder / "pipe")  # reading it would wait for ever
    for name in ("config.json", "model.safetensors"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero" if name == "config.json" else folder / "pipe")
        with pytest.raises(CheckpointError, match="not a regular file|no weights"):
            Checkpoint(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    (folder / "blobs").mkdir()
    (folder / "model.safetensors").rename(folder / "blobs" / "0123")
    (folder / "model.safetensors").symlink_to(folder / "blobs" / "0123")  # as the Hub's cache does
    assert Checkpoint(folder).is_quantized(MODULE)


def test_settings_of_gigabytes_are_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", drawn_with())
    with (folder / "quantize_config.json").open("wb") as file:
        file.truncate(2**32)  # sparse
    with pytest.raises(CheckpointError, match="quantize_config.json: 4294967296 bytes where at most"):
        Checkpoint(folder)


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_reading_a_matrix_holds_that_matrix_only(tmp_path: Path, name: str) -> None:
    drawn = drawn_with()
    folder = write(tmp_path / "m", drawn)
    tensors = load_file(folder / "model.safetensors") | {f"other.{n}": torch.ones(2**22) for n in range(8)}  # 128 MiB
    (folder / "model.safetensors").unlink()
    (save_file if name.endswith("safetensors") else torch.save)(tensors, folder / name)  # type: ignore[operator]
    del tensors
    Checkpoint(folder).matrix(MODULE)  # what every first read brings along
    before = anonymous_bytes()
    checkpoint = Checkpoint(folder)
    matrix = checkpoint.matrix(MODULE)
    one = checkpoint.tensor("other.3")
    assert anonymous_bytes() - before < one.nbytes + 16 * 2**20
    assert np.array_equal(matrix.dequantize().numpy(), drawn.dequantized)


# Settings.


def settings_folder(tmp_path: Path, inner: object = None, outer: object = None) -> Path:
    config = {} if inner is None else {"quantization_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if outer is not None:
        (tmp_path / "quantize_config.json").write_text(json.dumps(outer))
    return tmp_path


def test_settings_come_from_either_file_and_missing_keys_have_defaults(tmp_path: Path) -> None:
    assert read_quant_config(settings_folder(tmp_path)) is None
    found = read_quant_config(settings_folder(tmp_path, {"bits": 4, "group_size": 64}))
    assert found is not None and (found.group_size, found.desc_act, found.sym, found.version) == (64, False, True, 1)
    found = read_quant_config(settings_folder(tmp_path, None, {"bits": 4, "desc_act": True}))
    assert found is not None and (found.group_size, found.desc_act) == (128, True)


def test_where_the_files_disagree_config_json_wins_and_it_is_said(tmp_path: Path) -> None:
    same = {"bits": 4, "group_size": 32}
    found = read_quant_config(settings_folder(tmp_path, same, same))
    assert found is not None and found.notes == ()
    found = read_quant_config(settings_folder(tmp_path, same, {"bits": 4, "group_size": 64, "desc_act": True}))
    assert found is not None and (found.group_size, found.desc_act) == (32, True)
    assert found.notes == ("group_size is 32 in config.json and 64 in quantize_config.json; config.json wins",)


def test_the_settings_of_an_upload_of_2023_are_understood(tmp_path: Path) -> None:
    raw = {
        "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "static_groups": False, "sym": True,
        "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "is_marlin_format": False,
    }  # fmt: skip
    found = read_quant_config(settings_folder(tmp_path, None, raw))
    assert found is not None and (found.bits, found.version, found.notes) == (4, 1, ()) and found.base_name == "model"


def test_lists_and_patterns_that_make_no_sense_become_notes(tmp_path: Path) -> None:
    raw = {"bits": 4, "dynamic": [1], "modules_in_block_to_quantize": [[7]]}
    found = read_quant_config(settings_folder(tmp_path, raw))
    assert found is not None and len(found.notes) == 2
    raw = {"bits": 4, "dynamic": {"a": 7, "x" * 1000: {}}, "modules_to_not_convert": ["lm_head"]}
    found = read_quant_config(settings_folder(tmp_path, raw))
    assert found is not None and len(found.notes) == 2 and found.overrides.never == ("lm_head",)


def test_synonyms_of_other_writers_are_understood(tmp_path: Path) -> None:
    raw = {"w_bit": 4, "q_group_size": 32, "act_order": True, "format": "gptq_v2"}
    found = read_quant_config(settings_folder(tmp_path, raw))
    assert found is not None and (found.group_size, found.desc_act, found.version) == (32, True, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "bits 5"),
        ({"bits": "4"}, "bits '4'"),
        ({"bits": 4, "group_size": 0}, "group_size 0"),
        ({"bits": 4, "group_size": "128"}, "group_size '128'"),
        ({"bits": 4, "quant_method": "awq"}, "quant_method 'awq'"),
        ({"bits": 4, "quant_method": "compressed-tensors"}, "'compressed-tensors' is not supported .*llm-compressor"),
        ({"bits": 4, "quant_method": 7}, "quant_method '7'"),
        ({"bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*take a GPTQ version"),
        ({"bits": 4, "is_marlin_format": True}, "checkpoint_format 'marlin'"),
        ({"bits": 4, "checkpoint_format": []}, r"checkpoint_format '\[\]'"),
        ({"bits": 4, "pack_dtype": "int64"}, "pack_dtype 'int64'"),
        ({"bits": True}, "bits True"),
        ({"bits": float("nan")}, "bits nan"),
        ({"bits": 4, "group_size": 10**30}, "group_size 1000000"),
        ({"bits": 4, "group_size": True}, "group_size True"),
        ({"bits": 4, "desc_act": "yes"}, "desc_act 'yes'"),
        ([4], "not an object"),
    ],
)
def test_settings_that_do_not_run_are_refused_with_the_reason(tmp_path: Path, settings: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_quant_config(settings_folder(tmp_path, settings))
