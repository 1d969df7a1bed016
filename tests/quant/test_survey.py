"""What headers and settings tell of a folder, sound or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from quant.checkpoint import Checkpoint
from quant.survey import survey
from tests.numpy_gptq import draw

SETTINGS = {"bits": 4, "group_size": 32, "quant_method": "gptq", "sym": True, "desc_act": False}


def gptq(name: str, out: int = 32, inner: int = 64, **options: Any) -> dict[str, Tensor]:
    drawn = draw(np.random.default_rng(len(name)), out, inner, **options)
    return {f"{name}.{part}": torch.from_numpy(array) for part, array in drawn.tensors.items()}


def folder_of(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": SETTINGS | settings}))
    return folder


def test_modules_are_what_their_tensors_say(tmp_path: Path) -> None:
    tensors = gptq("a.q_proj") | gptq("a.k_proj", bits=8, group=64) | gptq("a.v_proj", bits=3, group=-1)
    tensors |= {"a.v_proj.bias": torch.zeros(32).half(), "a.o_proj.weight": torch.zeros(8, 6).half()}
    tensors |= {"a.rotary_emb.inv_freq": torch.zeros(4), "norm.weight": torch.zeros(6)}
    found = survey(folder_of(tmp_path, tensors))
    by_name = {module.name: module for module in found.modules}
    assert found.problems == () and found.other == ("a.rotary_emb.inv_freq",) and found.claimed_version == 1
    assert [by_name[f"a.{n}_proj"].bits for n in "qkvo"] == [4, 8, 3, 16]
    assert [by_name[f"a.{n}_proj"].group_size for n in "qkvo"] == [32, -1, -1, None]
    assert [by_name[f"a.{n}_proj"].act_order for n in "qkvo"] == [None, False, False, False]
    assert by_name["a.v_proj"].has_bias and by_name["a.v_proj"].shape == (32, 64)
    assert by_name["norm"].shape == (6,) and by_name["norm"].bits == 32
    assert found.bits() == {3: 1, 4: 1, 8: 1}
    assert found.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert sum(module.nbytes for module in found.modules) == found.total_bytes - 16  # all but inv_freq
    assert any("a.k_proj is 8-bit, the settings say 4; the tensors win" in note for note in found.notes)


def test_all_that_is_wrong_is_listed_and_the_rest_still_surveyed(tmp_path: Path) -> None:
    tensors = gptq("a.q_proj") | gptq("a.k_proj") | gptq("a.v_proj")
    del tensors["a.k_proj.scales"]
    tensors["a.v_proj.qzeros"] = torch.zeros(5, 5, dtype=torch.int32)
    found = survey(folder_of(tmp_path, tensors))
    assert [module.name for module in found.modules] == ["a.q_proj"]
    assert len(found.problems) == 2
    assert any("'a.k_proj.scales' is missing" in line for line in found.problems)
    assert any("'a.v_proj' has qweight (8, 32)" in line for line in found.problems)


def test_overrides_of_the_settings_are_confirmed_and_contradictions_are_named(tmp_path: Path) -> None:
    dynamic = {"-:.*o_proj": {}, r"+:.*layers\.0\.[qv]_proj": {"bits": 8, "group_size": 64}, "lm_head": {"bits": 8}}
    tensors = gptq("layers.0.q_proj", bits=8, group=64, inner=128) | gptq("layers.0.v_proj") | gptq("layers.0.k_proj")
    tensors |= {"layers.0.o_proj.weight": torch.zeros(8, 6).half()}
    found = survey(folder_of(tmp_path, tensors, dynamic=dynamic))
    assert found.notes == ("layers.0.v_proj is 4-bit, the settings say 8; the tensors win",)
    listed = survey(folder_of(tmp_path, tensors, modules_in_block_to_quantize=[["q_proj", "k_proj"]], bits=8))
    assert "layers.0.v_proj is quantized, though the settings leave it alone; the tensors win" in listed.notes


def test_a_pattern_that_never_ends_is_given_up(tmp_path: Path) -> None:
    names = [f"model.layers.{index}.self_attn.q_proj" for index in range(20)]
    tensors = {name: value for module in names for name, value in gptq(module).items()}
    slow = {"(((.+)+)+)+(((.+)+)+)+!": {"bits": 8}, "(": {"bits": 8}, "+:.*q_proj": {"group_size": 64}}
    found = survey(folder_of(tmp_path, tensors, dynamic=slow))
    assert any("patterns of dynamic that are not evaluated" in note for note in found.notes)
    assert any("and 19 more modules are of group size 32, the settings say 64" in note for note in found.notes)


def test_the_version_of_zero_points_is_seen_in_symmetric_data(tmp_path: Path) -> None:
    checkpoint = Checkpoint(folder_of(tmp_path, gptq("a.q_proj", version=2), checkpoint_format="gptq_v2"))
    assert checkpoint.zero_version() == (2, None)
    found, note = Checkpoint(folder_of(tmp_path, gptq("a.q_proj", version=2))).zero_version()
    assert found == 2 and note is not None and "claim gptq (version 1) but all zero points are stored as 8" in note
    asymmetric = folder_of(tmp_path, gptq("a.q_proj", sym=False), sym=False)
    assert Checkpoint(asymmetric).zero_version() == (None, None)
    assert survey(asymmetric).claimed_version == 1
