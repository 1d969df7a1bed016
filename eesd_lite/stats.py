"""Counters of what the engine did: the numbers behind every report.

The engine adds to one Stats object; readers take snapshots and differences. The counts close exactly, whatever
happened in between: emitted = prefill_emitted + accepted + rounds - cut, where each round emits its accepted drafts
plus one, and `cut` counts tokens that a round produced but that EOS, a stop string or the length limit removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass
class Stats:
    """Mutable counters; all are sums, so that two moments can be subtracted."""

    rounds: int = 0  # one draft plus one verify each
    drafted: int = 0  # tokens proposed: the nodes of trees
    draft_depth: int = 0  # longest paths of the drafts: less than `drafted` by what branches took
    accepted: int = 0  # proposed tokens that equalled the target's choice
    emitted: int = 0  # tokens handed to the caller
    prefill_emitted: int = 0  # first tokens of answers: they come from the prompt's own pass
    cut: int = 0  # produced by a round, then removed by EOS, a stop string or a limit
    prompt_tokens: int = 0
    prefilled_tokens: int = 0  # prompt tokens that the cache did not already hold
    accepted_length_histogram: list[int] = field(default_factory=list)  # index: accepted drafts of a round
    draft_length_histogram: list[int] = field(default_factory=list)  # index: drafted tokens of a round
    sweeps: int = 0  # walks over all layers that are not resident
    draft_offloaded_bytes: int = 0  # stays 0: drafting never touches an offloaded weight
    verify_offloaded_bytes: int = 0
    prefill_offloaded_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0  # the part of decode_seconds before verification began
    wait_seconds: float = 0.0  # the part of it in which verification waited for a streamed layer
    read_seconds: float = 0.0  # the part of it in which some layer was being read
    draft_forwards: int = 0  # passes through the exit head made in order to propose a token
    target_rows: int = 0  # positions that went through the layers after the exit layer

    def count_round(self, *, drafted: int, accepted: int, depth: int | None = None) -> None:
        """Adds one round's drafting outcome; bytes, rows and seconds are added where they arise."""
        depth = drafted if depth is None else depth
        assert 0 <= accepted <= depth <= drafted, (accepted, depth, drafted)
        self.rounds += 1
        self.drafted += drafted
        self.draft_depth += depth
        self.accepted += accepted
        for histogram, length in ((self.accepted_length_histogram, accepted), (self.draft_length_histogram, drafted)):
            histogram.extend([0] * (length + 1 - len(histogram)))
            histogram[length] += 1

    @property
    def tau(self) -> float:
        """Mean tokens per round before cutting; 0 when there was no round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of proposed tokens that were kept; 0 when none was proposed."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens of rounds that were emitted, per second of decoding (prefill is apart)."""
        decoded = self.emitted - self.prefill_emitted
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefilled_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    def balanced(self) -> bool:
        """True when the token counts close; every engine test asserts it."""
        return (
            self.emitted == self.prefill_emitted + self.accepted + self.rounds - self.cut
            and sum(self.accepted_length_histogram) == self.rounds
            and sum(length * n for length, n in enumerate(self.accepted_length_histogram)) == self.accepted
            and sum(self.draft_length_histogram) == self.rounds
            and sum(length * n for length, n in enumerate(self.draft_length_histogram)) == self.drafted
        )

    def snapshot(self) -> Stats:
        """An independent copy of the counters as they are now."""
        return Stats(**self._values())

    def since(self, earlier: Stats) -> Stats:
        """What happened after `earlier`, a snapshot of this object."""
        now, then = self._values(), earlier._values()
        return Stats(**{name: _difference(value, then[name]) for name, value in now.items()})

    def plus(self, other: Stats) -> Stats:
        """Both together."""
        ours, theirs = self._values(), other._values()
        return Stats(**{name: _sum(value, theirs[name]) for name, value in ours.items()})

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures, ready for JSON."""
        return self._values() | {
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
        }

    def _values(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}


def _difference(now: Any, then: Any) -> Any:
    """Of two sums, or of two histograms; a histogram ends with its last count."""
    if not isinstance(now, list):
        return now - then
    counts = [n - (then[i] if i < len(then) else 0) for i, n in enumerate(now)]
    while counts and counts[-1] == 0:
        counts.pop()
    return counts


def _sum(one: Any, other: Any) -> Any:
    """Of two counters, or of two histograms of any length."""
    if not isinstance(one, list):
        return one + other
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
