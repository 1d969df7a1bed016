"""Old .bin and .pt files: weights come out, and nothing that is in them runs."""

from __future__ import annotations

import collections
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.checkpoint import Checkpoint
from quant.errors import CheckpointError
from tests.numpy_gptq import draw

MODULE = "model.layers.0.mlp.up_proj"
DRAWN = draw(np.random.default_rng(3), 24, 64, desc_act=True)
STATE: dict[str, Any] = {f"{MODULE}.{name}": torch.from_numpy(array) for name, array in DRAWN.tensors.items()}


class Marker:
    """Unpickling it calls a function: what an attacker's file does."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def write(folder: Path, state: object, name: str = "pytorch_model.bin", **how: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / name, **how)
    settings = {"bits": 4, "group_size": 32, "desc_act": True}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-4bit.pt", "weights.pth"])
def test_a_state_dict_is_read(tmp_path: Path, name: str) -> None:
    state = collections.OrderedDict(STATE) | {"p": torch.nn.Parameter(torch.randn(4, 6).t()), "step": 7}
    checkpoint = Checkpoint(write(tmp_path, state, name))
    assert np.array_equal(checkpoint.dequantized(MODULE).numpy(), DRAWN.dequantized)
    assert torch.equal(checkpoint.tensor("p"), state["p"].detach()) and "step" not in checkpoint
    assert checkpoint.info("p").shape == (6, 4) and checkpoint.info("p").nbytes == 96


def test_a_state_dict_inside_another_dict_is_found(tmp_path: Path) -> None:
    assert MODULE + ".qweight" in Checkpoint(write(tmp_path, {"state_dict": STATE, "epoch": 3}))


def test_shards_go_through_their_index_and_safetensors_come_first(tmp_path: Path) -> None:
    names = sorted(STATE)
    parts = {"pytorch_model-00001-of-00002.bin": names[:2], "pytorch_model-00002-of-00002.bin": names[2:]}
    for file, held in parts.items():
        write(tmp_path, {name: STATE[name] for name in held}, file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({}, tmp_path / "training_args.bin")
    assert np.array_equal(Checkpoint(tmp_path).dequantized(MODULE).numpy(), DRAWN.dequantized)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="model.safetensors: not a safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("call", [os.mkdir, bytearray, eval, torch.load])
def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path, call: Callable[..., Any]) -> None:
    mark = tmp_path / "fired"
    folder = write(tmp_path / "m", STATE | {"evil": Marker(call, str(mark))})
    with pytest.raises(CheckpointError, match="a pickle that would run .* when loaded; not loaded"):
        Checkpoint(folder)
    assert not mark.exists()
    if call is os.mkdir:  # the control: loaded without care, it fires
        torch.load(folder / "pytorch_model.bin", weights_only=False)
        assert mark.exists()


def test_a_bare_pickle_and_a_file_of_an_old_torch_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {}, "model.pt")
    (folder / "model.pt").write_bytes(pickle.dumps(Marker(os.mkdir, str(tmp_path / "fired"))))
    with pytest.raises(CheckpointError, match="not a file of torch 1.6 or later"):
        Checkpoint(folder)
    write(folder, STATE, "model.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="not a file of torch 1.6 or later"):
        Checkpoint(folder)
    assert not (tmp_path / "fired").exists()


def test_a_tensor_that_pretends_to_be_larger_than_its_data_is_refused(tmp_path: Path) -> None:
    small = torch.zeros(4)
    folder = write(tmp_path, {"wide": small.expand(10**6, 4), "fine": small})
    with pytest.raises(CheckpointError, match=r"'wide' of shape \(1000000, 4\) is larger than what is stored of it"):
        Checkpoint(folder)


def change(folder: Path, edit: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Write the pickle anew with other bytes in its program."""
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, edit(data) if name.endswith("data.pkl") else data)


@pytest.mark.parametrize(
    ("edit", "compression"),
    [
        (lambda data: data[:-9], zipfile.ZIP_STORED),
        (lambda data: b"", zipfile.ZIP_STORED),
        (lambda data: data, zipfile.ZIP_DEFLATED),
        (lambda data: b"\x80\x02" + b"(" * 2_000_000 + b".", zipfile.ZIP_STORED),
        (lambda data: data.replace(b"K\x18K@", b"\x8a\x06\0\0\0\0\0\x01K@"), zipfile.ZIP_STORED),
    ],
    ids=["cut", "empty", "compressed", "marks", "huge shape"],
)
def test_a_damaged_pickle_is_one_line(tmp_path: Path, edit: Callable[[bytes], bytes], compression: int) -> None:
    folder = write(tmp_path, STATE | {"w": torch.zeros(24, 64)})
    change(folder, edit, compression)
    with pytest.raises(CheckpointError, match="pytorch_model.bin: ") as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_cut_or_empty_file_and_an_lfs_pointer_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, STATE)
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    for data, message in (
        (whole[: len(whole) // 2], "incomplete download"),
        (b"", "incomplete download"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(folder)


def test_a_tensor_read_from_a_pickle_is_a_copy_of_its_own(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, STATE | {"x": torch.arange(6.0)}))
    first: Tensor = checkpoint.tensor("x")
    (tmp_path / "pytorch_model.bin").unlink()
    assert torch.equal(first, torch.arange(6.0)) and first.untyped_storage().nbytes() == 24
