"""The measuring half of gpu_check.sh: link, streamer, sweeps and draft steps of a 70B-shaped model on this GPU.

Weights are random, so acceptance means nothing: costs are measured, and tokens per second are projected from them for
several tau. Ids of drafting are compared with plain decoding's all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from eesd_lite import Engine, SamplingParams
from eesd_lite.errors import USER_ERRORS
from eesd_lite.stats import Stats

CARDS = ("24GB", "8GB")
TAUS = (1.0, 2.0, 3.0, 5.0)
DRAFTS = 4
SWEEPS = 6


def link_rate(nbytes: int = 256 << 20, repeat: int = 8) -> float:
    """Bytes per second from pinned host memory to the device."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return nbytes / statistics.median(seconds)


def run(engine: Engine, controller: str) -> tuple[list[int | None], Stats]:
    """So many sweeps of one prompt."""
    engine.set_controller(controller)
    before = engine.stats.snapshot()
    tokens = SWEEPS * (1 if controller == "off" else DRAFTS)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    prompt = [1, *range(3, 20)]
    ids = [event.token_id for event in engine.generate(prompt, params)]
    return [token for token in ids if token is not None], engine.stats.since(before)


def measure(folder: Path, card: str, exit_layer: int, link: float) -> dict[str, Any]:
    """One card's memory: what is resident, and what plain decoding and drafting cost."""
    started = time.perf_counter()
    with Engine.from_pretrained(
        folder, device="cuda", device_memory=card, host_memory="80GiB", host_mode="stream", context=1024,
        exit_layer=exit_layer, head="random", controller="off",
    ) as engine:  # fmt: skip
        loaded = time.perf_counter() - started
        run(engine, "off")  # warm
        plain, off = run(engine, "off")
        drafted, fixed = run(engine, f"fixed:{DRAFTS}")
        sweep = off.decode_seconds / max(off.rounds, 1)
        computing = off.decode_seconds - off.wait_seconds
        both = off.read_seconds + computing - off.decode_seconds
        step = fixed.draft_seconds / max(fixed.draft_forwards, 1)
        round_ = fixed.decode_seconds / max(fixed.rounds, 1)
        return {
            "card": card,
            "exit_layer": engine.plan.exit_layer,
            "notices": list(engine.notices),
            "resident_layers": engine.plan.resident_layers,
            "sweep_bytes": engine.plan.sweep_bytes,
            "load_seconds": round(loaded, 1),
            "seconds_per_sweep": round(sweep, 4),
            "streamer_share_of_link": round(engine.plan.sweep_bytes / sweep / link, 3),
            "overlap": round(both / max(min(off.read_seconds, computing), 1e-9), 3),
            "seconds_per_draft_step": round(step, 5),
            f"seconds_per_round_of_{DRAFTS}": round(round_, 4),
            "projected_tokens_per_second": {str(tau): round(tau / round_, 2) for tau in TAUS},
            "identical": drafted[: len(plain)] == plain[: len(drafted)],
            "peak_device_bytes": torch.cuda.max_memory_allocated(),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--tests-exit-code", type=int, default=0)
    given = parser.parse_args()
    folder = Path(os.environ.get("EESD_HOME", "/tmp")) / "synth-70b"
    if not folder.exists():
        command = [sys.executable, "-m", "cli.main", "synth", "--shape", "llama-2-70b", "--layers", str(given.layers)]
        subprocess.run([*command, "--packed", "--device", "cuda", "--out", str(folder)], check=True)
    link = link_rate()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": given.layers,
        "link_bytes_per_second": round(link),
        "gpu_tests_exit_code": given.tests_exit_code,
        "cards": [],
    }
    for card, exit_layer in zip(CARDS, (given.layers // 3, given.layers // 10), strict=True):
        torch.cuda.reset_peak_memory_stats()
        try:
            report["cards"].append(measure(folder, card, exit_layer, link))
        except USER_ERRORS as error:
            report["cards"].append({"card": card, "error": str(error)})
    print(f"{report['gpu']}, link {link / 1e9:.1f} GB/s, {given.layers} layers of a 70B")
    for found in report["cards"]:
        for key, value in found.items():
            print(f"  {found['card']:>5}  {key:30} {value}")
    print(json.dumps(report))
    failed = any("error" in found or not found["identical"] for found in report["cards"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
