"""Fixtures for all tests. Those marked `real` use the demo model; `make test` prepares it before they start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from eesd_lite.prepare import fetch

DEMO = "smollm2-135m"

# A shell that starts the tests in the background has children ignore Ctrl-C, nohup has them ignore the hang-up, and so
# would the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the prepared demo model (4-bit GPTQ); the first use on a machine takes minutes and a download."""
    return fetch(DEMO)


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EESD_HOME for one test."""
    folder = tmp_path / "eesd-home"
    monkeypatch.setenv("EESD_HOME", str(folder))
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; torch is imported only if some test asks for one."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting:
        import torch

        if not torch.cuda.is_available():
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
