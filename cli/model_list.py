"""Which models there are: prepared ones, folders here, the Hub's cache, and those that can be fetched by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

from eesd_lite.home import home
from eesd_lite.units import format_size
from models import RECIPES


def model_lines() -> list[str]:
    """What `eesd-chat` without MODEL shows."""
    rows = [(name, f"{recipe.title}, {_state(name)}") for name, recipe in sorted(RECIPES.items())]
    rows += [(name, "in the Hub's cache") for name in _hub_models()]
    rows += [(f"./{path.name}", "a folder here") for path in _folders_here()]
    width = max(len(name) for name, _ in rows)
    return [
        "models:",
        *(f"  {name:{width}}  {what}" for name, what in rows),
        "start one with its name: eesd-chat " + rows[0][0],
        "any folder with a 4-bit GPTQ model works too, and a Hub name such as owner/model, which is downloaded",
    ]


def model_names() -> list[str]:
    """Names for completion."""
    return [*sorted(RECIPES), *_hub_models(), *(f"./{path.name}" for path in _folders_here())]


def _state(name: str) -> str:
    recipe = RECIPES[name]
    if (home() / "models" / name / "config.json").is_file():
        return "ready"
    size = f"{format_size(recipe.origin.download_bytes)} to download, then some minutes of work"
    return f"not here yet: {size}, once; or eesd fetch {name}"


def _hub_models() -> list[str]:
    """GPTQ models in huggingface_hub's cache; its layout is models--owner--name/snapshots/revision/."""
    base = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or base / "hub")
    found = []
    for folder in sorted(cache.glob("models--*--*")) if cache.is_dir() else []:
        if any(_is_gptq(snapshot) for snapshot in folder.glob("snapshots/*")):
            found.append(folder.name.removeprefix("models--").replace("--", "/", 1))
    return found


def _folders_here() -> list[Path]:
    try:
        return sorted(path for path in Path.cwd().iterdir() if path.is_dir() and _is_gptq(path))
    except OSError:
        return []


def _is_gptq(folder: Path) -> bool:
    if (folder / "quantize_config.json").is_file():
        return True
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and isinstance(config.get("quantization_config"), dict)
