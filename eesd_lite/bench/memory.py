"""Peak resident memory of one contender: a fresh process loads it alone and answers one prompt.

Contenders of one benchmark share a process, often an engine, so their memory cannot be told apart there. The child sees
the whole peak, loading included. Run as `python -c` with JSON on stdin; a peer reports its own peak instead.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eesd_lite.errors import EesdError
from eesd_lite.params import SamplingParams

_ROOT = Path(__file__).resolve().parents[2]
# Our own packages first: the child must run what the parent runs, whatever folder it is started in.
_CODE = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from eesd_lite.bench.memory import main; main()"


def measure(
    model: str, options: dict[str, Any], *, controller: str, ids: Sequence[int], params: SamplingParams
) -> dict[str, int]:
    """Bytes: `peak_rss_bytes`, and `start_rss_bytes`, what Python and torch took before the model was loaded."""
    request = {"model": model, "options": options, "controller": controller, "ids": list(ids), "params": asdict(params)}
    child = subprocess.run([sys.executable, "-c", _CODE], input=json.dumps(request), capture_output=True, text=True)
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise EesdError(f"measuring the memory of {controller} failed with code {child.returncode}: {last[0]}")
    found: dict[str, int] = json.loads(child.stdout.splitlines()[-1])
    return found


def main() -> None:
    """The child."""
    request = json.load(sys.stdin)
    from eesd_lite.engine import Engine

    params = SamplingParams(**{**request["params"], "stop": tuple(request["params"]["stop"])})
    start = peak_rss_bytes()
    with Engine.from_pretrained(request["model"], **request["options"]) as engine:
        engine.set_controller(request["controller"])
        for _ in engine.generate(request["ids"], params):
            pass
    sys.stdout.write(json.dumps({"peak_rss_bytes": peak_rss_bytes(), "start_rss_bytes": start}) + "\n")


def peak_rss_bytes() -> int:
    """The most resident memory this process has had."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource  # its figure may include what the parent had before exec, hence only where /proc is missing

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
