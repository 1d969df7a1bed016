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
from typing import TYPE_CHECKING, Any, TextIO

import click

from cli.common import is_terminal, program_name
from eesd_lite.stats import Stats
from eesd_lite.units import format_size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_QUICK = 2.0  # seconds: work that is done by then is not worth a line in a log
_LONGEST = 8  # numbers of a list that are shown
_EVERY = 5.0  # seconds between two plain lines of the same stage


class ProgressDisplay:
    """Shows (stage, done, total) reports: call it as the callback, inside `with display.showing(...)`.

    The first sign comes after `delay` seconds on a terminal, else after two, whether or not the work reports anything.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live = obeys_escapes(sys.stderr)
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
    return click.style(text, dim=True) if shows_colors(sys.stderr) else text


def shows_colors(stream: TextIO | None) -> bool:
    """Whether colours may go there: a terminal that is not dumb, and nobody said no."""
    return obeys_escapes(stream) and not os.environ.get("NO_COLOR")


def obeys_escapes(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    return is_terminal(stream) and os.environ.get("TERM", "dumb") not in ("dumb", "")


def printable(text: str) -> str:
    """Model output for a terminal: control characters are spelt out, so that no answer can move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _is_control(c) else _spelt(c) for c in text)


def answer_line(stats: Stats, first_token: float | None = None, ending: str = "") -> str:
    """One line about one answer; `first_token` is how many seconds it took to appear."""
    counted = "1 token" if stats.emitted == 1 else f"{stats.emitted} tokens"
    parts = [counted, f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.drafted:
        parts += [f"tau {stats.tau:.2f}", f"draft {stats.drafted / stats.rounds:.1f}"]
    parts.append(f"{format_size(read_bytes(stats) // max(stats.emitted, 1))}/token")
    if first_token is not None:
        parts.append(f"first after {first_token:.1f} s")
    return ", ".join([*parts, ending] if ending else parts)


def totals(stats: Stats, belief: dict[str, Any]) -> list[str]:
    """Lines of `/stats`: the whole session, a chart of the rounds by accepted drafts, what the controller learned."""
    lines = [
        f"answers    {stats.emitted} tokens at {stats.tokens_per_second:.1f} tokens/s",
        f"seconds    {stats.prefill_seconds:.1f} reading prompts, {stats.decode_seconds:.1f} decoding "
        f"({stats.draft_seconds:.1f} drafting, {stats.wait_seconds:.1f} waiting for layers)",
        f"prompts    {stats.prompt_tokens} tokens, of which {stats.prefilled_tokens} were read "
        f"({stats.prefill_tokens_per_second:.0f} tokens/s), the others were in the cache",
        f"read       {format_size(read_bytes(stats))} of offloaded weights in {stats.sweeps} sweeps, "
        f"{format_size(read_bytes(stats) // max(stats.emitted, 1))} a token",
    ]
    if stats.rounds:
        drafted = f"{stats.drafted / stats.rounds:.1f} drafted a round, {stats.acceptance_rate:.0%} of them kept"
        lines.append(f"rounds     {stats.rounds}, tau {stats.tau:.2f}; {drafted}")
        lines += ["rounds by the number of drafts that were kept:"]
        lines += [
            f"  {line}" for line in _bars([(str(n), c) for n, c in enumerate(stats.accepted_length_histogram) if c])
        ]
    return lines + _belief_lines(belief)


def _bars(counts: list[tuple[str, int]]) -> list[str]:
    """A chart of counts, one line each."""
    most = max(count for _, count in counts)
    width = max(len(name) for name, _ in counts)
    number = max(len(str(count)) for _, count in counts)
    return [f"{name:>{width}}  {count:>{number}}  {'#' * round(40 * count / most)}".rstrip() for name, count in counts]


def _belief_lines(belief: dict[str, Any]) -> list[str]:
    """What a controller believes: numbers, lists, and tables where there is an entry for every level."""
    lines = ["the controller believes:"] if belief else []
    for key, value in belief.items():
        name = key.replace("_", " ")
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            lines += [f"  {line}" for line in _table(name, list(value))]
        else:
            lines.append(f"  {name}: {_short(value)}")
    return lines


def _table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """One line per row below the names of the columns."""
    heads = [key.replace("_", " ") for key in rows[0]]
    cells = [[_short(row.get(key)) for key in rows[0]] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in [heads, *cells]]
    return [f"{name + ':' if n == 0 else '':{len(name) + 1}}  {line}".rstrip() for n, line in enumerate(lines)]


def read_bytes(stats: Stats) -> int:
    """Offloaded bytes read, for whatever purpose."""
    return stats.draft_offloaded_bytes + stats.verify_offloaded_bytes + stats.prefill_offloaded_bytes


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join([*(_short(item) for item in value[:_LONGEST]), *(["..."] if len(value) > _LONGEST else [])])
    return str(value)


def _is_control(character: str) -> bool:
    code = ord(character)
    # C0, DEL, C1, and the marks that reorder a line from right to left.
    return code < 0x20 or 0x7F <= code < 0xA0 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


def _spelt(character: str) -> str:
    code = ord(character)
    return f"^{chr(code + 64)}" if code < 0x20 else f"<U+{code:04X}>"
