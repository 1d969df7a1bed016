"""Packed layers on disk: written once and whole, found again, never confused with another model's or kernel's."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eesd_lite import packed_store
from eesd_lite.config import ModelConfig
from eesd_lite.errors import PrepareError
from eesd_lite.layer_blob import BLOCK, BlobLayout, fill, lay_out, page_buffer
from eesd_lite.loader import LoadOptions, choose_kernels
from eesd_lite.packed_store import PackedStore, open_store, packed_folder
from eesd_lite.packing import KernelSet
from quant.checkpoint import Checkpoint
from quant.kernels import Int4CpuKernel
from tests.tiny import Tiny, TinySpec, build

TinyOf = Callable[[TinySpec], Tiny]


def kernels(dtype: str = "bfloat16") -> KernelSet:
    options = LoadOptions(
        device="cpu", dtype=dtype, device_memory=None, resident_layers=None, context=64, draft_limit=4, threads=1,
        throttle=None,
    )  # fmt: skip
    return choose_kernels(options)[1]


@pytest.fixture
def tiny(tiny_of: TinyOf) -> Tiny:
    return tiny_of(TinySpec(layers=3))


def open_tiny(tiny: Tiny, dtype: str = "bfloat16", steps: list[str] | None = None) -> PackedStore:
    def progress(stage: str, done: int, total: int) -> None:
        if steps is not None:
            steps.append(stage)

    return open_store(Checkpoint(tiny.folder), ModelConfig.from_folder(tiny.folder), kernels(dtype), progress)


def test_layers_are_packed_once_and_found_again(tiny: Tiny, cache_home: Path) -> None:
    steps: list[str] = []
    first = open_tiny(tiny, steps=steps)
    assert len(steps) == 3 and first.folder.parent == cache_home / "packed"
    assert sorted(path.name for path in first.folder.iterdir()) == [
        "layer-000.bin", "layer-001.bin", "layer-002.bin", "manifest.json",
    ]  # fmt: skip
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    steps.clear()
    assert open_tiny(tiny, steps=steps) == first and steps == []
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before


def test_the_blobs_hold_the_layers(tiny: Tiny, cache_home: Path) -> None:
    store = open_tiny(tiny, "float32")
    for index, layout in enumerate(store.layouts):
        data = store.path(index).read_bytes()
        assert len(data) == layout.nbytes and layout.nbytes % BLOCK == 0
        views = layout.views(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        weights = {name.removeprefix(f"model.layers.{index}."): value for name, value in tiny.weights.items()}
        qkv = torch.cat([weights[f"self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")])
        assert torch.equal(views["qkv.0.weight"], qkv)
        assert torch.equal(views["down.0.weight"], weights["mlp.down_proj.weight"])
        assert torch.equal(views["input_norm.weight"], weights["input_layernorm.weight"])


def test_another_kernel_another_dtype_and_another_checkpoint_have_folders_of_their_own(
    tiny: Tiny, tmp_path: Path, cache_home: Path
) -> None:
    found = {packed_folder(Checkpoint(tiny.folder), kernels(dtype)) for dtype in ("bfloat16", "float32")}
    other = build(tmp_path / tiny.folder.name, TinySpec(layers=3, seed=99))
    found.add(packed_folder(Checkpoint(other.folder), kernels()))
    assert len(found) == 3


def test_a_checkpoint_that_changed_is_packed_anew(tmp_path: Path, cache_home: Path) -> None:
    tiny = build(tmp_path / "model", TinySpec(layers=2))
    first = open_tiny(tiny)
    build(tmp_path / "model", TinySpec(layers=2, seed=5))
    assert open_tiny(tiny).folder != first.folder


def test_the_folder_names_the_instruction_set_since_packed_bytes_depend_on_it() -> None:
    """torch packs int4 differently for AVX2 and AVX-512; a cache folder may be shared, or outlive a processor."""
    program = (
        "import torch; from quant.kernels import Int4CpuKernel\n"
        "codes = (torch.arange(192 * 256).reshape(192, 256) % 13).int()\n"
        "packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1).long().flatten()\n"
        "print(Int4CpuKernel().layout, int(packed @ torch.arange(len(packed))))"
    )
    said: dict[str, set[str]] = {}
    for environment in (dict(os.environ), {**os.environ, "ATEN_CPU_CAPABILITY": "default"}):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        layout, bytes_ = done.stdout.split()
        said.setdefault(layout, set()).add(bytes_)
    assert all(len(bytes_) == 1 for bytes_ in said.values()), said
    assert Int4CpuKernel().layout in said


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def lose_a_key(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


def wrong_offsets(folder: Path) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    raw["layers"][1]["slots"][0][3] = 10**9
    (folder / "manifest.json").write_text(json.dumps(raw))


def lose_a_layer(folder: Path) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    raw["layers"].pop()
    (folder / "manifest.json").write_text(json.dumps(raw))


def cut_a_blob(folder: Path) -> None:
    path = folder / "layer-001.bin"
    path.write_bytes(path.read_bytes()[:-5000])


def remove_a_blob(folder: Path) -> None:
    (folder / "layer-002.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_manifest, "manifest.json: damaged"),
        (lose_a_key, "manifest.json: damaged"),
        (wrong_offsets, "manifest.json: damaged"),
        (lose_a_layer, "2 packed layers, the model has 3"),
        (cut_a_blob, "layer-001.bin: .* bytes, .* expected"),
        (remove_a_blob, "layer-002.bin: missing"),
    ],
)
def test_a_damaged_folder_is_named_with_the_command_that_removes_it(
    tiny: Tiny, cache_home: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = open_tiny(tiny).folder
    damage(folder)
    with pytest.raises(PrepareError, match=message) as caught:
        open_tiny(tiny)
    assert f"eesd cache rm {folder.name}" in str(caught.value)


def test_a_full_disk_leaves_nothing_behind_and_says_what_helps(
    tiny: Tiny, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "layer-001.bin":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(PrepareError, match="disk full.*EESD_HOME"):
            open_tiny(tiny)
    assert list((cache_home / "packed").iterdir()) == []
    assert len(open_tiny(tiny).layouts) == 3


@pytest.mark.parametrize(("dtype", "per_code"), [("bfloat16", 0.5), ("float32", 4.0)])
def test_free_space_is_asked_for_before_anything_is_written(
    tiny: Tiny, cache_home: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, per_code: float
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(packed_store, "require_free", lambda path, needed, what: asked.append(needed))
    store = open_tiny(tiny, dtype)
    written = sum(store.path(index).stat().st_size for index in range(3))
    codes = sum(w.numel() for n, w in tiny.weights.items() if n.endswith("proj.weight"))
    assert written > codes * per_code
    # Whole pages weigh much in layers as tiny as these: 12 kB of 30.
    assert 0.5 * written < asked[0] < 2 * written


def test_an_interrupted_writing_is_begun_anew(tiny: Tiny, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(checkpoint: Checkpoint, index: int, kernels: KernelSet) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packed_store, "layer_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_tiny(tiny)
    assert list((cache_home / "packed").iterdir()) == []
    assert len(open_tiny(tiny).layouts) == 3


def test_a_cache_folder_that_cannot_be_is_said(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("EESD_HOME", str(tmp_path / "file"))
    with pytest.raises(PrepareError, match="EESD_HOME"):
        open_tiny(tiny)


# The blob itself.


def test_a_blob_keeps_its_tensors_apart_and_aligned() -> None:
    tensors = {
        "a.weight": torch.arange(5, dtype=torch.bfloat16),
        "b.packed": torch.arange(100, dtype=torch.uint8).reshape(10, 10),
        "c.scales": torch.randn(3, 4, 2),
    }
    layout = lay_out(tensors, {"a": "dense"})
    assert layout.nbytes == BLOCK and all(slot.offset % 64 == 0 for slot in layout.slots)
    buffer = page_buffer(layout.nbytes)
    assert buffer.data_ptr() % BLOCK == 0
    fill(layout, buffer, tensors)
    for name, view in layout.views(buffer).items():
        assert torch.equal(view, tensors[name]) and view.dtype == tensors[name].dtype


def test_a_layout_survives_its_manifest_and_refuses_nonsense() -> None:
    layout = lay_out({"a.weight": torch.zeros(70, 70)}, {"a": "dense"})
    raw = json.loads(json.dumps(layout.as_dict()))
    assert BlobLayout.from_dict(raw) == layout
    for change in ({"nbytes": 4096}, {"nbytes": layout.nbytes + 1}, {"slots": 3}, {"slots": [["a", "uint8"]]}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            BlobLayout.from_dict({**raw, **change})
    with pytest.raises(AssertionError):
        replace(layout, nbytes=BLOCK).views(torch.zeros(10, dtype=torch.uint8))
