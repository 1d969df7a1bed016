"""An engine without a model, for the benchmark's own arithmetic: tokens come from a function, counters are honest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eesd_lite.controller import make_controller
from eesd_lite.params import SamplingParams
from eesd_lite.placement import Plan
from eesd_lite.stats import Stats

Says = Callable[[str, Sequence[int], int], int]  # controller, prompt, position -> token


@dataclass(frozen=True)
class Event:
    token_id: int | None
    drafted: bool = False


def plan(*, layers: int = 4, resident: int = 2, exit_layer: int | None = 2, layer_bytes: int = 4096) -> Plan:
    on_disk = layers - resident
    return Plan(
        tiers=("device",) * resident + ("disk",) * on_disk,
        resident_layers=resident,
        exit_layer=exit_layer,
        context=256,
        ring_slots=min(2, on_disk),
        items=(("resident layers", resident * layer_bytes),),
        total_bytes=resident * layer_bytes,
        sweep_bytes=on_disk * layer_bytes,
    )


class FakeEngine:
    """Emits `says(controller, prompt, position)`; every draft of two tokens is accepted, in rounds of three."""

    def __init__(self, says: Says, *, files: Sequence[Path] = (), plan: Plan = plan()) -> None:  # noqa: B008
        self.says, self.plan = says, plan
        self.stats = Stats()
        self.controller: Any = make_controller("off")
        self.spec = "off"
        self.calls: list[str] = []
        self.closed = False
        streamer = SimpleNamespace(
            layers=tuple(range(len(files))),
            reader=SimpleNamespace(rate=None),
            _store=SimpleNamespace(path=files.__getitem__),
        )
        self.target = SimpleNamespace(bank=SimpleNamespace(streamer=streamer if files else None))

    def set_controller(self, spec: str) -> None:
        self.spec, self.controller = spec, make_controller(spec)

    def reset(self) -> None:
        self.calls.append("reset")

    def close(self) -> None:
        self.closed = True

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Event]:
        self.calls.append(f"{self.spec} {prompt[0]} {params.max_new_tokens}")
        ids = [self.says(self.spec, prompt, position) for position in range(params.max_new_tokens)]
        self.stats.prefill_emitted += 1
        self.stats.emitted += 1
        yield Event(ids[0])
        place = 1
        while place < len(ids):
            self.controller.begin(2)
            drafted = 0
            while self.controller.go_on():
                self.controller.drafted(0.9)
                drafted += 1
            accepted = min(drafted, len(ids) - place - 1)
            self.controller.observe(accepted, 0.001)
            self.stats.count_round(drafted=drafted, accepted=accepted)
            self.stats.verify_offloaded_bytes += self.plan.sweep_bytes
            for token in ids[place : place + accepted + 1]:
                self.stats.emitted += 1
                yield Event(token, drafted=True)
            place += accepted + 1
        yield Event(None)  # held text: no token
