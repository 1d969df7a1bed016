"""Packed layers that a model folder brings along, as `eesd synth --packed` writes them: what their manifest says.

Plain Python, so that a folder can be inspected and planned without torch; `packed_store` reads the layers themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

PACKED_FOLDER = "eesd_packed"  # beside the weights
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PackedBeside:
    """`made_for` names format and kernels; `layers` holds the bytes of every layer."""

    folder: Path
    made_for: str
    layers: tuple[int, ...]


def made_for(form: int, kernels: str) -> str:
    """The one name of everything that decides whether packed bytes are of use."""
    return f"{kernels} (format {form})"


def packed_beside(folder: Path) -> PackedBeside | None:
    """The packed layers in a model folder, or None: no readable manifest."""
    place = folder / PACKED_FOLDER
    try:
        raw = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        sizes = tuple(int(layer["nbytes"]) for layer in raw["layers"])
        return PackedBeside(place, made_for(int(raw["format"]), str(raw["kernels"])), sizes)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
