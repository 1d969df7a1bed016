"""A folder for the scripted chat, and ways to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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
            [*self.command, "model", *arguments], cwd=ROOT, env=self.environment(**(env or {})), timeout=LIMIT,
            **source, **options,
        )  # fmt: skip

    def environment(self, **changes: str) -> dict[str, str]:
        """Sessions and history are kept beside the model."""
        return environment(**{"EESD_HOME": str(self.folder / "home"), **changes})

    def turns(self) -> list[dict[str, Any]]:
        """What the engine was asked and what it emitted."""
        path = self.folder / "turns.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def closed(self) -> bool:
        return (self.folder / "closed").exists()


def environment(**changes: str) -> dict[str, str]:
    ours = ("NO_COLOR", "FORCE_COLOR", "TERM", "EESD_CONFIG")
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("EESD_CHAT_")}
    return {**kept, "PYTHONUTF8": "1", "TERM": "xterm", "XDG_CONFIG_HOME": "/nonexistent", **changes}


@pytest.fixture
def start(scripted: Callable[..., Scripted]) -> Iterator[Callable[..., Any]]:
    """`start(*arguments, env=..., **script)`: a chat in a terminal (`tests.cli.terminal.Terminal`)."""
    from tests.cli.terminal import Terminal

    opened = []

    def make(*arguments: str, env: dict[str, str] | None = None, model: bool = True, **script: object) -> Terminal:
        opened.append(Terminal(scripted(**script), *arguments, model=model, **(env or {})))
        return opened[-1]

    yield make
    for terminal in opened:
        terminal.process.close(force=True)


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[..., Scripted]:
    def make(**script: Any) -> Scripted:
        return Scripted(tmp_path / "model").script(**script)

    return make
