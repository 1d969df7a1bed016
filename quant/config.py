"""Quantization settings of a GPTQ folder: `quantize_config.json` or the `quantization_config` of `config.json`.

Both places are read; where they disagree, `config.json` wins and the difference is reported in `notes`. Synonyms of
AutoGPTQ, GPTQModel and transformers are normalised. The tensors themselves have the last word (`quant.gptq_module`):
settings say what the tensors cannot, and what they say wrongly is named. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.block_module import refuse_eight_bit
from quant.errors import CheckpointError, shown
from quant.overrides import Overrides, read_overrides
from quant.safetensors_index import read_json

BITS = (2, 3, 4, 8)
_SYNONYMS = {
    "w_bit": "bits", "wbits": "bits", "q_group_size": "group_size", "groupsize": "group_size",
    "act_order": "desc_act", "actorder": "desc_act", "format": "checkpoint_format", "method": "quant_method",
}  # fmt: skip
# What helps whoever arrives with another kind of file; a method that is not listed gets the first part only.
_OTHER_METHODS = {
    "awq": "AWQ packs its words differently",
    "exl2": "an ExLlama format", "exl3": "an ExLlama format", "aqlm": "additive codebooks", "quip": "codebooks",
    "hqq": "half-quadratic quantization", "eetq": "8-bit EETQ", "fp8": "8-bit floats", "fbgemm_fp8": "8-bit floats",
    "compressed-tensors": "the format of llm-compressor", "torchao": "torchao tensors", "mxfp4": "4-bit floats",
}  # fmt: skip
_OTHER_LAYOUTS = {
    "marlin": "repacked for one GPU kernel", "bitblas": "repacked for one GPU kernel",
    "qqq": "repacked for 8-bit inputs",
}  # fmt: skip
_INSTEAD = "take a GPTQ version (checkpoint_format gptq or gptq_v2), or the 16-bit model and `eesd quantize`"


@dataclass(frozen=True)
class QuantConfig:
    """`version` is the claim about zero points: 1 = stored minus one (AutoGPTQ), 2 = as they are (`gptq_v2`).

    `whole_words`: GPTQModel took one off whole words of asymmetric zero points, so that a 0 borrows from its neighbour.
    `stated` are the keys that the files really have; the rest are defaults. `base_name` is the weight file that
    AutoGPTQ says it wrote.
    """

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    version: int = 1
    static_groups: bool = False
    whole_words: bool = False
    overrides: Overrides = Overrides()
    stated: frozenset[str] = frozenset()
    base_name: str | None = None
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
        if key in merged and merged[key] != value and key in _DECIDING:
            theirs, ours = shown(merged[key], 40), shown(value, 40)
            notes.append(f"{key} is {ours} in config.json and {theirs} in quantize_config.json; config.json wins")
        merged[key] = value
    if merged.get("quant_method") == "bitsandbytes":
        refuse_eight_bit(folder, merged, {})
        return None  # every tensor says what it is; the rest of these settings is about computing
    return _build(folder, merged, notes)


_DECIDING = ("bits", "group_size", "desc_act", "sym", "checkpoint_format", "quant_method", "static_groups", "dynamic")


def _normalise(raw: dict[str, Any]) -> dict[str, Any]:
    """Keys by the names that we use; null is the same as not there."""
    return {_SYNONYMS.get(key, key): value for key, value in raw.items() if value is not None}


def _build(folder: Path, raw: dict[str, Any], notes: list[str]) -> QuantConfig:
    _refuse_other_kinds(folder, raw)
    layout = raw.get("checkpoint_format", "gptq").lower()
    sym, desc_act = _flag(folder, raw, "sym", True), _flag(folder, raw, "desc_act", False)
    whole_words = layout == "gptq" and not sym and _by_gptqmodel(raw)
    if layout == "gptq" and not sym and not whole_words:
        notes.append("asymmetric zero points in version 1 format: read as stored + 1, 15 meaning 16")
    if raw.get("adapter"):
        notes.append("the settings name an adapter (LoRA), which is not applied")
    base_name = raw.get("model_file_base_name")
    return QuantConfig(
        bits=_bits(folder, raw.get("bits", 4)),
        group_size=_group_size(folder, raw.get("group_size", 128)),
        desc_act=desc_act,
        sym=sym,
        version=2 if layout == "gptq_v2" else 1,
        static_groups=_flag(folder, raw, "static_groups", False),
        whole_words=whole_words,
        overrides=read_overrides(raw, notes),
        stated=frozenset(raw),
        base_name=base_name if isinstance(base_name, str) and base_name else None,
        notes=tuple(notes),
    )


def _by_gptqmodel(raw: dict[str, Any]) -> bool:
    """Whether GPTQModel signed the settings: `meta.quantizer` is "gptqmodel:7.7.0", or a list with such an entry."""
    meta = raw.get("meta")
    signed = meta.get("quantizer") if isinstance(meta, dict) else None
    names = signed if isinstance(signed, list) else [signed]
    return any(isinstance(name, str) and name.lower().startswith("gptqmodel:") for name in names)


def _refuse_other_kinds(folder: Path, raw: dict[str, Any]) -> None:
    """Files that are not GPTQ, or GPTQ in an order that only one kernel reads, each by its name."""
    method = raw.get("quant_method", "gptq")
    if not isinstance(method, str) or method.lower() not in ("gptq", "gptqmodel"):
        name = shown(method, 40)
        known = _OTHER_METHODS.get(name.lower())
        raise CheckpointError(
            f"{folder}: quant_method '{name}' is not supported{f' ({known})' if known else ''}; {_INSTEAD}"
        )
    layout = raw.get("checkpoint_format", "gptq")
    if raw.get("is_marlin_format") is True and layout == "gptq":
        layout = "marlin"
    if not isinstance(layout, str) or layout.lower() not in ("gptq", "gptq_v2"):
        name = shown(layout, 40)
        known = _OTHER_LAYOUTS.get(name.lower())
        raise CheckpointError(
            f"{folder}: checkpoint_format '{name}' is not supported{f' ({known})' if known else ''}; {_INSTEAD}"
        )
    words = raw.get("pack_dtype", "int32")
    if words not in ("int32", "torch.int32"):
        raise CheckpointError(f"{folder}: pack_dtype '{shown(words, 40)}' is not supported, int32 is; {_INSTEAD}")


def _bits(folder: Path, bits: Any) -> int:
    if isinstance(bits, bool) or bits not in BITS or not isinstance(bits, int):
        raise CheckpointError(
            f"{folder}: bits {shown(repr(bits), 40)} in the quantization settings; 2, 3, 4 and 8 exist"
        )
    return bits


def _group_size(folder: Path, group_size: Any) -> int:
    whole = isinstance(group_size, int) and not isinstance(group_size, bool)
    if not whole or (group_size != -1 and not 1 <= group_size <= 2**20):
        raise CheckpointError(
            f"{folder}: group_size {shown(repr(group_size), 40)} in the quantization settings is not -1 or positive"
        )
    return int(group_size)


def _flag(folder: Path, raw: dict[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{folder}: {key} {shown(repr(value), 40)} in the quantization settings is not true or false"
        )
    return value
