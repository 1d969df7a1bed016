"""The one progress callback of this project: (stage, done, total), total 0 when the end is unknown.

Everything that may take longer than two seconds takes such a callback and calls it now and then. Rendering it is the
business of the programs in `cli`; libraries and tests pass `no_progress`.
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore all reports."""
