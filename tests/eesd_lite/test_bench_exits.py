"""Exits measured before a benchmark: who is opened when, what is compared, which exit is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from eesd_lite.bench import contenders
from eesd_lite.bench.exits import measure_exits
from eesd_lite.bench.run import all_identical, run_bench
from eesd_lite.bench.settings import BenchSettings, Throttle
from eesd_lite.bench.table import exit_lines, render
from eesd_lite.bench.turns import Course
from eesd_lite.errors import BudgetError, EesdError
from eesd_lite.params import SamplingParams
from tests.eesd_lite.fake_engine import Event, FakeEngine, plan

COURSE = Course([[n, 50] for n in range(5)], SamplingParams(max_new_tokens=7), 1, 0)


def settings(**changes: Any) -> BenchSettings:
    return BenchSettings(**{"model": "m", "exit_layer": "auto", "controllers": ("off", "fixed:2"), **changes})


class Clocked(FakeEngine):
    """Takes so many seconds of a clock of the test's own for every token."""

    def __init__(self, exit_layer: int | None, seconds: float, clock: list[float], log: list[str], **more: Any) -> None:
        super().__init__(more.pop("says", lambda controller, prompt, place: 100 * prompt[0] + place), **more)
        self.seconds, self.clock, self.log, self.exit_layer = seconds, clock, log, exit_layer
        log.append(f"open {exit_layer}")

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Event]:
        for event in super().generate(prompt, params):
            self.clock[0] += self.seconds
            yield event

    def close(self) -> None:
        super().close()
        self.log.append(f"close {self.exit_layer}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(contenders, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_candidates_are_visited_forth_and_back_one_at_a_time_and_the_fastest_is_taken(clock: list[float]) -> None:
    log: list[str] = []
    speeds = {None: 1.0, 1: 0.5, 2: 0.25, 3: 2.0}

    def opened(exit_layer: int | None) -> FakeEngine:
        return Clocked(exit_layer, speeds[exit_layer], clock, log, plan=plan(exit_layer=exit_layer))

    found = measure_exits(settings(), COURSE, [3, 1, 2], opened)
    order = [None, 1, 2, 3, 3, 2, 1, None]
    assert log == [f"{word} {exit_layer}" for exit_layer in order for word in ("open", "close")]
    assert (found["chosen"], found["plain_is_faster"], found["prompts"]) == (2, False, 3)
    assert [row["exit_layer"] for row in found["rows"]] == [None, 1, 2, 3]
    # Six tokens behind the first, three prompts, two visits; an event that carries no token takes its time as well.
    speed = found["rows"][2]["controllers"]["fixed:2"]["tokens_per_second"]
    assert speed == pytest.approx(6 / (7 * 0.25), abs=1e-4) and found["rows"][2]["tokens_per_second"] == speed
    assert found["rows"][2]["of_plain"] == pytest.approx(4.0)
    assert found["rows"][2]["controllers"]["fixed:2"]["tau"] == 3.0
    assert found["rows"][0]["controllers"].keys() == {"off"} and found["rows"][1]["draft_step_seconds"] > 0
    lines = exit_lines(found)
    assert lines[0].startswith("exits, measured under this plan's memory (3 prompts x 7 tokens x 2)")
    assert lines[4].split()[:4] == ["2", "chosen", "2", "fixed:2"] and lines[4].split()[-1] == "4.00"


def test_plain_decoding_that_is_faster_is_said_and_another_text_is_seen(clock: list[float]) -> None:
    def opened(exit_layer: int | None) -> FakeEngine:
        says = lambda controller, prompt, place: place + (0 if exit_layer is None else place // 5)  # noqa: E731
        return Clocked(
            exit_layer, 1.0 if exit_layer is None else 9.0, clock, [], says=says, plan=plan(exit_layer=exit_layer)
        )

    found = measure_exits(settings(), COURSE, [1], opened)
    assert found["plain_is_faster"] and found["chosen"] == 1
    assert exit_lines(found)[-1] == "plain decoding was faster than every exit"
    assert not all_identical({"controllers": {}, "exits": found})


def test_exits_that_cannot_draft_are_left_out_with_the_reason(clock: list[float]) -> None:
    def opened(exit_layer: int | None) -> FakeEngine:
        if exit_layer == 3:
            raise BudgetError("drafting at exit layer 3 needs 3 resident layers")
        made = None if exit_layer == 2 else exit_layer
        return Clocked(exit_layer, 1.0, clock, [], plan=plan(exit_layer=made))

    found = measure_exits(settings(), COURSE, [1, 2, 3], opened)
    assert [row["note"] for row in found["rows"]] == [
        "", "", "does not fit", "drafting at exit layer 3 needs 3 resident layers",
    ]  # fmt: skip
    assert found["chosen"] == 1 and "exit 2: does not fit" in exit_lines(found)
    with pytest.raises(EesdError, match="no exit can draft with these options .exit 2: does not fit"):
        measure_exits(settings(), COURSE, [2], opened)
    with pytest.raises(EesdError, match="there are no heads"):
        measure_exits(settings(), COURSE, [], opened)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"controllers": ("off",)}, "name a controller and a drafter"),
        ({"drafter": "ngram"}, "name a controller and a drafter"),
        ({"head": "random"}, "name one with --head random"),
        ({"throttle": Throttle(draft_steps_per_sweep=40)}, "name a rate"),
        ({"exit_layer": "deep"}, "not 'deep'"),
    ],
)
def test_wishes_that_auto_cannot_fulfil_are_refused_before_loading(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(EesdError, match=words):
        settings(**wrong)


@pytest.mark.real
def test_the_demo_models_exits_are_measured_and_one_is_benched(demo_model: Any) -> None:
    report = run_bench(
        settings(
            model="smollm2-135m", resident_layers=10, limit_prompts=1, repeat=1, warmup_tokens=0,
            own_process_memory=False, params=SamplingParams(max_new_tokens=6, ignore_eos=True),
        )
    )  # fmt: skip
    exits = report["exits"]
    assert [row["exit_layer"] for row in exits["rows"]] == [None, 6, 10, 15, 20]
    assert [bool(row["note"]) for row in exits["rows"]] == [False, False, False, True, True]
    assert exits["chosen"] == report["plans"]["plain"]["exit_layer"] in (6, 10)
    assert all_identical(report)


def test_the_heading_says_where_each_plan_drafts() -> None:
    plans = {
        "plain": {"tiers": ["device"] * 4, "resident_layers": 4, "exit_layer": None, "notes": []},
        "drafting": {"tiers": ["device"] * 4, "resident_layers": 3, "exit_layer": 3, "other_exits": [1], "notes": []},
    }
    asked = {"prompts": 1, "max_new_tokens": 8, "repeat": 1, "temperature": 0.0}
    report = {"plans": plans, "settings": asked, "model": {"name": "some-model"}, "controllers": {}, "baselines": {}}
    heading = render({**report, "exits": {}, "disk": {}, "throttle": {}, "machine": {}}).splitlines()[0]
    assert "plain: 4 of 4 layers resident, exit none; drafting: 3 of 4 layers resident, exit 1 or 3" in heading
