"""Per-module claims of the quantization settings: patterns with other bits or groups, modules that were left alone.

GPTQModel writes `dynamic` (a table of regular expressions, `-:` skips, `+:` or nothing overrides, the first match
counts), transformers and AutoGPTQ write lists. They only confirm what the tensors say, so whatever cannot be understood
becomes a note. Patterns are other people's: matching has a time limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from quant.errors import shown

MATCH_SECONDS = 0.5  # for all modules and patterns together; real ones need a few milliseconds
MAX_PATTERNS, MAX_PATTERN_LENGTH = 512, 400


@dataclass(frozen=True)
class Claim:
    """What the settings say of one module; None where they say nothing special."""

    quantized: bool = True
    bits: int | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class Overrides:
    """`rules` in order: (pattern, claim). `only` and `never` are pieces of module names, as the lists give them."""

    rules: tuple[tuple[str, Claim], ...] = ()
    only: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def claims(self, modules: Iterable[str]) -> tuple[dict[str, Claim], tuple[str, ...]]:
        """(what is claimed of each module, such as `model.layers.0.mlp.up_proj`; notes on patterns given up)."""
        deadline = time.process_time() + MATCH_SECONDS
        given_up: dict[str, None] = {}
        found = {}
        for module in modules:
            found[module] = self._by_lists(module)
            for pattern, claim in self.rules:
                if pattern not in given_up and _matches(pattern, module, deadline, given_up):
                    found[module] = claim
                    break
        names = [f"'{shown(pattern, 60)}'" for pattern in list(given_up)[:4]]
        note = f"patterns of dynamic that are not evaluated, so the tensors decide: {', '.join(names)}"
        return found, (note,) if names else ()

    def _by_lists(self, module: str) -> Claim:
        pieces = f".{module}."
        left_alone = any(f".{name}." in pieces for name in self.never)
        if self.only and ".layers." in pieces:
            left_alone |= not any(f".{name}." in pieces for name in self.only)
        return Claim(quantized=not left_alone)


def _matches(pattern: str, module: str, deadline: float, given_up: dict[str, None]) -> bool:
    """Whether a pattern matches from the start; one that does not answer in time, or is none, is given up."""
    left = deadline - time.process_time()
    try:
        return left > 0 and regex.match(pattern, module, timeout=min(left, MATCH_SECONDS / 10)) is not None
    except (TimeoutError, regex.error, RecursionError, OverflowError, MemoryError):
        given_up[pattern] = None
        return False


def read_overrides(raw: dict[str, Any], notes: list[str]) -> Overrides:
    """From the settings, by normalised keys; adds to `notes` what is not understood."""
    rules = _rules(raw.get("dynamic"), notes)
    only = _names(raw.get("modules_in_block_to_quantize"))
    never = [name for key in ("modules_to_not_convert", "ignored_layers") for name in _names(raw.get(key)) or ()]
    if only is None:
        notes.append("modules_in_block_to_quantize is not a list of module names: ignored, the tensors decide")
    return Overrides(tuple(rules), tuple(only or ()), tuple(never))


def _rules(dynamic: Any, notes: list[str]) -> list[tuple[str, Claim]]:
    if dynamic is None or dynamic is False:
        return []
    if not isinstance(dynamic, dict) or len(dynamic) > MAX_PATTERNS:
        notes.append("dynamic is not a table of patterns: ignored, the tensors decide")
        return []
    rules = []
    for key, values in dynamic.items():
        pattern = key[2:] if key.startswith(("+:", "-:")) else key
        if len(pattern) > MAX_PATTERN_LENGTH or not pattern.isprintable():
            notes.append(f"pattern '{shown(pattern, 60)}' of dynamic is not evaluated; the tensors decide")
        elif key.startswith("-:"):
            rules.append((pattern, Claim(quantized=False)))
        elif isinstance(values, dict):
            rules.append((pattern, Claim(bits=_whole(values.get("bits")), group_size=_whole(values.get("group_size")))))
        else:
            notes.append(f"dynamic gives no settings for '{shown(pattern, 60)}': ignored, the tensors decide")
    return rules


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= 2**20 else None


def _names(value: Any) -> Sequence[str] | None:
    """A list of names or of lists of names, flat; empty for none; None for anything else."""
    if value is None:
        return ()
    flat: list[str] = []
    for item in value if isinstance(value, list) else [value]:
        for name in item if isinstance(item, list) else [item]:
            if not isinstance(name, str):
                return None
            flat.append(name)
    return flat[:4096]
