"""Reading config.json in all its spellings, and refusing what cannot be right."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_lite.config import ModelConfig, RopeScaling
from eesd_lite.errors import ModelError

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
REMOVE = object()


def write(folder: Path, generation: object = None, **changes: Any) -> Path:
    values = {key: value for key, value in (SMALL | changes).items() if value is not REMOVE}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as error:
        ModelConfig.from_folder(folder)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, (word, message)


def test_what_is_absent_gets_its_documented_default(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path))
    assert config.num_key_value_heads == 4
    assert config.head_dim == 16
    assert config.rope_theta == 10000.0
    assert config.rope_scaling is None
    assert config.eos_token_ids == ()
    assert config.bos_token_id is None
    assert config.sliding_window is None
    assert not config.tie_word_embeddings


def test_every_value_is_read_under_its_hugging_face_name(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 8192.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "sliding_window": 4096,
    }
    config = ModelConfig.from_folder(write(tmp_path, torch_dtype="float16", dtype=7, **values))
    for key, value in values.items():
        assert getattr(config, key) == value, key
    assert isinstance(config.max_position_embeddings, int)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, (2,)),
        ([5, 2], {"eos_token_id": 7}, (2, 5, 7)),
        (None, {"eos_token_id": [9, 2]}, (2, 9)),
        (2, {"eos_token_id": None}, (2,)),
        (REMOVE, {}, ()),
        (0, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_of_answer_ids_are_the_union_of_both_files(
    tmp_path: Path, config: object, generation: object, ids: tuple[int, ...]
) -> None:
    assert ModelConfig.from_folder(write(tmp_path, generation, eos_token_id=config)).eos_token_ids == ids


def test_rope_settings_are_read_from_the_table_of_transformers_5(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert config.rope_theta == 5e5
    assert config.rope_scaling is None


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_settings_are_read_from_the_older_table(tmp_path: Path, key: str) -> None:
    config = ModelConfig.from_folder(write(tmp_path, rope_theta=2e4, rope_scaling={key: "linear", "factor": 4}))
    assert config.rope_theta == 2e4
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)


def test_llama3_scaling_keeps_its_four_numbers(tmp_path: Path) -> None:
    table: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = ModelConfig.from_folder(write(tmp_path, rope_scaling=table))
    assert config.rope_scaling == RopeScaling(**table)


def test_dynamic_scaling_starts_at_the_models_own_context(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(
        write(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=4096)
    )
    assert config.rope_scaling == RopeScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=4096)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ("config.json", "model_type", "gpt2", "llama", "mistral")),
        ({"model_type": REMOVE}, ("model_type", "missing")),
        ({"hidden_size": REMOVE}, ("hidden_size", "missing")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'")),
        ({"hidden_size": 66}, ("hidden_size", "66", "4")),
        ({"vocab_size": 0}, ("vocab_size", "0")),
        ({"vocab_size": 10**12}, ("vocab_size",)),
        ({"vocab_size": True}, ("vocab_size",)),
        ({"num_hidden_layers": -1}, ("num_hidden_layers", "-1")),
        ({"num_hidden_layers": 100_000}, ("num_hidden_layers",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3")),
        ({"num_key_value_heads": 8}, ("num_key_value_heads", "8")),
        ({"head_dim": 15}, ("head_dim", "15")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps",)),
        ({"rms_norm_eps": 5}, ("rms_norm_eps",)),
        ({"rope_theta": 0}, ("rope_theta",)),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, ("yarn", "linear")),
        ({"rope_scaling": {"type": "linear"}}, ("rope_scaling.factor", "missing")),
        ({"rope_scaling": [1]}, ("rope_scaling",)),
        ({"rope_parameters": {"rope_theta": "x"}}, ("rope_parameters.rope_theta",)),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
        ({"eos_token_id": 1000}, ("eos_token_id", "1000")),
        ({"eos_token_id": ["</s>"]}, ("eos_token_id",)),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_with_file_and_key(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(write(tmp_path, **changes), "config.json", *words)


def test_a_window_that_the_file_switches_off_is_no_window(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path, sliding_window=32, use_sliding_window=False))
    assert config.sliding_window is None


def test_a_wrong_generation_file_is_named(tmp_path: Path) -> None:
    refused(write(tmp_path, {"eos_token_id": 5000}), "generation_config.json", "5000")


def test_a_folder_without_a_config_says_what_a_model_folder_holds(tmp_path: Path) -> None:
    refused(tmp_path, "config.json", "no such file")
    refused(tmp_path / "nowhere", "config.json", "no such file")


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x", encoding="utf-8")
    refused(tmp_path / "model", "not a folder")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model_type": "llama"', b"[" * 100_000])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, "config.json")


@settings(max_examples=200, deadline=None)
@given(
    key=st.sampled_from([*SMALL, "num_key_value_heads", "head_dim", "rope_scaling", "eos_token_id", "bos_token_id"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_whatever_a_key_holds_the_answer_is_a_config_or_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    folder = write(tmp_path_factory.mktemp("config"), **{key: value})
    try:
        ModelConfig.from_folder(folder)
    except ModelError as error:
        assert "\n" not in str(error)
