"""Our engine in a process of its own, speaking the protocol of eesd_lite/baselines/child.py.

A request may name a controller; replies carry the engine's counters. What is imported before the memory limit is set is
the runtime: torch, the compiled kernels and the tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
# Our own packages first: the child must run what the parent runs, whatever folder it is started in.
COMMAND = (
    "-c",
    f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from eesd_lite.bench.offload.worker import main; main()",
)


def main() -> None:
    """`python -c ... NAME SETTINGS`; JSON lines on stdin and stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    from eesd_lite.baselines.child import limit_own_memory
    from eesd_lite.bench.contenders import EngineContender
    from eesd_lite.bench.internals import streamed_files
    from eesd_lite.bench.memory import peak_rss_bytes
    from eesd_lite.engine import Engine
    from eesd_lite.errors import USER_ERRORS
    from eesd_lite.params import SamplingParams

    settings = json.loads(sys.argv[2])
    options = settings["options"]
    _warm_up(settings["model"], options)
    if settings.get("waits"):
        say({"imported": True})
        limit_own_memory(json.loads(sys.stdin.readline())["rlimit"])
    try:
        engine = Engine.from_pretrained(settings["model"], **options)
    except USER_ERRORS as error:
        say({"missing": str(error)})
        return
    with engine:
        files = [str(path) for path in streamed_files(engine)]
        say({"ready": {"plan": asdict(engine.plan), "notices": list(engine.notices), "files": files}})
        for line in sys.stdin:
            request = json.loads(line)
            params = SamplingParams(
                max_new_tokens=request["max_new_tokens"], ignore_eos=not request["eos"], **settings["sampling"]
            )
            run = EngineContender(request["controller"], engine).run(request["ids"], params)
            assert run.stats is not None
            say(
                {
                    "ids": run.ids,
                    "prefill_seconds": run.prefill_seconds,
                    "decode_seconds": run.decode_seconds,
                    "stats": asdict(run.stats),
                    "disk_bytes_per_pass": 0,
                    "peak_rss_bytes": peak_rss_bytes(),
                }
            )


def _warm_up(model: str, options: dict[str, Any]) -> None:
    """Everything that is there whatever the model: imports, compiled kernels; and the tokenizer."""
    import torch

    from eesd_lite.cpu_ops import FusedCpuOps
    from eesd_lite.prepare import resolve_model
    from eesd_lite.text import TextCodec

    if FusedCpuOps.supported(options.get("device", "cpu"), torch.bfloat16) is None:
        FusedCpuOps(threads=options.get("threads") or torch.get_num_threads())
    TextCodec.from_folder(resolve_model(model).folder)
