"""What drafters are called: plain names, for whoever checks arguments before anything heavy is imported."""

from __future__ import annotations

from eesd_lite.errors import EesdError

NGRAM = "ngram"
DRAFTERS = ("head", NGRAM, "both")


def check_drafter(name: str) -> None:
    """EesdError for a name that is none of DRAFTERS."""
    if name not in DRAFTERS:
        raise EesdError(f"drafter must be one of {', '.join(DRAFTERS)}, not '{name}'")
