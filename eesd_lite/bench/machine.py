"""Where and with what a benchmark ran: processor, memory, versions. Figures without these cannot be compared."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "numba", "transformers", "tokenizers", "safetensors")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python, this package, and those of `packages` that are installed."""
    from eesd_lite import __version__

    found = {"python": platform.python_version(), "eesd-lite": __version__}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, memory, system, and the GPU if torch sees one."""
    import psutil
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
