"""Which of the two ways zero points are stored in: the claim of the settings, checked against the data.

Version 1 (AutoGPTQ) stores zero - 1, version 2 (`gptq_v2`) the zero point itself. The zero point of a symmetric grid
is its middle, so there the data decide: at 4 bits a stored 7 everywhere is version 1, a stored 8 is version 2. Files
whose claim is wrong exist, and reading them by the claim shifts every weight by one step. An asymmetric grid proves
nothing, so there the claim holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.config import QuantConfig


def detected_version(stored: Tensor, bits: int) -> int | None:
    """1 or 2 where all stored zero points are the middle of the grid in that version; None where they are not."""
    low, high = (int(value) for value in torch.aminmax(stored))
    middle = 1 << (bits - 1)
    return {middle - 1: 1, middle: 2}.get(low) if low == high else None


def decide_version(stored: Tensor, bits: int, settings: QuantConfig) -> tuple[int, str | None]:
    """(version to read by, a note where data and settings disagree) for one module's stored fields."""
    if not settings.sym:
        return settings.version, None
    found = detected_version(stored, bits)
    if found is None:
        return settings.version, "sym is true but zero points differ from the middle: read as they are stored"
    if found != settings.version:
        claimed = f"{'gptq_v2' if settings.version == 2 else 'gptq'} (version {settings.version})"
        middle = (1 << (bits - 1)) - (1 if found == 1 else 0)
        return (
            found,
            f"the settings claim {claimed} but all zero points are stored as {middle}: read as version {found}",
        )
    return found, None
