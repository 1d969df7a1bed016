"""A usable exit head in about a minute: a copy of target layer N and a closed-form affine map, no training.

The target writes a little text first; the map is solved on its states. The head is kept in EESD_HOME/heads, where the
engine finds it the next time. Called by `eesd_lite.head_choice` for `--head instant`.
"""

from __future__ import annotations

from pathlib import Path

from eesd_lite.distill.run import TrainRequest, head_name, train_heads
from eesd_lite.head_list import heads_folder
from eesd_lite.home import atomic_dir, home, locked
from eesd_lite.prepare import ModelSource
from eesd_lite.progress import Progress, no_progress

INSTANT_TOKENS = 24_576


def make_instant_head(source: ModelSource, exit_layer: int, progress: Progress = no_progress) -> Path:
    """The head file for `exit_layer`, made now unless an earlier run left it."""
    path = heads_folder(source.name) / head_name(exit_layer)
    if path.exists():
        return path
    with locked(path, progress):
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_dir(
            home() / "work" / f"instant-{source.name.replace('/', '--')}-{exit_layer}", replace=True
        ) as work:
            request = TrainRequest(
                model=str(source.folder),
                exit_layers=(exit_layer,),
                out=work,
                tokens=INSTANT_TOKENS,
                instant=True,
                quantize=source.quantize,
                weights=source.weights,
            )
            train_heads(request, progress)
            (work / head_name(exit_layer)).replace(path)
    return path
