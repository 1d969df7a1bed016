import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eesd_lite.config import ModelConfig, RopeScaling
from eesd_lite.errors import HeadError
from eesd_lite.head_file import (
    HeadShape,
    fingerprint_names,
    folder_fingerprint,
    load_head,
    save_head,
    target_fingerprint,
    write_acceptance,
)
from eesd_lite.head_list import HeadFacts, read_head_facts
from eesd_lite.head_prior import NO_PRIOR, HeadPrior, Judged, belief_of
from quant.errors import CheckpointError

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
PRINT = "a" * 64


def tensors(config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = HeadShape.from_config(config).tensor_shapes()
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def save(path: Path, config: ModelConfig = CONFIG, exit_layer: int = 2) -> Path:
    save_head(
        path,
        tensors(config),
        config=config,
        exit_layer=exit_layer,
        fingerprint=PRINT,
        summary={"tokens": 1000, "minutes": 1.5, "agreement": 0.5},
    )
    return path


def unquantized(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    found = {}
    for name in fingerprint_names(config.num_hidden_layers):
        rows = (config.vocab_size, config.hidden_size) if "embed" in name else (config.hidden_size,)
        found[name] = torch.randn(rows, generator=generator).to(torch.float16).to(dtype)
    return found


def test_a_saved_head_loads_with_the_same_bits_and_its_summary(tmp_path: Path) -> None:
    path = save(tmp_path / "exit-02.safetensors")
    head = load_head(path, CONFIG, PRINT)
    assert head.exit_layer == 2 and head.fingerprint == PRINT
    assert head.summary == {"tokens": 1000, "minutes": 1.5, "agreement": 0.5}
    for name, tensor in tensors().items():
        assert torch.equal(head.tensors[name], tensor), name
    assert read_head_facts(path) == HeadFacts(2, 0.5)


def test_a_head_file_holds_only_the_heads_own_tensors_in_16_bit(tmp_path: Path) -> None:
    path = save(tmp_path / "head.safetensors")
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(HeadShape.from_config(CONFIG).tensor_shapes())
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}
    parameters = HeadShape.from_config(CONFIG).parameter_count()
    assert 2 * parameters <= path.stat().st_size < 2 * parameters + 4096
    assert [p.name for p in tmp_path.iterdir()] == ["head.safetensors"]  # no temporary file is left
    if os.name == "posix":
        assert path.stat().st_mode & 0o444 == 0o444  # whoever uses an installed package may read it


def test_a_head_of_other_shapes_is_refused_even_when_forced(tmp_path: Path) -> None:
    path = save(tmp_path / "head.safetensors")
    other = replace(CONFIG, intermediate_size=64)
    with pytest.raises(HeadError, match=r"gate_proj.*\[48, 32\].*\[64, 32\]"):
        load_head(path, other, PRINT, force=True)


def test_a_head_of_another_target_is_refused_unless_forced(tmp_path: Path) -> None:
    path = save(tmp_path / "head.safetensors")
    with pytest.raises(HeadError, match="aaaaaaaaaaaa, this model is bbbbbbbbbbbb"):
        load_head(path, CONFIG, "b" * 64)
    assert load_head(path, CONFIG, "b" * 64, force=True).exit_layer == 2
    assert load_head(path, CONFIG).exit_layer == 2  # no fingerprint given: not compared


def test_an_exit_layer_outside_the_model_is_refused(tmp_path: Path) -> None:
    deeper = replace(CONFIG, num_hidden_layers=12)
    path = save(tmp_path / "head.safetensors", deeper, exit_layer=9)
    with pytest.raises(HeadError, match="exit layer 9, the model allows 1 to 3"):
        load_head(path, CONFIG)
    for wrong in (0, 4):
        with pytest.raises(HeadError, match=f"exit layer {wrong}"):
            save(tmp_path / "other.safetensors", exit_layer=wrong)


def test_a_truncated_file_is_one_clear_line(tmp_path: Path) -> None:
    path = save(tmp_path / "head.safetensors")
    whole = path.read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(HeadError, match="head.safetensors: .*not a head file, or truncated") as caught:
            load_head(path, CONFIG)
        assert "\n" not in str(caught.value)


def test_files_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(HeadError, match="not a head file"):
        load_head(path, CONFIG)
    path.write_text("hello")
    with pytest.raises(HeadError, match="not a head file"):
        load_head(path, CONFIG)
    assert read_head_facts(path) is None
    with pytest.raises(HeadError, match="no such head file"):
        load_head(tmp_path / "none.safetensors", CONFIG)


def test_missing_unknown_and_damaged_parts_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "head.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    without = tensors()
    del without["affine.bias"]
    save_file(without, path, metadata=metadata)
    with pytest.raises(HeadError, match=r"affine\.bias is missing"):
        load_head(path, CONFIG)
    save_file(tensors() | {"extra": torch.zeros(1)}, path, metadata=metadata)
    with pytest.raises(HeadError, match="unknown tensor extra"):
        load_head(path, CONFIG)
    save_file(tensors(), path, metadata=metadata | {"exit_layer": "two"})
    with pytest.raises(HeadError, match="damaged head metadata"):
        load_head(path, CONFIG)
    save_file(tensors(), path, metadata=metadata | {"format": "eesd-head-9"})
    with pytest.raises(HeadError, match="head format eesd-head-9"):
        load_head(path, CONFIG)


def test_the_rope_of_the_target_is_described_in_the_file(tmp_path: Path) -> None:
    scaled = replace(CONFIG, rope_scaling=RopeScaling(rope_type="linear", factor=2.0))
    head = load_head(save(tmp_path / "head.safetensors", scaled), scaled)
    assert '"rope_type": "linear"' in head.metadata["rope"] and '"factor": 2.0' in head.metadata["rope"]


def test_the_fingerprint_is_the_same_in_every_dtype_that_holds_the_values() -> None:
    assert target_fingerprint(CONFIG, unquantized().__getitem__) == target_fingerprint(
        CONFIG, unquantized(dtype=torch.float16).__getitem__
    )


def test_the_fingerprint_sees_a_changed_embedding_norm_and_shape() -> None:
    reference = target_fingerprint(CONFIG, unquantized().__getitem__)
    for name in ("model.embed_tokens.weight", "model.layers.3.input_layernorm.weight", "model.norm.weight"):
        changed = unquantized()
        changed[name] = changed[name] + 0.01
        assert target_fingerprint(CONFIG, changed.__getitem__) != reference, name
    assert target_fingerprint(replace(CONFIG, intermediate_size=64), unquantized().__getitem__) != reference


def test_a_folder_has_the_same_fingerprint_whatever_its_linear_weights_and_files(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir()
    halves.mkdir()
    values = unquantized()
    save_file(values | {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)}, whole / "model.safetensors")
    names = sorted(values)
    save_file({n: values[n].half() for n in names[:3]}, halves / "model-00001-of-00002.safetensors")
    save_file({n: values[n].half() for n in names[3:]}, halves / "model-00002-of-00002.safetensors")
    assert folder_fingerprint(whole, CONFIG) == folder_fingerprint(halves, CONFIG)
    (halves / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is missing"):
        folder_fingerprint(halves, CONFIG)


def save_with_list(path: Path, ids: torch.Tensor) -> Path:
    save_head(path, tensors(), config=CONFIG, exit_layer=2, fingerprint=PRINT, summary={}, draft_vocab=ids)
    return path


def test_a_list_of_frequent_tokens_is_stored_with_a_head_and_is_no_part_of_it(tmp_path: Path) -> None:
    ids = torch.tensor([49, 0, 7, 30], dtype=torch.int32)
    head = load_head(save_with_list(tmp_path / "a", ids), CONFIG)
    assert head.draft_vocab is not None and torch.equal(head.draft_vocab, ids)
    assert set(head.tensors) == set(tensors())
    assert load_head(save(tmp_path / "b"), CONFIG).draft_vocab is None


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 50], dtype=torch.int32), "names token 50, this model has 50"),
        (torch.tensor([-1, 2], dtype=torch.int32), "names token -1, this model has 50"),
        (torch.tensor([3, 9, 3], dtype=torch.int32), "names token 3 more than once"),
        (torch.tensor([3, 9]), r"int64 \[2\], not a list of int32"),
        (torch.tensor([[3, 9]], dtype=torch.int32), r"int32 \[1, 2\], not a list of int32"),
    ],
)
def test_a_bad_list_of_frequent_tokens_is_refused(tmp_path: Path, ids: torch.Tensor, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        save_with_list(tmp_path / "written", ids)
    path = save(tmp_path / "head")  # as another program could have written it
    with safe_open(path, framework="pt") as file:
        save_file(tensors() | {"draft_vocab": ids}, str(path), metadata=file.metadata())
    with pytest.raises(HeadError, match=message) as caught:
        load_head(path, CONFIG)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


PRIOR = HeadPrior({0.8: belief_of([[Judged((0.6, 0.2), 0, 0.6), Judged((0.4, 0.3), 1, 0.4)] * 20])})


def test_acceptance_is_written_into_a_head_and_its_tensors_keep_their_bytes(tmp_path: Path) -> None:
    path = save(tmp_path / "exit-02.safetensors")
    assert load_head(path, CONFIG).prior == NO_PRIOR
    before = path.read_bytes()
    for _ in range(2):  # the second replaces the first
        write_acceptance(path, PRIOR)
        found = load_head(path, CONFIG, fingerprint=PRINT)
        assert found.prior == PRIOR and found.summary["tokens"] == 1000
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors().items())
    data = sum(tensor.nbytes for tensor in tensors().values())
    assert path.read_bytes()[-data:] == before[-data:] and (len(path.read_bytes()) - data) % 8 == 0
    assert read_head_facts(path).exit_layer == 2
    assert not list(tmp_path.glob(".*"))


def test_acceptance_counted_with_another_target_is_not_believed(tmp_path: Path) -> None:
    path = save(tmp_path / "exit-02.safetensors")
    write_acceptance(path, PRIOR)
    assert load_head(path, CONFIG, fingerprint="b" * 64, force=True).prior == NO_PRIOR
    assert load_head(path, CONFIG, fingerprint=PRINT, force=True).prior == PRIOR


@pytest.mark.parametrize("text", ["", "{", "[]", '{"edges": 3}', '{"temperatures": {}}', "null"])
def test_damaged_acceptance_is_one_clear_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "exit-02.safetensors"
    save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors(), path, metadata={**metadata, "acceptance": text})
    with pytest.raises(HeadError, match="damaged head metadata"):
        load_head(path, CONFIG)


def test_acceptance_goes_into_heads_only(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"GGUF", b"\x02" + b"\0" * 7 + b"{}", b"\x02" + b"\0" * 7 + b"[]"]):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with pytest.raises(HeadError, match="not a head file"):
            write_acceptance(path, PRIOR)
        assert path.read_bytes() == content
