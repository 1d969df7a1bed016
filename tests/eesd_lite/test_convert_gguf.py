"""A converted GGUF is the same model: weights, tokenizer, special ids, and what transformers makes of the same file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from eesd_lite.convert_gguf import convert_gguf
from eesd_lite.errors import PrepareError
from tests.eesd_lite.tiny_gguf import hf_weights, write_gguf

TEXTS = ["hello world 1234", "hello\n\n  12 \t12", "<|im_end|> 🙂 ñ", "   7", "don't 1½ a1b"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, hf_weights())
    return path


@pytest.fixture(scope="module")
def converted(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(gguf, folder)
    return folder


def test_every_matrix_is_the_dequantized_one_in_hugging_face_row_order(converted: Path) -> None:
    stored = load_file(converted / "model.safetensors")
    expected = hf_weights()
    assert set(stored) == set(expected)
    for name, weight in expected.items():
        if weight.ndim == 2:
            kind = GGMLQuantizationType.Q8_0 if "embed" in name else GGMLQuantizationType.Q4_1
            weight = quants.dequantize(quants.quantize(weight, kind), kind)
        assert np.array_equal(stored[name], weight.astype(np.float16)), name


def test_the_settings_name_a_plain_llama_with_the_right_end_of_sequence(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    generation = json.loads((converted / "generation_config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["num_key_value_heads"], config["rms_norm_eps"]) == ("llama", 2, 1e-05)
    assert config["tie_word_embeddings"] is True
    assert (config["eos_token_id"], generation["eos_token_id"], generation["bos_token_id"]) == (2, 2, 1)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer_and_digits_stand_alone(converted: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert "12" not in encoded.tokens  # the merge exists, the splitter forbids it


def test_transformers_computes_the_same_from_both(gguf: Path, converted: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        for parameter in theirs.parameters():  # we store float16; after the same rounding nothing may differ
            parameter.copy_(parameter.half().float())
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n"
    assert (
        tokenizer(TEXTS[0])["input_ids"] == Tokenizer.from_file(str(converted / "tokenizer.json")).encode(TEXTS[0]).ids
    )


def test_a_truncated_file_is_refused_by_name(gguf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf.read_bytes()[: gguf.stat().st_size // 2])
    with pytest.raises(PrepareError, match=r"broken\.gguf cannot be read as a GGUF file"):
        convert_gguf(broken, tmp_path)


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(PrepareError, match=r"x\.gguf cannot be read as a GGUF file"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' cannot be converted; supported: llama"),
        ({"splitter": "qwen2"}, "pre-tokenizer 'qwen2' cannot be converted"),
    ],
)
def test_what_cannot_be_converted_faithfully_is_refused(tmp_path: Path, change: dict[str, str], complaint: str) -> None:
    write_gguf(tmp_path / "x.gguf", hf_weights(), **change)
    with pytest.raises(PrepareError, match=complaint):
        convert_gguf(tmp_path / "x.gguf", tmp_path)


def test_a_missing_tensor_is_noticed(tmp_path: Path) -> None:
    weights = hf_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    write_gguf(tmp_path / "x.gguf", weights)
    with pytest.raises(PrepareError, match="has 19 of the 20 tensors"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)


def test_a_weight_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    weights = hf_weights()
    weights["model.norm.weight"][3] = 1e5
    write_gguf(tmp_path / "x.gguf", weights)
    with pytest.raises(PrepareError, match="output_norm.weight holds 100000.0"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)
