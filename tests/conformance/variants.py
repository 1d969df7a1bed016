"""Which checkpoints each peer is asked to make: the matrix, and cases beside it. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One fixture. `version` 2 is the `gptq_v2` format; `extra` holds settings that only one peer knows."""

    tool: str
    family: str = "llama"
    bits: int = 4
    group_size: int = 32
    desc_act: bool = False
    sym: bool = True
    version: int = 1
    static_groups: bool = False
    label: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        group = "all" if self.group_size == -1 else str(self.group_size)
        parts = [self.tool, self.family, f"{self.bits}bit", f"g{group}", "sym" if self.sym else "asym"]
        parts += ["act"] if self.desc_act else []
        parts += ["static"] if self.static_groups else []
        parts += [f"v{self.version}", *([self.label] if self.label else [])]
        return "-".join(parts)


# Overrides of GPTQModel by regular expression: other bits and group, another group, and a module left in 16 bit.
DYNAMIC = {
    r"+:.*\.0\.mlp\.gate_proj": {"bits": 8, "group_size": 64},
    r"+:.*\.1\.mlp\.down_proj": {"group_size": 64},
    r"-:.*\.1\.self_attn\.o_proj": {},
}


def _matrix(tool: str, versions: tuple[int, ...]) -> list[Variant]:
    return [
        Variant(tool=tool, group_size=group, desc_act=act, sym=sym, version=version)
        for version, group, act, sym in product(versions, (32, 128, -1), (False, True), (True, False))
    ]


def autogptq() -> list[Variant]:
    """AutoGPTQ 0.7.1 writes version 1 only."""
    tool = "autogptq"
    found = _matrix(tool, (1,))
    found += [
        Variant(tool=tool, group_size=group, desc_act=act, sym=sym, static_groups=True)
        for group, act, sym in product((32, 128), (False, True), (True, False))
    ]
    found += [
        Variant(tool=tool, bits=bits, desc_act=act, sym=sym)
        for bits, (act, sym) in product((2, 3, 8), ((False, True), (True, False)))
    ]
    found += [Variant(tool=tool, family=family, desc_act=True) for family in ("qwen2", "mistral")]
    found += [
        Variant(tool=tool, label="pickle", extra={"use_safetensors": False}),
        Variant(tool=tool, desc_act=True, label="float32-scales", extra={"source_dtype": "float32"}),
        Variant(tool=tool, sym=False, desc_act=True, label="zero-point-0", extra={"positive_row": True}),
    ]
    return found


def gptqmodel() -> list[Variant]:
    """GPTQModel writes both versions."""
    tool = "gptqmodel"
    found = _matrix(tool, (1, 2))
    found += [
        Variant(tool=tool, desc_act=act, sym=sym, version=2, static_groups=True)
        for act, sym in product((False, True), (True, False))
    ]
    found += [
        Variant(tool=tool, bits=bits, desc_act=act, sym=sym, version=2)
        for bits, (act, sym) in product((2, 3, 8), ((False, True), (True, False)))
    ]
    found += [Variant(tool=tool, family=family, desc_act=True) for family in ("qwen2", "qwen3", "mistral")]
    found += [
        Variant(tool=tool, label="shards", extra={"max_shard_size": "30KB"}),
        Variant(tool=tool, version=2, label="lm-head", extra={"settings": {"lm_head": True}}),
        Variant(tool=tool, version=2, label="dynamic", extra={"settings": {"dynamic": DYNAMIC}}),
        Variant(tool=tool, label="group-aware", extra={"settings": {"act_group_aware": True}}),  # its default
        Variant(tool=tool, label="tied", extra={"tied": True}),
        Variant(tool=tool, family="qwen2", label="tied", extra={"tied": True}),
        *(
            Variant(tool=tool, sym=False, version=version, label="zero-point-0", extra={"positive_row": True})
            for version in (1, 2)
        ),
    ]
    return found
