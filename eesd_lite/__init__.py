"""eesd-lite: early-exit speculative decoding for 4-bit models larger than the memory they run in.

Two public names, `Engine` and `SamplingParams`. They are loaded on first use, so that importing a plain-Python
part of this package (settings, placement, preparing a model) does not cost the import of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eesd_lite.engine import Engine
    from eesd_lite.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from eesd_lite.shadow import find_shadow

        complaint = find_shadow(("models", "quant"))
        if complaint is not None:
            raise ImportError(complaint)
    if name == "Engine":
        from eesd_lite.engine import Engine

        return Engine
    if name == "SamplingParams":
        from eesd_lite.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
