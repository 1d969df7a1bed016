"""Tiny models of every family, and how far our float32 logits are from transformers'.

`python -m tests.families` prints the table of docs/families.md, one line per configuration: the worst relative error of
the logits over positions 0 to 600, read in one piece and token by token. The tests use the same models.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from tests.tiny import Tiny, TinySpec, build

LENGTH = 601  # positions 0 to 600
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def _spec(seed: int, model_type: str = "llama", **options: Any) -> TinySpec:
    return TinySpec(seed=seed, model_type=model_type, positions=640, **{"layers": 2, **options})


SPECS = {
    "Llama 1: as many key-value heads as heads": _spec(1, kv_heads=4),
    "Llama 2: grouped queries": _spec(2, kv_heads=1),
    "Llama 2: num_key_value_heads absent": _spec(3, kv_heads=4, config={"num_key_value_heads": None}),
    "Llama 3: llama3 rope": _spec(4, config={"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "Llama 3.2: llama3 rope, tied": _spec(5, tied=True, config={"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "Llama: linear rope": _spec(6, config={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "Llama: dynamic rope within its context": _spec(7, config={"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "Llama: attention_bias": _spec(8, bias="real"),
    "Llama: attention_bias and mlp_bias, act-order": _spec(
        9, bias="real", desc_act=True, config={"mlp_bias": True, "pretraining_tp": 2}
    ),
    "Llama: mlp_bias, one group": _spec(10, group=-1, config={"mlp_bias": True}),
    "CodeLlama: theta 1e6": _spec(11, kv_heads=4, config={"rope_theta": 1000000}),
    "SmolLM: tied, 3 heads to 1": _spec(12, heads=3, kv_heads=1, head_dim=32, hidden=96, tied=True),
    "Mistral: window of 48": _spec(13, "mistral", config={"sliding_window": 48}),
    "Mistral: window beyond the text": _spec(14, "mistral", config={"sliding_window": 4096}),
    "Mistral: no window, head_dim apart": _spec(15, "mistral", head_dim=32, config={"sliding_window": None}),
    "Qwen2: untied": _spec(16, "qwen2", config={"sliding_window": 32, "use_sliding_window": False}),
    "Qwen2.5: tied, theta 1e6": _spec(17, "qwen2", tied=True, config={"rope_theta": 1e6}),
    "Qwen2: window of 40 from layer 1 on": _spec(
        18, "qwen2", layers=3, config={"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    ),
    "Qwen3: head_dim apart": _spec(19, "qwen3", head_dim=32),
    "Qwen3: tied, theta 1e6": _spec(20, "qwen3", head_dim=32, kv_heads=4, tied=True, config={"rope_theta": 1e6}),
    "Qwen3: attention_bias, a window in layer 1": _spec(
        21, "qwen3", layers=3, bias="real",
        config={
            "use_sliding_window": True, "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "SmolLM3: layer 1 not rotated": _spec(
        22, "smollm3", layers=3, tied=True, config={"no_rope_layers": [1, 0, 1], "pad_token_id": None}
    ),
    "SmolLM3: no_rope_layer_interval, window": _spec(
        23, "smollm3", layers=3,
        config={
            "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 56, "mlp_bias": True,
            "pad_token_id": None,
        },
    ),
}  # fmt: skip


def text(length: int = LENGTH) -> list[int]:
    return [(13 * n * n + 7) % 250 for n in range(length)]


def reference(tiny: Tiny) -> Any:
    """transformers' own model of the family with the exact weights of `tiny`: float32, eager attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tiny.folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(tiny.weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tiny.spec.tied else set()), (missing, unexpected)
    return model


@torch.inference_mode()
def reference_logits(tiny: Tiny, ids: list[int]) -> Tensor:
    found: Tensor = reference(tiny)(torch.tensor([ids])).logits[0]
    return found


@torch.inference_mode()
def prefill(engine: Engine, ids: list[int], start: int = 0) -> Tensor:
    """Logits of all rows of one call, [tokens, vocab]; the cache holds what came before `start`."""
    target, rows = engine.target, Rows.chain(start, len(ids))
    return target.logits(target.upper(target.lower(target.embed(ids), rows), rows))


def step_by_step(engine: Engine, ids: list[int], start: int = 0) -> Tensor:
    return torch.cat([prefill(engine, [token], start + place) for place, token in enumerate(ids)])


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """One for each position."""
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


def main() -> None:
    torch.set_num_threads(1)
    ids = text()
    print(f"| configuration | model_type | prefill of {LENGTH} | {LENGTH} single steps |\n|---|---|---|---|")
    for name, spec in SPECS.items():
        with tempfile.TemporaryDirectory() as folder:
            tiny = build(Path(folder) / "model", spec)
            expected = reference_logits(tiny, ids)
            with tiny.engine(dtype="float32", context=LENGTH + 7) as engine:
                errors = [
                    float(relative_errors(found(engine, ids), expected).max()) for found in (prefill, step_by_step)
                ]
        print(f"| {name} | {spec.model_type} | {errors[0]:.1e} | {errors[1]:.1e} |", flush=True)


if __name__ == "__main__":
    main()
