"""A folder for the scripted chat, and ways to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.eesd_lite.tiny_tokenizers import CHATML, byte_level

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds; everything here ends in a second or two, on a machine that is not busy


class Scripted:
    """One scripted model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [sys.executable, "-m", "tests.cli.scripted_chat", str(folder)]

    def script(self, template: str | None = CHATML, **script: Any) -> Scripted:
        byte_level(self.folder, template)
        (self.folder / "script.json").write_text(json.dumps(script))
        return self

    def run(self, *arguments: str, stdin: Any = "", env: dict[str, str] | None = None, **options: Any) -> Any:
        """Without a terminal: (exit code, stdout, stderr) of `eesd-chat model ARGUMENTS`."""
        source: dict[str, Any] = {"input": stdin} if isinstance(stdin, (str, bytes)) else {"stdin": stdin}
        options = {"text": not isinstance(stdin, bytes), "capture_output": True, **options}
        return subprocess.run(
            [*self.command, "model", *arguments], cwd=ROOT, env=environment(**(env or {})), timeout=LIMIT,
            **source, **options,
        )  # fmt: skip

    def turns(self) -> list[dict[str, Any]]:
        """What the engine was asked and what it emitted."""
        path = self.folder / "turns.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def closed(self) -> bool:
        return (self.folder / "closed").exists()


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    return {**kept, "PYTHONUTF8": "1", "TERM": "xterm", **changes}


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[..., Scripted]:
    def make(**script: Any) -> Scripted:
        return Scripted(tmp_path / "model").script(**script)

    return make
