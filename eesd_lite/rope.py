"""Rotary position tables, computed once for the whole planned context.

Cosines and sines stay float32 whatever the compute dtype; the arithmetic follows transformers step by step, so that
the tables are equal to its own. Known: no scaling, `linear`, `llama3`, and `dynamic` within the original context, where
it changes nothing. Beyond it, `dynamic` makes the keys of earlier positions depend on the later length, which no cache
that is filled once can follow (transformers' own cache does not either: its logits depend on how a text was cut): such
lengths are refused.
"""

from __future__ import annotations

import math

import torch

from eesd_lite.config import ModelConfig, RopeScaling
from eesd_lite.errors import ModelError
from eesd_lite.ops import Reach, Rope


def layer_reaches(
    config: ModelConfig, length: int, device: torch.device | str = "cpu", *, slack: int = 0
) -> tuple[Reach, ...]:
    """One Reach for every layer, for positions 0..length-1; tables of `slack` more, for drafts that go beyond.

    Layers share tables. A layer that does not rotate has a table that turns nothing, so no kernel knows of it.
    """
    config.check_length(length)
    rope = rope_tables(config, length + slack, device)
    still = rope
    if config.unrotated_layers:
        still = torch.ones_like(rope[0]), torch.zeros_like(rope[1])
    return tuple(
        Reach(still if index in config.unrotated_layers else rope, config.window_of(index))
        for index in range(config.num_hidden_layers)
    )


def on_device(reaches: tuple[Reach, ...], device: torch.device | str) -> tuple[Reach, ...]:
    """The same on another device, shared tables still shared."""
    moved = {id(reach.rope): (reach.rope[0].to(device), reach.rope[1].to(device)) for reach in reaches}
    return tuple(Reach(moved[id(reach.rope)], reach.window) for reach in reaches)


def rope_tables(config: ModelConfig, length: int, device: torch.device | str = "cpu") -> Rope:
    """(cos, sin), each [length, head_dim / 2] float32, for positions 0..length-1."""
    if config.head_dim % 2:
        raise ModelError(f"head_dim is {config.head_dim}; the rotary embedding needs an even one")
    # Always computed on the CPU: another device's pow and cos may differ in the last bit.
    frequencies = _inverse_frequencies(config)
    angles = torch.arange(length, dtype=torch.int64).float()[:, None] * frequencies
    return angles.cos().to(device), angles.sin().to(device)


def _inverse_frequencies(config: ModelConfig) -> torch.Tensor:  # [head_dim / 2] float32
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type in ("default", "dynamic"):
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling, scaling.original_max_position_embeddings or config.max_position_embeddings)
    raise ModelError(
        f"rope_scaling type '{scaling.rope_type}' is not supported (default, linear, dynamic and llama3 are); "
        "remove rope_scaling from config.json to run within the model's original context"
    )


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling, original: int) -> torch.Tensor:
    """Long waves (beside the `original` context) are stretched by `factor`, short ones kept, others interpolated."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not 0 < low < high:
        raise ModelError(
            f"rope_scaling in config.json: low_freq_factor {low} must lie between 0 and high_freq_factor {high}"
        )
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    is_between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(is_between, between, stretched)
