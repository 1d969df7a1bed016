"""A memory limit is a real one: who takes more does not get it. And nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eesd_lite.bench import limits
from eesd_lite.bench.limits import MemoryGroup, memory_group

LIMIT = 96 << 20
TAKES = "import sys; block = bytearray(int(sys.argv[1])); block[::4096] = b'x' * len(block[::4096]); print(len(block))"


def take(nbytes: int, group: MemoryGroup) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TAKES, str(nbytes)]
    return subprocess.run(command, preexec_fn=group.enter, capture_output=True, text=True)


def check() -> str:
    with memory_group() as group:
        assert take(2 * LIMIT, group).returncode == 0, "no limit yet"
    with memory_group() as group:
        group.limit(LIMIT)
        assert take(LIMIT // 4, group).stdout == f"{LIMIT // 4}\n"
        assert take(2 * LIMIT, group).returncode != 0
        if group.folder is not None:
            assert LIMIT // 4 < (group.peak_bytes() or 0) <= LIMIT and group.usage_bytes() is not None
    assert group.folder is None or not group.folder.exists()
    return group.method


def test_a_child_gets_no_more_than_its_limit_by_whatever_means_there_are() -> None:
    assert check() in ("cgroup v1", "cgroup v2", "rlimit")


def test_without_cgroups_an_rlimit_does_it_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    assert check() == "rlimit"
