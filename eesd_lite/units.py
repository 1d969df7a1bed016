"""Sizes as people write them: "8GiB", "8 GB", "500mb", 4096, "auto".

GB is 1000^3 and GiB is 1024^3, as standards and disks have it. "auto" asks psutil what is free and leaves a share of it
to the rest of the machine. Called by the command line and by Engine.from_pretrained.
"""

from __future__ import annotations

import re
from decimal import Decimal

from eesd_lite.errors import BudgetError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE | re.ASCII)
_AUTO_RESERVE = 0.2  # of the free memory: other programs grow too, and our own Python and torch need some


def parse_size(size: str | int) -> int:
    """Bytes in a size; BudgetError says what a size looks like."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise BudgetError(f"a size cannot be negative, got {size}")
        return size
    if not isinstance(size, str):
        raise BudgetError(f"a size is text such as 8GiB or a number of bytes, not {size!r}")
    if size.strip().lower() == "auto":
        return available_memory()
    match = _SIZE.fullmatch(size)
    if match is None or (match[3] and not match[2]):
        raise BudgetError(f"cannot read the size {size!r}; write for example 8GiB, 500MB, 4096 or auto")
    unit = 1024 if match[3] else 1000
    return int(Decimal(match[1]) * unit ** _POWERS[match[2].lower()])  # a float would round sizes beyond 2**53


def available_memory() -> int:
    """Bytes that may be used now without crowding out the rest of the machine."""
    import psutil  # here, so that parsing a plain number needs no third-party package

    return int(psutil.virtual_memory().available * (1 - _AUTO_RESERVE))


def available_device_memory() -> int:
    """The same for the current CUDA device, whose driver and allocator need some too. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        raise BudgetError("auto asks a CUDA device what it has free, but torch sees none; give a size such as 8GiB")
    return int(torch.cuda.mem_get_info()[0] * (1 - _AUTO_RESERVE / 2))


def device_memory_size(size: str | int | None, device: str) -> int | None:
    """A budget for `device`; "auto" asks the device what it has free. None: no limit."""
    if size is None:
        return None
    if isinstance(size, str) and size.strip().lower() == "auto" and device.startswith("cuda"):
        return available_device_memory()
    return parse_size(size)


def format_size(size: int) -> str:
    """A size for people, in binary units with three digits: 512 B, 1.50 KiB, 93.4 MiB, 7.00 GiB."""
    value = float(abs(size))
    sign = "-" if size < 0 else ""
    if value < 1024:
        return f"{sign}{abs(size)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 999.5 or unit == "TiB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{sign}{value:.{digits}f} {unit}"
