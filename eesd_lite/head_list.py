"""Which exit heads there are for a model, without loading any: from the recipe, EESD_HOME and the model's folder.

Reads a file's header only, and no torch: for whoever lists heads (`eesd inspect`, `eesd plan`) as well as for
`head_choice`, which picks one.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from eesd_lite.home import home
from eesd_lite.prepare import ModelSource

FORMAT = "eesd-head-1"
HEADS_FOLDER = "eesd_heads"  # beside the weights of a model folder
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
        for path in sorted(folder.glob("*.safetensors")) if _is_there(folder) else []:
            exit_layer = read_exit_layer(path)
            if exit_layer is not None:
                found[exit_layer] = path
    return found


def _is_there(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except PermissionError:  # EESD_HOME inside somebody else's folder: no heads; whoever writes there is told
        return False


def read_exit_layer(path: Path) -> int | None:
    """The exit layer a file is for, or None when it is no head file."""
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length)) if length <= _LONGEST_HEADER else {}
        metadata = header["__metadata__"]
        return int(metadata["exit_layer"]) if metadata.get("format") == FORMAT else None
    except (OSError, struct.error, KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None
