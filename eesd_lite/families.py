"""The model families that the engine computes, each as its differences from Llama, and what is refused.

One forward pass serves them all: a family only says which values of `ModelConfig` follow from its name and which keys
of config.json it honours. A key that would change the arithmetic and that nobody here reads is refused by name, never
passed over in silence. Called by `eesd_lite.config`. Plain Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eesd_lite.errors import ModelError

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
BIAS_KEYS = {"attention_bias": ATTENTION_PROJECTIONS, "mlp_bias": MLP_PROJECTIONS}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model_type means; the defaults are Llama's, and absent keys mean what transformers takes them to mean."""

    biases: tuple[str, ...] = ()  # projections that have one whatever config.json says
    bias_keys: tuple[str, ...] = ()  # keys of config.json that give biases to the projections in BIAS_KEYS
    qk_norm: bool = False  # an RMSNorm over every head of the queries and of the keys, before they are rotated
    window: Literal["never", "always", "by layer"] = "never"  # which layers sliding_window is for
    rope_by_layer: bool = False  # no_rope_layers names layers whose queries and keys are not rotated
    head_dim: int | None = None  # where head_dim is absent; None: hidden_size / num_attention_heads
    sliding_window: int | None = None  # where sliding_window is absent
    rope_theta: float = 10000.0
    tied: bool = False


FAMILIES = {
    "llama": Family(bias_keys=("attention_bias", "mlp_bias")),  # CodeLlama, Vicuna, SmolLM, SmolLM2 too
    "mistral": Family(window="always", sliding_window=4096),
    "qwen2": Family(biases=("q_proj", "k_proj", "v_proj"), window="by layer", sliding_window=4096),  # Qwen2.5 too
    "qwen3": Family(
        bias_keys=("attention_bias",), qk_norm=True, head_dim=128, window="by layer", sliding_window=4096
    ),
    "smollm3": Family(
        bias_keys=("attention_bias", "mlp_bias"), window="by layer", rope_by_layer=True, rope_theta=2e6, tied=True
    ),
}  # fmt: skip

# Keys of other families that change what a layer computes, and the values at which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "dim_model_base": (),
    "use_bias": (),
    "parallel_attn": (),
    "use_parallel_residual": (),
    "add_cross_attention": (),
    "is_encoder_decoder": (),
    "use_bidirectional_attention": (),
    "block_configs": (),
    "pruned_heads": (),
}
# A net for keys that nobody has thought of yet. What `eesd_lite.config` reads itself is not caught in it.
_SUSPECT = re.compile(
    r"softcap|multiplier|alibi|expert|moe|lora_|rotary|rope|yarn|clip_|mup|qkv_?bias|(qk|query|key)_?(layer_?)?norm"
    r"|(sliding|local|global|attn|attention)_?window|(attn|attention)_(sink|temperature|scale|chunk)|logits?_scal"
    r"|(scale|normali[sz]e)_(emb|depth)|(emb\w*|residual)_scal|norm_type|cross_attention_layers"
)
_READ = {
    "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
}  # fmt: skip


def family_of(model_type: str, file: object) -> Family:
    """The family of `model_type`; ModelError with the list of those that exist for any other."""
    if model_type not in FAMILIES:
        raise ModelError(
            f"{file}: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)} "
            "(CodeLlama, Vicuna and SmolLM are llama, Qwen2.5 is qwen2)"
        )
    return FAMILIES[model_type]


def refuse_foreign_arithmetic(values: Mapping[str, Any], model_type: str, file: object) -> None:
    """ModelError that names the first key of config.json which asks for arithmetic that the forward does not have."""
    family = FAMILIES[model_type]
    for key, value in values.items():
        neutral: tuple[object, ...] = ()
        if key in _NEUTRAL:
            neutral = _NEUTRAL[key]
        elif key in ("no_rope_layers", "no_rope_layer_interval"):
            if family.rope_by_layer or (isinstance(value, list) and all(flag == 1 for flag in value)):
                continue
        elif key in BIAS_KEYS:
            if key in family.bias_keys or (key == "attention_bias" and family.biases):
                continue
        elif key in _READ or _SUSPECT.search(key.lower()) is None:
            continue
        else:
            neutral = (0, 1, "", "none")
        # True equals 1 in Python, but a switch that is on is no multiplier of one.
        if value is None or value is False or (value is not True and value in ([], {}, *neutral)):
            continue
        helps = " or ".join(repr(one) for one in _NEUTRAL.get(key, ()))
        hint = f"; supported: {helps}" if helps else ""
        raise ModelError(f"{file}: {key} {value!r} is not supported for model_type {model_type}{hint}")
    _check_architecture(values, file)


def _check_architecture(values: Mapping[str, Any], file: object) -> None:
    """A model that does not end in an lm_head, or that brings its own code, is not the family it claims to be."""
    names = values.get("architectures")
    if names is None or names == []:
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{file}: architectures must be a list of names, not {names!r}")
    causal = [name.lower() for name in names if name.lower().endswith("forcausallm")]
    if not causal:
        raise ModelError(f"{file}: architectures {names!r} is not supported; only language models (...ForCausalLM) are")
    if "auto_map" in values and not any(name.removesuffix("forcausallm") in FAMILIES for name in causal):
        raise ModelError(
            f"{file}: architectures {names!r} is computed by code that comes with it (auto_map), which is not run; "
            f"supported are {', '.join(FAMILIES)} as transformers computes them"
        )
