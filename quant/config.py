"""Quantization settings of a GPTQ folder: `quantize_config.json` or the `quantization_config` of `config.json`.

Both places are read; where they disagree, `config.json` wins and the difference is reported in `notes`. Synonyms of
AutoGPTQ, GPTQModel and transformers are normalised. The tensors themselves have the last word (`quant.checkpoint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.errors import CheckpointError
from quant.safetensors_index import read_json

_SYNONYMS = {"w_bit": "bits", "q_group_size": "group_size", "act_order": "desc_act", "format": "checkpoint_format"}


@dataclass(frozen=True)
class QuantConfig:
    """`version` says how zero points are stored: 1 = minus one (AutoGPTQ), 2 = as they are (`gptq_v2`)."""

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    version: int = 1
    notes: tuple[str, ...] = ()


def read_quant_config(folder: Path) -> QuantConfig | None:
    """The settings, or None for a folder without any (a 16-bit model)."""
    notes: list[str] = []
    inner = None
    if (folder / "config.json").exists():
        inner = read_json(folder / "config.json").get("quantization_config")
    outer = read_json(folder / "quantize_config.json") if (folder / "quantize_config.json").exists() else None
    if inner is None and outer is None:
        return None
    if inner is not None and not isinstance(inner, dict):
        raise CheckpointError(f"{folder / 'config.json'}: quantization_config is not an object")
    merged = _normalise(outer or {})
    for key, value in _normalise(inner or {}).items():
        if merged.get(key, value) != value:
            notes.append(f"{key} is {value} in config.json and {merged[key]} in quantize_config.json; config.json wins")
        merged[key] = value
    return _build(folder, merged, tuple(notes))


def _normalise(raw: dict[str, Any]) -> dict[str, Any]:
    return {_SYNONYMS.get(key, key): value for key, value in raw.items()}


def _build(folder: Path, raw: dict[str, Any], notes: tuple[str, ...]) -> QuantConfig:
    method = str(raw.get("quant_method", "gptq")).lower()
    if method != "gptq":
        raise CheckpointError(f"{folder}: quant_method '{method}' is not supported; GPTQ checkpoints are")
    bits, group_size = raw.get("bits", 4), raw.get("group_size", 128)
    if bits not in (2, 3, 4, 8):
        raise CheckpointError(f"{folder}: bits {bits!r} in the quantization settings; 2, 3, 4 and 8 exist")
    if bits != 4:
        raise CheckpointError(f"{folder}: a {bits}-bit checkpoint; only 4-bit GPTQ runs today, take a 4-bit version")
    if not isinstance(group_size, int) or (group_size != -1 and not 1 <= group_size <= 2**20):
        raise CheckpointError(f"{folder}: group_size {group_size!r} in the quantization settings is not -1 or positive")
    layout = str(raw.get("checkpoint_format", "gptq")).lower()
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"{folder}: checkpoint_format '{layout}' is not supported; gptq and gptq_v2 are")
    sym = bool(raw.get("sym", True))
    if layout == "gptq" and not sym:
        notes += ("asymmetric zero points in version 1 format: read as stored + 1, 15 meaning 16",)
    return QuantConfig(
        bits=bits,
        group_size=group_size,
        desc_act=bool(raw.get("desc_act", False)),
        sym=sym,
        version=2 if layout == "gptq_v2" else 1,
        notes=notes,
    )
