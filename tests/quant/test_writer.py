"""What the writer writes, the reader reads: the same numbers, settings that others understand, shards with an index."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quant import writer as writer_module
from quant.checkpoint import Checkpoint
from quant.gptq import GridSettings, gptq_quantize
from quant.matrix import QuantizedMatrix
from quant.writer import GPTQWriter
from tests.numpy_gptq import pack_bits

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {f"{module}.weight": torch.randn(16, 64).to(torch.bfloat16) for module in MODULES}
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), 7.0)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text('{"as": "it is"}')
    (folder / "old.bin").write_text("no small file")
    return Checkpoint(folder)


def write(folder: Path, source: Checkpoint, settings: GridSettings, bias: bool = False) -> dict[str, QuantizedMatrix]:
    folder.mkdir()
    writer = GPTQWriter(folder, source, settings, version=1 if settings.sym else 2)
    writer.copy_small_files()
    writer.add_unquantized()
    matrices = {}
    for number, module in enumerate(MODULES):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(200, 64, generator=generator)
        found = gptq_quantize(source.dequantized(module), x.t() @ x, settings)
        if bias:
            offsets = torch.randn(16, generator=generator).half().float()
            found = QuantizedMatrix(found.codes, found.scales, found.zeros, found.g_idx, found.bits, offsets)
        matrices[module] = found
        writer.add_matrix(module, found)
    writer.finish()
    return matrices


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize("group", [32, -1])
def test_the_reader_gives_back_every_number(
    tmp_path: Path, source: Checkpoint, sym: bool, desc_act: bool, group: int
) -> None:
    settings = GridSettings(group_size=group, sym=sym, desc_act=desc_act)
    written = write(tmp_path / "out", source, settings, bias=True)
    found = Checkpoint(tmp_path / "out")
    for module, matrix in written.items():
        read = found.matrix(module)
        for name in ("codes", "scales", "zeros", "g_idx", "bias"):
            assert torch.equal(getattr(read, name), getattr(matrix, name)), name
        assert torch.equal(found.dequantized(module), matrix.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_bytes_are_those_of_an_independent_packer(tmp_path: Path, source: Checkpoint, bits: int) -> None:
    for sym, stored in ((True, 1), (False, 0)):  # version 1 for symmetric folders, version 2 for the others
        folder = tmp_path / f"out-{sym}"
        written = write(folder, source, GridSettings(bits=bits, group_size=32, sym=sym))
        tensors = load_file(folder / "model.safetensors")
        for module, matrix in written.items():
            assert np.array_equal(tensors[f"{module}.qweight"].numpy(), pack_bits(matrix.codes.numpy().T, bits))
            zeros = pack_bits(matrix.zeros.numpy().T - stored, bits).T
            assert np.array_equal(tensors[f"{module}.qzeros"].numpy(), zeros)
            assert tensors[f"{module}.scales"].dtype == torch.float16
            assert tensors[f"{module}.g_idx"].dtype == torch.int32
            assert torch.equal(Checkpoint(folder).dequantized(module), matrix.dequantize())
            assert f"{module}.bias" not in tensors and f"{module}.weight" not in tensors


@pytest.mark.parametrize("sym", [True, False])
def test_settings_are_written_where_loaders_look(tmp_path: Path, source: Checkpoint, sym: bool) -> None:
    write(tmp_path / "out", source, GridSettings(group_size=32, sym=sym, desc_act=True))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["torch_dtype"] == "float16" and "dtype" not in config
    settings = config["quantization_config"]
    assert settings == json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    expected = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": sym}
    assert expected.items() <= settings.items()
    assert settings["checkpoint_format"] == ("gptq" if sym else "gptq_v2")


def test_other_tensors_become_float16_and_small_files_travel(tmp_path: Path, source: Checkpoint) -> None:
    write(tmp_path / "out", source, GridSettings(group_size=32))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.norm.weight"].dtype == torch.float16
    assert not any("inv_freq" in name for name in tensors)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"as": "it is"}'
    assert not (tmp_path / "out" / "old.bin").exists()


def test_a_large_model_is_written_in_shards_with_an_index(
    tmp_path: Path, source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 600)
    written = write(tmp_path / "out", source, GridSettings(group_size=32))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = Checkpoint(tmp_path / "out")
    for module, matrix in written.items():
        assert torch.equal(found.dequantized(module), matrix.dequantize())
    raw = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert raw["metadata"]["total_size"] == sum(info.nbytes for info in found.tensors.values())


def test_a_matrix_without_scales_worth_storing_survives_float16(tmp_path: Path, source: Checkpoint) -> None:
    """The smallest scale that a grid may have is exact in float16, so that writing rounds nothing."""
    folder = tmp_path / "out"
    folder.mkdir()
    writer = GPTQWriter(folder, source, GridSettings(group_size=32), version=1)
    tiny = gptq_quantize(torch.full((16, 64), 1e-9), torch.eye(64), GridSettings(group_size=32))
    writer.add_matrix(MODULES[0], tiny)
    writer.finish()
    assert torch.equal(Checkpoint(folder).matrix(MODULES[0]).scales, tiny.scales)
