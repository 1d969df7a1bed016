"""Which exit heads there are for a model, without loading any: from the recipe, EESD_HOME and the model's folder.

Reads a file's header only, and no torch: for whoever lists heads (`eesd inspect`, `eesd plan`) as well as for
`head_choice`, which picks one.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from eesd_lite.errors import HeadError
from eesd_lite.home import home
from eesd_lite.prepare import ModelSource

FORMAT = "eesd-head-1"
HEADS_FOLDER = "eesd_heads"  # beside the weights of a model folder
# Heads state their agreement on text that the model wrote from nothing. On answers to prompts a chain keeps less: 0.77
# and 0.83 of it at exits 10 and 20 in the recorded traces (docs/tau.md).
ON_ANSWERS = 0.8
_LONGEST_HEADER = 1 << 20  # a head has a dozen tensors


def heads_folder(model_name: str) -> Path:
    """Where heads that were made on this machine are kept for a model."""
    return home() / "heads" / model_name.replace("/", "--")


def available_heads(source: ModelSource) -> dict[int, Path]:
    """Heads that belong to a model, by exit layer: shipped ones, then those made here, then those in its folder."""
    found: dict[int, Path] = {}
    if source.recipe is not None:
        for shipped in source.recipe.heads:
            path = source.recipe.head(shipped.exit_layer)
            if path is not None:
                found[shipped.exit_layer] = path
    for folder in (heads_folder(source.name), source.folder / HEADS_FOLDER):
        found |= heads_in(folder)
    return found


def heads_in(folder: Path) -> dict[int, Path]:
    """The head files of a folder by exit layer; files of other kinds are passed over."""
    paths = sorted(folder.glob("*.safetensors")) if _is_there(folder) else []
    facts = [(read_head_facts(path), path) for path in paths]
    return {found.exit_layer: path for found, path in facts if found is not None}


def heads_at_hand(source: ModelSource, head: str | Path | None) -> dict[int, Path]:
    """By exit layer: the heads that belong to a model, or those of `head`, a file or a folder. HeadError names it."""
    if head is None:
        return available_heads(source)
    path = Path(head)
    if path.is_dir():
        found = heads_in(path)
        if not found:
            raise HeadError(f"{path}: no head files in this folder")
        return found
    facts = read_head_facts(path)
    if facts is None:
        raise HeadError(f"{path}: no such head file, or not one; --head takes a file or a folder of them")
    return {facts.exit_layer: path}


def expected_shares(heads: Mapping[int, Path]) -> dict[int, float | None]:
    """The share of its drafted tokens that each head's file lets expect to be kept; None where it says nothing."""
    facts = {exit_layer: read_head_facts(path) for exit_layer, path in heads.items()}
    return {exit_layer: None if found is None else _expected(found) for exit_layer, found in facts.items()}


def _expected(facts: HeadFacts) -> float | None:
    if facts.kept is not None or facts.agreement is None:
        return facts.kept
    return ON_ANSWERS * facts.agreement


def usual_exit(source: ModelSource, heads: Collection[int]) -> int:
    """Where a model drafts unless somebody says otherwise: as its recipe has it, else the deepest of `heads`."""
    default = source.recipe.default_exit_layer if source.recipe is not None else None
    return default if default is not None and default in heads else max(heads)


def _is_there(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except PermissionError:  # EESD_HOME inside somebody else's folder: no heads; whoever writes there is told
        return False


@dataclass(frozen=True)
class HeadFacts:
    """What a head file's header says."""

    exit_layer: int
    agreement: float | None  # share of held-out positions at which its first choice was the target's; None: not stated
    kept: float | None = None  # share of its drafted tokens that were kept on answers, once those before them were


def read_head_facts(path: Path) -> HeadFacts | None:
    """What a head file says of itself, or None when it is no head file."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length)) if length <= _LONGEST_HEADER else {}
        metadata = header["__metadata__"]
        if metadata.get("format") != FORMAT:
            return None
        return HeadFacts(
            int(metadata["exit_layer"]), _agreement(metadata.get("summary")), _kept(metadata.get("acceptance"))
        )
    except (OSError, struct.error, KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _agreement(summary: str | None) -> float | None:
    """A share, or None for whatever is not one."""
    try:
        stated = json.loads(summary or "{}").get("agreement")
    except (ValueError, AttributeError, RecursionError):
        return None
    sound = isinstance(stated, (int, float)) and not isinstance(stated, bool) and 0 <= stated <= 1
    return float(stated) if sound else None


def _kept(acceptance: str | None) -> float | None:
    """From the counts by confidence, at the lowest temperature; None where there are none that make sense."""
    try:
        counts = json.loads(acceptance or "{}")["temperatures"]
        lowest = counts[min(counts, key=float)]
        kept, judged = sum(map(float, lowest["kept"])), sum(map(float, lowest["judged"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return kept / judged if 0 <= kept <= judged and judged > 0 and math.isfinite(judged) else None
