"""Say which file is in the way when another package named cli, models or quant is found before ours.

The owner of this project fixed these short top-level names, and other programs use them too. `entry` calls `check`
before anything of ours by those names is imported; `eesd_lite.__getattr__` does for people who import the engine.
Imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

OURS = ("cli", "models", "quant")


def find_shadow(names: tuple[str, ...] = OURS) -> str | None:
    """One line about the first package that is missing or not the one next to `eesd_lite`; None when all are ours."""
    root = Path(__file__).resolve().parent.parent
    for name in names:
        place = _place(name)
        if place is None:
            return f"the package {name!r} of eesd-lite is missing from {root}; install eesd-lite again"
        if place.resolve() not in (root / name, root / name / "__init__.py"):
            return (
                f"{place} hides the package {name!r} of eesd-lite in {root}; start from another folder, take it off "
                "PYTHONPATH, or install eesd-lite in a virtual environment of its own"
            )
    return None


def _place(name: str) -> Path | None:
    """The file or folder that `import name` would use, found without running it."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        spec: importlib.machinery.ModuleSpec | None = getattr(loaded, "__spec__", None)
    else:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
    if spec is None:
        return None
    if spec.origin not in (None, "built-in", "frozen", "namespace"):
        return Path(spec.origin)
    folders = list(spec.submodule_search_locations or [])
    return Path(folders[0]) if folders else None
