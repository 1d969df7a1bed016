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
OPTIONAL = (
    "num_key_value_heads", "head_dim", "rope_scaling", "eos_token_id", "bos_token_id", "layer_types", "no_rope_layers",
    "sliding_window", "use_sliding_window", "max_window_layers", "architectures", "attention_bias", "hidden_act",
)  # fmt: skip
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
        ({"model_type": "gpt2"}, ("config.json", "model_type", "gpt2", "llama, mistral, qwen2, qwen3, smollm3")),
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


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
    ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "rope_scaling.mrope_section"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.2}}, "rope_scaling.attention_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"final_logit_softcapping": 30}, "final_logit_softcapping"),
    ({"attention_softcap": 20.0}, "attention_softcap"),
    ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ({"residual_multiplier": 0.22}, "residual_multiplier"),
    ({"attention_multiplier": 1}, "attention_multiplier"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"scale_emb": 12}, "scale_emb"),
    ({"alibi": True}, "alibi"),
    ({"clip_qkv": 6.0}, "clip_qkv"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"n_routed_experts": 64}, "n_routed_experts"),
    ({"kv_lora_rank": 512}, "kv_lora_rank"),
    ({"use_qk_norm": True}, "use_qk_norm"),
    ({"attention_chunk_size": 8192}, "attention_chunk_size"),
    ({"sliding_window": 512}, "sliding_window 512"),
    ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
    ({"add_cross_attention": True}, "add_cross_attention"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.Own"}}, "auto_map"),
    ({"model_type": "mistral", "attention_bias": True}, "attention_bias"),
    ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias"),
    ({"model_type": "mistral", "sliding_window": 64, "layer_types": ["full_attention"] * 4}, "layer_types"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
    ({"attention_bias": "yes"}, "attention_bias"),
]


@pytest.mark.parametrize(("changes", "key"), FOREIGN, ids=str)
def test_a_setting_whose_arithmetic_nobody_here_has_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    refused(write(tmp_path, **changes), "config.json", key)


def test_settings_that_change_nothing_are_no_reason_to_refuse(tmp_path: Path) -> None:
    harmless: dict[str, Any] = {
        "pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False, "initializer_range": 0.02, "alibi": False,
        "partial_rotary_factor": 1.0, "logit_scale": 1.0, "attn_logit_softcapping": None, "num_experts": 0,
        "_name_or_path": "", "no_rope_layers": [1, 1, 1, 1],
        "rope_scaling": None, "hidden_act": "silu", "architectures": ["LLaMAForCausalLM"], "mlp_bias": False,
        "layer_types": ["full_attention"] * 4, "sliding_window": 4096, "max_window_layers": 28, "is_decoder": True,
        "auto_map": None, "quantization_config": {"bits": 4}, "unsloth_version": "1", "tie_encoder_decoder": False,
        "chunk_size_feed_forward": 0, "add_cross_attention": False, "pruned_heads": {}, "_attn_implementation": "eager",
    }  # fmt: skip
    config = ModelConfig.from_folder(write(tmp_path, **harmless))
    assert config == ModelConfig.from_folder(write(tmp_path))


def published(model_type: str, hidden: int, inner: int, layers: int, heads: int, kv: int | None, **keys: Any) -> Any:
    values = {
        "architectures": [f"{model_type}ForCausalLM"], "model_type": model_type, "hidden_act": "silu",
        "vocab_size": 200000, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "attention_dropout": 0.0, "initializer_range": 0.02,
        "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "rope_scaling": None,
        "rms_norm_eps": 1e-5, **keys,
    }  # fmt: skip
    return {key: REMOVE if value == "absent" else value for key, value in values.items()}


LLAMA31 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
PUBLISHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Llama-2-70B": (
        published("llama", 8192, 28672, 80, 64, 8, max_position_embeddings=4096, pretraining_tp=1),
        {"head_dim": 128, "biases": (), "longest_context": 4096, "sliding_window": None},
    ),
    "Llama-3.1-8B": (
        published(
            "llama", 4096, 14336, 32, 32, 8, max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=LLAMA31,
            attention_bias=False, mlp_bias=False,
        ),
        {"longest_context": 131072, "rope_theta": 5e5, "rope_scaling": RopeScaling(**LLAMA31)},  # type: ignore[arg-type]
    ),
    "Vicuna-13B-v1.5-16k": (
        published(
            "llama", 5120, 13824, 40, 40, 40, max_position_embeddings=4096, max_sequence_length=16384,
            rope_scaling={"factor": 4.0, "type": "linear"}, pretraining_tp=1,
        ),
        {"longest_context": 16384, "num_key_value_heads": 40},
    ),
    "CodeLlama-7B, old file": (
        published("llama", 4096, 11008, 32, 32, "absent", max_position_embeddings=16384, rope_theta=1000000),  # type: ignore[arg-type]
        {"num_key_value_heads": 32, "rope_theta": 1e6},
    ),
    "SmolLM2": (
        published(
            "llama", 576, 1536, 30, 9, 3, max_position_embeddings=8192, rope_interleaved=False, is_llama_config=True,
            tie_word_embeddings=True, **{"transformers.js_config": {"kv_cache_dtype": {}}},
        ),
        {"head_dim": 64, "tie_word_embeddings": True},
    ),
    "Mistral-7B-v0.1": (
        published("mistral", 4096, 14336, 32, 32, 8, max_position_embeddings=32768, sliding_window=4096),
        {"sliding_window": 4096, "full_attention_layers": (), "longest_context": 32768},
    ),
    "Mistral-Nemo": (
        published(
            "mistral", 5120, 14336, 40, 32, 8, head_dim=128, max_position_embeddings=131072, sliding_window=None,
        ),
        {"head_dim": 128, "sliding_window": None},
    ),
    "Qwen2.5-7B": (
        published(
            "qwen2", 3584, 18944, 28, 28, 4, max_position_embeddings=32768, max_window_layers=28, rope_theta=1000000.0,
            sliding_window=131072, use_sliding_window=False, use_mrope=False,
        ),
        {"head_dim": 128, "biases": ("q_proj", "k_proj", "v_proj"), "sliding_window": None, "qk_norm": False},
    ),
    "Qwen3-8B": (
        published(
            "qwen3", 4096, 12288, 36, 32, 8, head_dim=128, attention_bias=False, max_position_embeddings=40960,
            max_window_layers=36, rope_theta=1000000, sliding_window=None, use_sliding_window=False,
        ),
        {"head_dim": 128, "biases": (), "qk_norm": True, "sliding_window": None},
    ),
    "SmolLM3-3B": (
        published(
            "smollm3", 2048, 11008, 36, 16, 4, layer_types=["full_attention"] * 36, no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9, max_window_layers=28, mlp_bias=False, pretraining_tp=2,
            rope_theta=5000000.0, sliding_window=None, use_sliding_window=False, max_position_embeddings=65536,
        ),
        {"unrotated_layers": tuple(range(3, 36, 4)), "tie_word_embeddings": True, "rope_theta": 5e6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_they_are_published_are_read(tmp_path: Path, name: str) -> None:
    values, expected = PUBLISHED[name]
    config = ModelConfig.from_folder(write(tmp_path, **values))
    assert {key: getattr(config, key) for key in expected} == expected


def family(folder: Path, model_type: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_folder(write(folder, model_type=model_type, **changes))


def test_biases_follow_from_the_family_and_from_its_keys(tmp_path: Path) -> None:
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    assert family(tmp_path, "llama").biases == ()
    assert family(tmp_path, "llama", attention_bias=True).biases == attention
    assert family(tmp_path, "llama", mlp_bias=True).biases == mlp
    assert family(tmp_path, "smollm3", attention_bias=True, mlp_bias=True).biases == attention + mlp
    assert family(tmp_path, "qwen2").biases == ("q_proj", "k_proj", "v_proj")
    assert family(tmp_path, "qwen3").biases == () and family(tmp_path, "qwen3").qk_norm
    assert family(tmp_path, "qwen3", attention_bias=True).biases == attention


def test_what_a_family_takes_for_granted(tmp_path: Path) -> None:
    assert family(tmp_path, "qwen3").head_dim == 128 and family(tmp_path, "qwen3", head_dim=32).head_dim == 32
    assert family(tmp_path, "mistral", head_dim=None).head_dim == 16
    assert family(tmp_path, "smollm3").rope_theta == 2e6 and family(tmp_path, "smollm3").tie_word_embeddings
    assert family(tmp_path, "mistral").sliding_window == 4096
    assert family(tmp_path, "mistral", sliding_window=None).sliding_window is None


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("qwen2", {"sliding_window": 8}, [None] * 4),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, [None] * 4),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 8]),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, [None] * 4),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, [4096] * 4),
        (
            "qwen3",
            {
                "sliding_window": 8, "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": True}, [None, None, None, 8]),
        ("smollm3", {"sliding_window": 8}, [None] * 4),
    ],
)  # fmt: skip
def test_the_window_of_every_layer(
    tmp_path: Path, model_type: str, changes: dict[str, Any], windows: list[int | None]
) -> None:
    config = family(tmp_path, model_type, **changes)
    assert [config.window_of(layer) for layer in range(4)] == windows


def test_layers_that_do_not_rotate(tmp_path: Path) -> None:
    assert family(tmp_path, "smollm3").unrotated_layers == (3,)
    assert family(tmp_path, "smollm3", no_rope_layer_interval=2).unrotated_layers == (1, 3)
    assert family(tmp_path, "smollm3", no_rope_layers=[0, 1, 1, 0, 1]).unrotated_layers == (0, 3)


def test_the_longest_context_follows_the_rope(tmp_path: Path) -> None:
    def longest(**scaling: Any) -> int:
        changes = {"max_position_embeddings": 4096, "rope_scaling": scaling or None}
        return ModelConfig.from_folder(write(tmp_path, **changes)).longest_context

    assert longest() == 4096
    assert longest(type="linear", factor=4.0) == 16384  # Vicuna 16k states 4096
    assert longest(type="dynamic", factor=4.0) == 4096
    assert longest(type="dynamic", factor=4.0, original_max_position_embeddings=2048) == 2048


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
    key=st.sampled_from([*SMALL, *OPTIONAL]),
    model_type=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "smollm3"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_whatever_a_key_holds_the_answer_is_a_config_or_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, key: str, model_type: str, value: object
) -> None:
    folder = write(tmp_path_factory.getbasetemp(), **{"model_type": model_type, "use_sliding_window": True, key: value})
    try:
        ModelConfig.from_folder(folder)
    except ModelError as error:
        assert "\n" not in str(error)
