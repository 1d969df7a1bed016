"""Quantizing a whole folder: better than rounding where it counts, whole or not at all, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eesd_lite import SamplingParams, quantize
from eesd_lite.cache import Rows
from eesd_lite.errors import EesdError
from eesd_lite.quantize import quantize_folder
from quant.checkpoint import Checkpoint
from tests.puppets import ids_of
from tests.tiny import Tiny, TinySpec, build

CALIBRATION = [[(7 * row + 3 * n * n + n) % 250 for n in range(48)] for row in range(24)]
HELD_OUT = [[(11 * row + 5 * n * n) % 250 for n in range(40)] for row in range(4)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A 16-bit model: the exact weights of a tiny one, with some noise so that no 4-bit grid fits them."""
    tiny = build(tmp_path_factory.mktemp("source") / "model", TinySpec(layers=3, seed=11, bias="real"))
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: (w * (1 + 0.3 * torch.randn(w.shape, generator=generator)) if "proj.weight" in name else w).half()
        for name, w in tiny.weights.items()
    }
    save_file({name: tensor.contiguous() for name, tensor in noisy.items()}, tiny.folder / "model.safetensors")
    config = json.loads((tiny.folder / "config.json").read_text())
    del config["quantization_config"]
    (tiny.folder / "config.json").write_text(json.dumps(config))
    return Tiny(tiny.folder, tiny.spec, noisy)


@torch.inference_mode()
def logits(folder: Path, spec: TinySpec) -> Tensor:
    """Of held-out texts, float32."""
    with Tiny(folder, spec, {}).engine(dtype="float32") as engine:
        target, found = engine.target, []
        for ids in HELD_OUT:
            found.append(target.logits(target.upper(target.embed(ids), Rows.chain(0, len(ids)))))
    return torch.cat(found)


def quantized(source: Tiny, folder: Path, **options: Any) -> Path:
    options = {"group_size": 32, "calibration": CALIBRATION, **options}
    quantize_folder(source.folder, folder, **options)
    return folder


@pytest.mark.parametrize("options", [{}, {"sym": True, "desc_act": True}, {"group_size": -1}], ids=str)
def test_gptq_keeps_logits_nearer_than_rounding_does(source: Tiny, tmp_path: Path, options: dict[str, Any]) -> None:
    exact = logits(source.folder, source.spec)
    errors = {}
    for method in ("gptq", "rtn"):
        folder = quantized(source, tmp_path / method, method=method, **options)
        errors[method] = float((logits(folder, source.spec) - exact).norm() / exact.norm())
    assert errors["gptq"] < errors["rtn"] < 0.9, errors


def test_the_folder_runs_in_the_fast_kernel(source: Tiny, tmp_path: Path) -> None:
    folder = quantized(source, tmp_path / "out", sym=False)
    with Tiny(folder, source.spec, {}).engine() as engine:
        assert len(ids_of(engine, [1, 2, 3], SamplingParams(max_new_tokens=5, ignore_eos=True))) == 5
        kernels = {linear.kernel.name for linear in (engine.target.bank.resident[0].qkv,)}  # type: ignore[union-attr]
    assert kernels == {"int4-cpu"}


def test_biases_norms_and_the_tokenizer_come_along(source: Tiny, tmp_path: Path) -> None:
    folder = quantized(source, tmp_path / "out", method="rtn")
    found = Checkpoint(folder)
    for name, weight in source.weights.items():
        if "proj.weight" not in name:
            module = name.removesuffix(".bias")
            kept = found.bias(module) if name.endswith(".bias") else found.tensor(name)
            assert kept is not None and torch.equal(kept.half(), weight), name
    assert (folder / "tokenizer.json").read_bytes() == (source.folder / "tokenizer.json").read_bytes()


def test_the_same_input_gives_the_same_folder(source: Tiny, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, second = (quantized(source, tmp_path / name) / "model.safetensors" for name in "ab")
    finally:
        torch.set_num_threads(before)
    assert first.read_bytes() == second.read_bytes()


def test_the_gptq_layout_has_no_zero_point_that_readers_disagree_about_and_both_ends_of_a_tied_model(
    tmp_path: Path,
) -> None:
    """A zero point of 0 is stored as -1 in version 1: some tools read it as 0, others as 16. AutoGPTQ needs lm_head."""
    tiny = build(tmp_path / "source", TinySpec(layers=2, seed=13, tied=True))
    stored = {name: w for name, w in tiny.weights.items() if name != "lm_head.weight"}
    positive = {name: w.abs() if "proj.weight" in name else w for name, w in stored.items()}
    save_file({n: w.half().contiguous() for n, w in positive.items()}, tiny.folder / "model.safetensors")
    config = json.loads((tiny.folder / "config.json").read_text())
    del config["quantization_config"]
    (tiny.folder / "config.json").write_text(json.dumps(config))
    zeros = {}
    for layout in ("auto", "gptq"):
        quantize_folder(tiny.folder, tmp_path / layout, group_size=32, sym=False, method="rtn", layout=layout)
        written = Checkpoint(tmp_path / layout)
        settings = json.loads((tmp_path / layout / "config.json").read_text())["quantization_config"]
        assert settings["checkpoint_format"] == ("gptq_v2" if layout == "auto" else "gptq")
        zeros[layout] = written.matrix("model.layers.1.mlp.up_proj").zeros
        assert ("lm_head.weight" in written) == (layout == "gptq")
    assert int(zeros["auto"].max()) == 0 and int(zeros["gptq"].min()) == int(zeros["gptq"].max()) == 1
    assert torch.equal(written.tensor("lm_head.weight"), written.tensor("model.embed_tokens.weight"))
    exact = positive["model.layers.1.mlp.up_proj.weight"]
    assert float((written.dequantized("model.layers.1.mlp.up_proj") - exact).norm() / exact.norm()) < 0.06


def test_progress_is_told_layer_by_layer(source: Tiny, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    quantized(source, tmp_path / "out", method="rtn", progress=lambda stage, done, total: steps.append((done, total)))
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "awq"}, "method must be 'gptq' or 'rtn'"),
        ({"bits": 5}, "bits must be 2, 3, 4 or 8"),
        ({"group_size": 48}, "group size 48 does not divide hidden_size 64"),
        ({"group_size": 64}, "group size 64 does not divide intermediate_size 96"),
        ({"calibration": []}, "needs calibration"),
        ({"calibration": [[1]]}, "fewer than 2 tokens"),
        ({"calibration": [[1, 5000]]}, "token id 5000"),
    ],
)
def test_settings_that_cannot_be_are_refused_and_leave_nothing(
    source: Tiny, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EesdError, match=message):
        quantized(source, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_overwritten(source: Tiny, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(EesdError, match="exists already"):
        quantized(source, tmp_path / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_folder_appears_whole_or_not_at_all(
    source: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    original: Callable[..., Any] = quantize.read_dense_layer

    def fails(checkpoint: Checkpoint, index: int) -> Any:
        if index == 2:
            raise error
        return original(checkpoint, index)

    monkeypatch.setattr(quantize, "read_dense_layer", fails)
    with pytest.raises(error):
        quantized(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_model_that_is_quantized_already_is_refused_and_nothing_is_written(tmp_path: Path, method: str) -> None:
    tiny = build(tmp_path / "model", TinySpec(layers=2))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(EesdError, match="is quantized already"):
        quantize_folder(tiny.folder, tmp_path / "out", method=method, calibration=CALIBRATION, group_size=32)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
