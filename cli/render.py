"""What goes to stderr besides plain notices: progress, the line of figures after an answer, tables of figures.

On a terminal progress is one live line that disappears; elsewhere it is a plain line now and then, and none if the work
is quick. No escape codes leave here unless stderr is a terminal. Own texts are ASCII.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from cli.common import is_terminal, program_name
from eesd_lite.stats import Stats
from eesd_lite.units import format_size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_QUICK = 2.0  # seconds: work that is done by then is not worth a line in a log
_EVERY = 5.0  # seconds between two plain lines of the same stage


class ProgressDisplay:
    """Shows (stage, done, total) reports: call it as the callback, inside `with display.showing(...)`.

    The first sign comes after `delay` seconds on a terminal, else after two, whether or not the work reports anything.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live = is_terminal(sys.stderr) and os.environ.get("TERM", "dumb") != "dumb"
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._bar: RichProgress | None = None
        self._active = False
        self._report: tuple[str, int, int] = ("", 0, 0)
        self._said: tuple[str, float] = ("", 0.0)
        self._name = ""

    def showing(self, stage: str, *, delay: float = 0.0) -> ProgressDisplay:
        """Start with this stage; as a context manager it ends by itself."""
        self.stop()
        with self._lock:
            self._active, self._report, self._said = True, (stage, 0, 0), ("", 0.0)
            self._name = program_name()
            wait = delay if self._live else (_QUICK if delay else 0.0)
            if wait == 0.0:
                self._show()
            else:
                self._timer = threading.Timer(wait, self._show)
                self._timer.daemon = True
                self._timer.start()
        return self

    def stop(self) -> None:
        """Remove the line. Safe to call at any time, also twice."""
        with self._lock:
            self._active = False
            timer, self._timer = self._timer, None
            bar, self._bar = self._bar, None
        if timer is not None:
            timer.cancel()
            timer.join()
        if bar is not None:
            bar.stop()

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            self._report = (stage, done, total)
            if not self._active:
                return
            if self._live:
                self._update_bar()
                return
            said, when = self._said
            if when and self._clock() - when >= (_QUICK if said != stage else _EVERY):
                self._say()

    def _show(self) -> None:
        with self._lock:
            if not self._active:
                return
            if not self._live:
                self._say()
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                SpinnerColumn("line"),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[count]}", markup=False),
                TimeRemainingColumn(compact=True),
                console=Console(stderr=True, highlight=False),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(self._report[0], total=None, count="")
            self._bar.start()
            self._update_bar()

    def _update_bar(self) -> None:
        if self._bar is None:
            return
        stage, done, total = self._report
        task = self._bar.tasks[0]
        if task.description != stage:
            self._bar.reset(task.id, description=stage, total=total or None, count="")
        count = f"{done}/{total}" if total else ""
        self._bar.update(task.id, completed=done, total=total or None, count=count)

    def _say(self) -> None:
        stage, done, total = self._report
        self._said = (stage, self._clock())
        click.echo(f"{self._name}: {stage}" + (f" {done}/{total}" if total else ""), err=True)


def dim(text: str) -> str:
    """Less prominent on a terminal with colours, unchanged elsewhere."""
    if is_terminal(sys.stderr) and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb":
        return click.style(text, dim=True)
    return text


def printable(text: str) -> str:
    """Model output for a terminal: control characters are spelt out, so that no answer can move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _is_control(c) else _spelt(c) for c in text)


def answer_line(stats: Stats, ending: str = "") -> str:
    """One line about one answer."""
    parts = [f"{stats.emitted} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.drafted:
        parts += [f"tau {stats.tau:.2f}", f"{stats.accepted} of {stats.drafted} drafted accepted"]
    parts.append(f"{format_size(read_bytes(stats))} read")
    parts.append(f"prompt {stats.prefilled_tokens} tokens in {stats.prefill_seconds:.1f} s")
    return ", ".join([*parts, ending] if ending else parts)


def totals(stats: Stats, belief: dict[str, Any]) -> list[str]:
    """Lines of `/stats`."""
    lines = [
        answer_line(stats),
        f"rounds {stats.rounds}, sweeps {stats.sweeps}, acceptance rate {stats.acceptance_rate:.2f}, "
        f"cut tokens {stats.cut}, passes through the exit head {stats.draft_forwards}",
    ]
    if stats.accepted_length_histogram:
        counts = ", ".join(f"{length}: {n}" for length, n in enumerate(stats.accepted_length_histogram))
        lines.append(f"rounds by number of accepted drafts: {counts}")
    for key, value in belief.items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            lines += [f"controller {key}: {_short(item)}" for item in value]
        else:
            lines.append(f"controller {key}: {_short(value)}")
    return lines


def read_bytes(stats: Stats) -> int:
    """Offloaded bytes read, for whatever purpose."""
    return stats.draft_offloaded_bytes + stats.verify_offloaded_bytes + stats.prefill_offloaded_bytes


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(_short(item) for item in value)
    return str(value)


def _is_control(character: str) -> bool:
    code = ord(character)
    # C0, DEL, C1, and the marks that reorder a line from right to left.
    return code < 0x20 or 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


def _spelt(character: str) -> str:
    code = ord(character)
    return f"^{chr(code + 64)}" if code < 0x20 else f"<U+{code:04X}>"
