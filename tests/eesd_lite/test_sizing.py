"""Bytes that are computed beforehand against bytes that are really packed: equal, not close."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eesd_lite.config import ModelConfig
from eesd_lite.draft_weights import DraftWeights
from eesd_lite.engine import Engine
from eesd_lite.inspection import inspect_model
from eesd_lite.sizing import Part, folder_layers, head_bytes, kernel_for, kernel_group, part_bytes, shape_layers
from models.shapes import find_shape
from quant.errors import CheckpointError
from quant.kernels import Int4CpuKernel, kernel_order
from quant.matrix import QuantizedMatrix
from quant.model_folder import ModelFolder
from tests.eesd_lite.test_nf4 import nf4_model, write_dense
from tests.tiny import Tiny, TinySpec, write_tokenizer

TinyOf = Callable[[TinySpec], Tiny]
EngineOf = Callable[..., Engine]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "spec",
    [
        TinySpec(layers=2),
        TinySpec(layers=2, desc_act=True),
        TinySpec(layers=2, bias="real"),
        TinySpec(layers=2, group=-1, sym=False),
        TinySpec(layers=2, group=-1, desc_act=True),
        TinySpec(layers=2, heads=3, kv_heads=1, head_dim=8, inner=160),  # odd shapes that no int4 kernel takes
    ],
    ids=["plain", "act-order", "biases", "one group", "one group in act-order", "odd"],
)
def test_headers_tell_the_bytes_of_every_packed_layer(
    tiny_of: TinyOf, engine_of: EngineOf, spec: TinySpec, dtype: str
) -> None:
    engine, folder = engine_of(spec, dtype=dtype), tiny_of(spec).folder
    kernel, itemsize = ("int4-cpu", 2) if dtype == "bfloat16" else ("dense", 4)
    found = folder_layers(ModelFolder(folder), ModelConfig.from_folder(folder), kernel=kernel, itemsize=itemsize)
    if spec.desc_act and spec.group != -1:  # the orders of q, k and v differ here: three products in place of one
        packed = engine.target.bank.layer_bytes
        assert all(0 <= real - size <= 4096 for real, size in zip(packed, found, strict=True)), (packed, found)
    else:
        assert found == engine.target.bank.layer_bytes


def test_a_layer_without_one_of_its_tensors_is_named(tiny_of: TinyOf) -> None:
    opened = ModelFolder(tiny_of(TinySpec(layers=2)).folder)
    del opened.tensors["model.layers.1.mlp.up_proj.qweight"]
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        folder_layers(opened, ModelConfig.from_folder(opened.folder), kernel="int4-cpu", itemsize=2)


@pytest.mark.real
def test_the_demo_model_packs_to_the_bytes_of_its_shape(demo_model: Path) -> None:
    config = ModelConfig.from_folder(demo_model)
    with Engine.from_pretrained(demo_model, threads=1, context=64, resident_layers=20, exit_layer=20) as engine:
        packed, head = engine.target.bank.layer_bytes, engine.head
        assert head is not None and head.nbytes == head_bytes(config, 2, DraftWeights(8), "int4-cpu")
    assert packed == folder_layers(ModelFolder(demo_model), config, kernel="int4-cpu", itemsize=2)
    assert packed == shape_layers(config, group_size=64, kernel="int4-cpu", itemsize=2)


def test_a_70b_layer_has_the_bytes_that_are_computed_by_hand() -> None:
    """Half a byte per weight, one bfloat16 pair per group of 128 and output, norms: all multiples of a page here."""
    shape = find_shape("llama-2-70b")
    weights = 8192 * (8192 + 1024 + 1024) + 8192 * 8192 + 3 * 8192 * 28672
    expected = weights // 2 + weights // 128 * 4 + 2 * 8192 * 2
    assert expected % 4096 == 0
    config = config_of("llama-2-70b")
    assert shape_layers(config, group_size=128, kernel="int4-cpu", itemsize=2) == (expected,) * 80
    assert shape_layers(config, group_size=128, kernel="int4-cuda", itemsize=2) == (expected,) * 80
    assert shape.num_hidden_layers * expected == 36_367_237_120


def config_of(name: str) -> ModelConfig:
    shape = find_shape(name)
    return ModelConfig(
        model_type=shape.model_type, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads, num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("out_features", [16, 24])
@pytest.mark.parametrize("bits", [2, 4])
def test_a_kernel_takes_what_is_counted_for_it(groups: int, out_features: int, bits: int) -> None:
    in_features = 384
    matrix = QuantizedMatrix(
        codes=torch.zeros(out_features, in_features, dtype=torch.uint8),
        scales=torch.ones(groups, out_features),
        zeros=torch.full((groups, out_features), 1 << (bits - 1), dtype=torch.int32),
        g_idx=torch.arange(in_features) * groups // in_features,
        bits=bits,
    )
    part = Part(out_features=out_features, in_features=in_features, groups=groups, bits=bits)
    group = kernel_group(part, "int4-cpu")
    assert (group is None) == (Int4CpuKernel().refuses(matrix) is not None)
    if group is not None:
        assert kernel_order(matrix) == (None, group)
        packed = Int4CpuKernel().pack(matrix)
        assert part_bytes(part, "int4-cpu", 2) == tuple(tensor.nbytes for tensor in packed.values())


@pytest.mark.parametrize("saved", [False, True], ids=["16 bit loaded as nf4", "saved in 4 bit"])
@pytest.mark.parametrize("inner", [192, 96])  # 96 is not a whole number of blocks of 64
def test_headers_tell_the_bytes_of_layers_in_bitsandbytes_form(
    tmp_path: Path, cache_home: Path, saved: bool, inner: int
) -> None:
    dense = write_dense(tmp_path / "dense", intermediate_size=inner)
    folder, quantize = dense.folder, None if saved else "nf4"
    if saved:
        folder = tmp_path / "saved"
        nf4_model(dense.folder).save_pretrained(folder)
        write_tokenizer(folder)
    found = folder_layers(
        ModelFolder(folder), ModelConfig.from_folder(folder), kernel=kernel_for("cpu", "bfloat16"), itemsize=2,
        quantize=not saved,
    )  # fmt: skip
    with Engine.from_pretrained(folder, quantize=quantize, head="off", context=64, threads=1) as engine:
        assert found == engine.target.bank.layer_bytes
    weights = inspect_model(folder).weights
    assert weights is not None and weights.bits == ({"4-bit nf4 (bitsandbytes)": 35} if saved else {})
