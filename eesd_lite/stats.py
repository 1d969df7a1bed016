"""Counters of what the engine did: the numbers behind every report.

The engine adds to one Stats object; readers take snapshots and differences. The counts close exactly, whatever
happened in between: emitted = prefill_emitted + accepted + rounds - cut, where each round emits its accepted drafts
plus one, and `cut` counts tokens that a round produced but that EOS, a stop string or the length limit removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Stats:
    """Mutable counters; all are sums, so that two moments can be subtracted."""

    rounds: int = 0  # one draft plus one verify each
    drafted: int = 0  # tokens proposed
    accepted: int = 0  # proposed tokens that equalled the target's choice
    emitted: int = 0  # tokens handed to the caller
    prefill_emitted: int = 0  # first tokens of answers: they come from the prompt's own pass
    cut: int = 0  # produced by a round, then removed by EOS, a stop string or a limit
    prompt_tokens: int = 0
    prefilled_tokens: int = 0  # prompt tokens that the cache did not already hold
    accepted_length_histogram: list[int] = field(default_factory=list)  # index: accepted drafts of a round
    sweeps: int = 0  # walks over all layers that are not resident
    draft_offloaded_bytes: int = 0  # stays 0: drafting never touches an offloaded weight
    verify_offloaded_bytes: int = 0
    prefill_offloaded_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_forwards: int = 0  # passes through the exit head made in order to propose a token
    target_rows: int = 0  # positions that went through the layers after the exit layer

    def count_round(self, *, drafted: int, accepted: int) -> None:
        """Adds one round's drafting outcome; bytes, rows and seconds are added where they arise."""
        assert 0 <= accepted <= drafted, (accepted, drafted)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = accepted + 1 - len(self.accepted_length_histogram)
        self.accepted_length_histogram.extend([0] * missing)
        self.accepted_length_histogram[accepted] += 1

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
        )

    def snapshot(self) -> Stats:
        """An independent copy of the counters as they are now."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["accepted_length_histogram"] = list(self.accepted_length_histogram)
        return Stats(**values)

    def since(self, earlier: Stats) -> Stats:
        """What happened after `earlier`, a snapshot of this object."""
        values = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in fields(self)
            if f.name != "accepted_length_histogram"
        }
        old = earlier.accepted_length_histogram
        histogram = [n - (old[i] if i < len(old) else 0) for i, n in enumerate(self.accepted_length_histogram)]
        while histogram and histogram[-1] == 0:
            histogram.pop()
        return Stats(accepted_length_histogram=histogram, **values)

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures, ready for JSON."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["accepted_length_histogram"] = list(self.accepted_length_histogram)
        return values | {
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
        }
