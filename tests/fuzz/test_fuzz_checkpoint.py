"""A short run of the checkpoint fuzzer; a long one: EESD_FUZZ_EXAMPLES=4000 pytest tests/fuzz (docs/checkpoints.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = int(os.environ.get("EESD_FUZZ_EXAMPLES", "150"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits memory by what /proc says")
def test_damaged_folders_end_in_our_own_errors_in_bounded_time_and_memory() -> None:
    command = [sys.executable, "-m", "tests.fuzz.checkpoint_fuzzer", str(EXAMPLES)]
    if EXAMPLES > 150:
        command.append(os.environ.get("EESD_FUZZ_SEED", "1"))
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["examples"] >= EXAMPLES and figures["peak_mib"] < 1024
    assert figures["accepted"] < figures["examples"] / 2, "hardly anything was damaged"
    assert figures["kinds"] > 10
