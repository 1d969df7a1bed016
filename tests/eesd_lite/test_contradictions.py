"""Folders that say something twice and differently: refused, or named in a notice; and files around the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eesd_lite.errors import ModelError
from tests.eesd_lite.test_loader import change
from tests.tiny import Tiny, TinySpec, build


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return build(tmp_path / "model", TinySpec(layers=2))


def notices(tiny: Tiny) -> str:
    with tiny.engine() as engine:
        return "; ".join(engine.notices)


def test_a_tied_lm_head_that_is_stored_with_other_values_is_refused(tmp_path: Path) -> None:
    tiny = build(tmp_path / "model", TinySpec(layers=2, tied=True))
    copy = load_file(tiny.folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    change(tiny, {"lm_head.weight": 2 * copy})
    with pytest.raises(ModelError, match="ties lm_head .* 'lm_head.weight' is stored with other values; set tie_word"):
        tiny.engine()
    change(tiny, {"lm_head.weight": copy})
    tiny.engine().close()


def test_biases_that_config_json_does_not_have_are_added_and_named_unless_they_are_zero(tiny: Tiny) -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    size = tiny.spec.size("inner")
    change(tiny, {name: torch.zeros(size, dtype=torch.float16)})
    assert "bias" not in notices(tiny)
    change(tiny, {name: torch.ones(size, dtype=torch.float16)})
    assert "biases of mlp.up_proj are stored, not all zero, though config.json has none there" in notices(tiny)


def test_a_module_that_is_stored_twice_is_named(tiny: Tiny) -> None:
    weight = torch.zeros(tiny.spec.size("inner"), tiny.spec.size("hidden"), dtype=torch.float16)
    change(tiny, {"model.layers.1.mlp.up_proj.weight": weight})
    assert "'model.layers.1.mlp.up_proj': stored in 16 bit and quantized; the quantized one is used" in notices(tiny)


@pytest.mark.parametrize("other", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}])
def test_two_tables_for_the_rope_are_refused_unless_they_are_one(tiny: Tiny, other: dict[str, Any]) -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    change(tiny, rope_parameters=plain, rope_scaling=other)
    with pytest.raises(ModelError, match="rope_parameters .* and rope_scaling .* contradict each other"):
        tiny.engine()
    change(tiny, rope_parameters=plain, rope_scaling=plain)
    tiny.engine().close()


@pytest.mark.parametrize(
    "listed",
    [
        [], "x", 3, {"a": {"content": "<x>"}}, {"300": None}, {"300": {}}, {"300": "x"}, {"300": {"content": ["x"]}},
        {"9" * 5000: {"content": "x"}}, {"-1": {"content": "x"}}, {"300": {"content": ""}},
    ],
)  # fmt: skip
def test_added_tokens_of_another_form_are_one_line(tiny: Tiny, listed: Any) -> None:
    path = tiny.folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": listed}))
    with pytest.raises(ModelError, match="added_tokens_decoder is damaged") as caught:
        tiny.engine()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe{", b"{"])
def test_files_beside_the_weights_that_are_not_json_are_named(tiny: Tiny, name: str, content: bytes) -> None:
    path = tiny.folder / "tokenizer_config.json"
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}
    path.write_text(json.dumps(kept))
    (tiny.folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        tiny.engine()


@pytest.mark.parametrize("content", ["[]", "3", "null", json.dumps({"chat_template": [{"name": {"a": 1}}]})])
def test_a_template_file_without_a_template_is_no_template(tiny: Tiny, content: str) -> None:
    path = tiny.folder / "tokenizer_config.json"
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}
    path.write_text(json.dumps(kept))
    (tiny.folder / "chat_template.json").write_text(content)
    with tiny.engine() as engine:
        assert engine.text.render_chat([{"role": "user", "content": "hi"}])


def test_a_tokenizer_that_cannot_encode_is_said_while_loading(tiny: Tiny) -> None:
    path = tiny.folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"] = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "<gone>"}
    path.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="cannot encode text|not a readable tokenizer"):
        tiny.engine()
