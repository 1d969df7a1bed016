"""accelerate's disk offload as a peer: the same model in 16 bit, the same layers on disk, on the same disk.

The peer has no 4-bit weights, so it reads more bytes for the same layers; `owed_to_bytes` tells that part of a speed-up
from the rest. Its page cache is dropped before every forward pass (child.py), since a model that does not fit in
memory finds nothing of itself there. Called by eesd_lite/bench/peers.py.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eesd_lite.baselines.peer import PeerMissing, PeerSpec, python_for
from eesd_lite.home import atomic_dir, home, locked, require_free
from eesd_lite.progress import Progress
from quant.checkpoint import Checkpoint

NAME = "accelerate"
PYTHON_VARIABLE = "EESD_ACCELERATE_PYTHON"
MAX_NEW_TOKENS = 16  # it needs seconds for a token; more would only repeat the same sweep


def device_map(tiers: Sequence[str]) -> dict[str, str]:
    """The same split in accelerate's words: `disk` stays `disk`, everything else is kept in memory."""
    placed = {f"model.layers.{i}": "disk" if tier == "disk" else "cpu" for i, tier in enumerate(tiers)}
    return {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"} | placed


@contextmanager
def sixteen_bit_copy(folder: Path, progress: Progress) -> Iterator[Path]:
    """The model's dequantized weights as a bfloat16 folder in EESD_HOME, for as long as the block lasts."""
    import torch

    from eesd_lite.evaluate import transformers_model

    # Beside the engine's own blobs, so that both read the same disk.
    target = home() / "work" / f"bench-16bit-{folder.name}"
    with locked(target, progress):  # a second benchmark waits; what a killed one left is removed
        shutil.rmtree(target, ignore_errors=True)
        progress("writing the 16-bit copy for accelerate", 0, 0)
        model = transformers_model(folder, torch.bfloat16)
        require_free(home(), sum(p.nbytes for p in model.parameters()), "the 16-bit copy for accelerate")
        try:
            with atomic_dir(target) as partial:
                # Small files: the system keeps cached pages in large pieces; pieces shared with a resident layer stay.
                model.save_pretrained(partial, max_shard_size="8MB")
            del model
            yield target
        finally:
            shutil.rmtree(target, ignore_errors=True)


def check_installed() -> None:
    """Before gigabytes are written: is it there? In a Python of its own, the child will say."""
    missing = [name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is None]
    if missing and python_for(PYTHON_VARIABLE) == sys.executable:
        raise PeerMissing(f"{missing[0]} is not installed; pip install {missing[0]}, or set {PYTHON_VARIABLE}")


def peer_spec(
    folder: Path, *, tiers: Sequence[str], threads: int | None, eos: tuple[int, ...], prompts: int
) -> PeerSpec:
    """How to start the peer on such a 16-bit folder."""
    offload = folder / "offload"
    offload.mkdir(exist_ok=True)
    settings = {
        "folder": str(folder),
        "offload_folder": str(offload),
        "device_map": device_map(tiers),
        "threads": threads,
    }
    facts = {"sweep_bytes": sweep_bytes(folder, tiers), "weights": "bfloat16, dequantized from the same 4-bit model"}
    return PeerSpec(NAME, python_for(PYTHON_VARIABLE), settings, eos, prompts, MAX_NEW_TOKENS, facts)


def sweep_bytes(folder: Path, tiers: Sequence[str]) -> int:
    """Bytes of the layers on disk, as the peer reads them for every token."""
    on_disk = tuple(f"model.layers.{i}." for i, tier in enumerate(tiers) if tier == "disk")
    tensors = Checkpoint(folder).tensors
    return sum(info.nbytes for name, info in tensors.items() if name.startswith(on_disk))


def owed_to_bytes(figures: dict[str, Any], *, sweep_bytes: int) -> dict[str, Any]:
    """Splits plain decoding's speed-up over the peer into fewer bytes (4 bit) and everything else."""
    if not sweep_bytes or not figures["plain_speedup_over_it"]:
        return {}
    fewer = figures["sweep_bytes"] / sweep_bytes
    return {
        "speedup_owed_to_4bit_bytes": round(fewer, 3),
        "speedup_owed_to_the_rest": round(figures["plain_speedup_over_it"] / fewer, 3),
    }
