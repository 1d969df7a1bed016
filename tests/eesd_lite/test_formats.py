"""Every format that is read, end to end: logits against transformers on the same weights, and drafting without a trace.

The weights come from the independent packer (`tests.numpy_gptq`), in exact form beside the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from eesd_lite import SamplingParams
from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from tests.puppets import ids_of
from tests.tiny import Tiny, TinySpec

PROMPT = list(b"Any real checkpoint")
VARIANTS = {
    "4 bits, v1": TinySpec(seed=11),
    "4 bits, v2, asymmetric": TinySpec(seed=12, sym=False, version=2),
    "4 bits, v1, asymmetric": TinySpec(seed=13, sym=False),
    "act-order": TinySpec(seed=14, desc_act=True),
    "one group": TinySpec(seed=15, group=-1),
    "one group and act-order": TinySpec(seed=16, group=-1, desc_act=True),
    "2 bits": TinySpec(seed=17, bits=2),
    "3 bits": TinySpec(seed=18, bits=3, sym=False, version=2),
    "8 bits": TinySpec(seed=19, bits=8, group=64, inner=128),
    "quantized lm_head": TinySpec(seed=20, quantized_lm_head=True),
    "partial groups": TinySpec(seed=21, inner=72),
    "mixed modules": TinySpec(
        seed=22,
        modules={
            "0.mlp.gate_proj": {"bits": 8, "group": 64},
            "1.self_attn.q_proj": {"group": 64},
            "1.self_attn.k_proj": {"desc_act": True},
            **{f"2.{name}": None for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
            "2.mlp.down_proj": None,
            "3.mlp.up_proj": {"bits": 3, "group": -1},
        },
    ),
}
SPECS = [pytest.param(spec, id=name) for name, spec in VARIANTS.items()]


@pytest.fixture(scope="module")
def reference_of(tiny_of: Callable[[TinySpec], Tiny]) -> Iterator[Callable[[TinySpec], LlamaForCausalLM]]:
    """transformers on the exact weights, in float32."""

    def get(spec: TinySpec) -> LlamaForCausalLM:
        tiny = tiny_of(spec)
        raw = json.loads((tiny.folder / "config.json").read_text())
        config = AutoConfig.for_model(
            **{k: v for k, v in raw.items() if k not in ("quantization_config", "torch_dtype")}
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to_empty(device="cpu").float()
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        missing, unexpected = model.load_state_dict(tiny.weights, strict=False)
        assert not unexpected and not [name for name in missing if "inv_freq" not in name]
        return model.eval()

    yield get


@pytest.mark.parametrize("spec", SPECS)
def test_logits_are_those_of_transformers_on_the_dequantized_weights(
    tiny_of: Callable[[TinySpec], Tiny], reference_of: Callable[[TinySpec], LlamaForCausalLM], spec: TinySpec
) -> None:
    with tiny_of(spec).engine(dtype="float32") as engine, torch.inference_mode():
        target, rows = engine.target, Rows.chain(0, len(PROMPT))
        ours = target.logits(target.upper(target.lower(target.embed(PROMPT), rows), rows))
        theirs = reference_of(spec)(torch.tensor([PROMPT])).logits[0]
    assert float((ours - theirs).norm() / theirs.norm()) <= 1e-5


@pytest.mark.parametrize("spec", SPECS)
def test_plain_and_drafted_ids_are_the_same_in_every_format(engine_of: Callable[..., Engine], spec: TinySpec) -> None:
    engine = engine_of(spec, head="random", exit_layer=2, resident_layers=2)
    for settings in ({}, {"temperature": 0.9, "seed": 7}):
        params = SamplingParams(max_new_tokens=16, ignore_eos=True, **settings)
        engine.set_controller("off")
        expected = ids_of(engine, PROMPT, params)
        assert len(expected) == 16
        for controller in ("fixed:3", "calibrated"):
            engine.set_controller(controller)
            assert ids_of(engine, PROMPT, params) == expected, controller
