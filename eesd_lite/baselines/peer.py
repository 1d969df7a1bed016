"""A peer program seen from the benchmark: a child process that answers prompts, one at a time, when asked.

Implements the Contender protocol of eesd_lite/bench. The child (child.py) waits on its stdin between turns, so it does
not disturb the others. Peers decode greedily, whatever the run samples: they are there for their speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eesd_lite.bench.contenders import Run
from eesd_lite.bench.limits import MemoryGroup
from eesd_lite.errors import EesdError
from eesd_lite.params import SamplingParams
from eesd_lite.stats import Stats

CHILD = Path(__file__).with_name("child.py")


class PeerMissing(Exception):
    """The peer cannot take part; the message is for the report and for people."""


@dataclass(frozen=True)
class PeerSpec:
    """How to start one peer, and how much it is asked to do."""

    name: str
    python: str
    settings: dict[str, Any]
    eos: tuple[int, ...]
    prompts: int
    max_new_tokens: int
    facts: dict[str, Any] = field(default_factory=dict)  # for the report
    command: tuple[str, ...] = ()  # what follows the interpreter; none: the child script of all peers


class Peer:
    """The running child. Use as a context manager: it ends with the block.

    In a memory `group` it imports what it needs first; then the group is limited to what it holds by then and
    `allowance` bytes more (None: the group has its limit already), and the model is loaded. Without cgroups the child
    limits itself likewise.
    """

    def __init__(self, spec: PeerSpec, group: MemoryGroup | None = None, allowance: int | None = None) -> None:
        self.name = spec.name
        self.prompts: int | None = spec.prompts
        self.peak_rss_bytes = 0
        self.disk_bytes_per_pass: list[int] = []
        self.group = group
        self.limit_bytes: int | None = None  # of the whole process, where a cgroup counts
        self._spec = spec
        self._errors = tempfile.TemporaryFile()
        settings = spec.settings if group is None else {**spec.settings, "waits": True}
        command = [spec.python, *(spec.command or ("-I", str(CHILD))), spec.name, json.dumps(settings)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env=_plain_env(), preexec_fn=group.enter if group is not None else None,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise PeerMissing(f"cannot start {spec.python}: {error.strerror}") from error
        try:
            hello = self._receive()
            if group is not None and "imported" in hello:
                held = group.usage_bytes()
                if held is not None and allowance is not None:
                    group.limit(held + allowance)
                self.limit_bytes = group.limit_bytes
                hello = self._ask({"rlimit": allowance if held is None else None})
        except BaseException:
            self.close()
            raise
        if "missing" in hello:
            self.close()
            raise PeerMissing(hello["missing"])
        self.info: dict[str, Any] = hello["ready"]

    def run(self, ids: Sequence[int], params: SamplingParams, **more: Any) -> Run:
        """One answer. `more` goes into the request, for children that know more than one way to answer."""
        limit = min(params.max_new_tokens, self._spec.max_new_tokens)
        eos = [] if params.ignore_eos else list(self._spec.eos)
        reply = self._ask({"ids": list(ids), "max_new_tokens": limit, "eos": eos, **more})
        self.peak_rss_bytes = reply["peak_rss_bytes"]
        self.disk_bytes_per_pass.append(reply["disk_bytes_per_pass"])
        stats = Stats(**reply["stats"]) if "stats" in reply else None
        return Run(tuple(reply["ids"]), reply["prefill_seconds"], reply["decode_seconds"], stats)

    def figures(self) -> dict[str, Any]:
        """What the report says about it beside speeds."""
        reads = self.disk_bytes_per_pass
        return {
            "max_new_tokens": self._spec.max_new_tokens,
            "peak_rss_bytes": self.peak_rss_bytes,
            "disk_bytes_per_pass": round(statistics.median(reads)) if reads else None,
            **self._spec.facts,
            **self.info,
        }

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # ends the child's loop
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone; reading says why
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            why = last[0] if last else _signal_name(code)
            raise EesdError(f"the baseline {self.name} ended with code {code}: {why}")
        value: dict[str, Any] = json.loads(line)
        return value


def python_for(variable: str) -> str:
    """The interpreter that the environment names for a peer, else this one."""
    return os.environ.get(variable) or sys.executable


def _plain_env() -> dict[str, str]:
    # Without these, a peer may look for updates, or find this process's thread settings instead of its own.
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def _signal_name(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else "it printed nothing"
