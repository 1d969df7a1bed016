"""The benchmark's own logic on fake engines: who runs when, what is compared, what the JSON object says."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eesd_lite.bench import internals
from eesd_lite.bench.contenders import EngineContender, Run
from eesd_lite.bench.disk import BLOCK_BYTES, DiskRate, mean_rate, raw_rate
from eesd_lite.bench.prompts import load_prompts
from eesd_lite.bench.report import controller_figures, disk_figures, first_difference
from eesd_lite.bench.run import Field, all_identical, measure, open_field
from eesd_lite.bench.settings import BenchSettings, Throttle
from eesd_lite.bench.table import render
from eesd_lite.bench.turns import Course, take_turns
from eesd_lite.errors import EesdError, PromptError, StreamError
from eesd_lite.params import SamplingParams
from eesd_lite.progress import no_progress
from eesd_lite.stats import Stats
from tests.eesd_lite.fake_engine import FakeEngine, plan

PER_CONTROLLER = (
    "tokens_per_second speedup identical tokens_compared tau acceptance_rate drafted accepted rounds "
    "draft_depth accepted_length_histogram draft_offloaded_bytes verify_offloaded_bytes sweeps peak_rss_bytes"
).split()


def settings(**changes: Any) -> BenchSettings:
    return BenchSettings(**{"model": "m", "own_process_memory": False, "repeat": 2, **changes})


def course(prompts: int = 3, tokens: int = 7, repeat: int = 2, warmup: int = 2) -> Course:
    return Course([[n, 50] for n in range(prompts)], SamplingParams(max_new_tokens=tokens), repeat, warmup)


def honest(controller: str, prompt: Any, position: int) -> int:
    return 100 * prompt[0] + position


def run(ids: tuple[int, ...], seconds: float, stats: Stats | None = None) -> Run:
    return Run(ids, prefill_seconds=0.5, decode_seconds=seconds, stats=stats)


# --- what is asked ---


def test_forty_different_prompts_are_shipped() -> None:
    prompts = load_prompts()
    assert len(prompts) == 40
    assert len({p.text for p in prompts}) == len({p.id for p in prompts}) == 40
    kinds = {p.id.rpartition("-")[0] for p in prompts}
    assert kinds >= {"question", "code", "list", "rewrite", "arithmetic", "language"}
    assert any(not p.text.isascii() for p in prompts)


def test_prompts_come_from_jsonl_or_plain_lines(tmp_path: Path) -> None:
    lines, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("one\n\n  two \r\n", encoding="utf-8")
    objects.write_text('{"prompt": "eins"}\n{"id": "b", "prompt": "zwei\\nZeilen"}\n')
    assert [p.text for p in load_prompts(lines)] == ["one", "two"]
    assert [(p.id, p.text) for p in load_prompts(objects)] == [("1", "eins"), ("b", "zwei\nZeilen")]
    assert len(load_prompts(objects, limit=1)) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "no prompts"), ('{"prompt": 3}', "line 1"), ('{"prompt": "a"}\n{oops', "line 2"), ("[1]\n", "line 1")],
)
def test_a_bad_prompts_file_is_refused_with_its_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(PromptError, match=says):
        load_prompts(path)


def test_a_missing_prompts_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="nowhere.txt"):
        load_prompts(tmp_path / "nowhere.txt")


def test_a_throttle_is_a_rate_or_a_ratio() -> None:
    assert Throttle.parse("800MB/s").bytes_per_second == Throttle.parse("800MB").bytes_per_second == 8e8
    assert Throttle.parse("sweep=40").draft_steps_per_sweep == 40
    for wrong in ("sweep=0", "sweep=", "sweep=x", "0", "fast"):
        with pytest.raises(EesdError):
            Throttle.parse(wrong)


def test_plain_decoding_always_takes_part_and_first() -> None:
    assert settings(controllers=("fixed:4", "off", "fixed:4")).contenders == ("off", "fixed:4")
    assert not settings(controllers=()).drafts


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_memory": 1, "resident_layers": 1},
        {"baselines": ("vllm",)},
        {"controllers": ("sometimes",)},
        {"repeat": 0},
        {"baselines": ("accelerate",), "throttle": Throttle(bytes_per_second=1.0)},
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_loaded(wrong: dict[str, Any]) -> None:
    with pytest.raises(EesdError):
        settings(**wrong)


# --- who runs when ---


def test_contenders_take_turns_on_every_prompt_and_the_order_rotates() -> None:
    engine = FakeEngine(honest)
    contenders = [EngineContender(name, engine) for name in ("off", "fixed:2", "fixed:1")]
    take_turns(contenders, course(warmup=0), no_progress)
    turns = [call.split()[:2] for call in engine.calls if call != "reset"]
    rounds = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert [{prompt for _, prompt in r} for r in rounds] == [{"0"}, {"1"}, {"2"}] * 2
    assert all({name for name, _ in r} == {"off", "fixed:2", "fixed:1"} for r in rounds)
    assert [r[0][0] for r in rounds] == ["off", "fixed:2", "fixed:1"] * 2


def test_every_answer_starts_from_an_empty_cache_and_warming_up_is_not_counted() -> None:
    engine = FakeEngine(honest)
    results = take_turns([EngineContender("off", engine)], course(prompts=1, repeat=1), no_progress)
    assert engine.calls == ["reset", "off 0 2", "reset", "off 0 7"]
    assert [len(runs) for runs in results["off"]] == [1]


def test_a_peer_answers_only_its_share_of_the_prompts() -> None:
    class Slow(EngineContender):
        prompts = 2

    engine = FakeEngine(honest)
    results = take_turns([EngineContender("off", engine), Slow("fixed:1", engine)], course(), no_progress)
    assert [len(runs) for runs in results["fixed:1"]] == [2, 2]
    assert [len(runs) for runs in results["off"]] == [3, 3]


def test_a_controller_begins_anew_for_each_prompt_unless_it_is_kept() -> None:
    seen: list[Any] = []

    class Watching(FakeEngine):
        def generate(self, prompt: Any, params: SamplingParams) -> Any:
            seen.append(self.controller)
            return super().generate(prompt, params)

    for keeps, different in ((False, 6), (True, 1)):
        seen.clear()
        contender = EngineContender("calibrated", Watching(honest), keeps_learning=keeps)
        take_turns([contender], course(warmup=0), no_progress)
        assert len({id(controller) for controller in seen}) == different


# --- what is compared ---


def test_one_different_token_in_a_late_repeat_is_found_and_located() -> None:
    same, other = run((1, 2, 3), 1.0), run((1, 9, 3), 1.0)
    found = first_difference([same, same], [[same, same], [same, other]])
    assert found is not None and vars(found) == {"repeat": 1, "prompt": 1, "token": 1}
    assert first_difference([same], [[same], [same]]) is None


def test_an_answer_that_ends_early_is_not_identical() -> None:
    found = first_difference([run((1, 2, 3), 1.0)], [[run((1, 2), 1.0)]])
    assert found is not None and found.token == 2


def test_a_plain_decoding_that_contradicts_itself_is_not_identical() -> None:
    results = {"off": [[run((1, 2), 1.0)], [run((1, 3), 1.0)]]}
    assert controller_figures("off", results)["identical"] is False


def test_speed_counts_tokens_after_the_first_and_speedup_is_paired_by_repeat() -> None:
    results = {
        "off": [[run((1,) * 11, 1.0)], [run((1,) * 11, 2.0)], [run((1,) * 11, 4.0)]],
        "fixed:4": [[run((1,) * 11, 0.5)], [run((1,) * 11, 1.0)], [run((1,) * 11, 1.0)]],
    }
    figures = controller_figures("fixed:4", results)
    assert figures["tokens_per_second"] == {"median": 10.0, "min": 10.0, "max": 20.0}
    assert figures["speedup"] == 2.0
    assert figures["speedup_spread"] == {"median": 2.0, "min": 2.0, "max": 4.0}
    assert figures["tokens_compared"] == 33


def test_an_answer_of_one_token_takes_no_decoding_time_and_breaks_nothing() -> None:
    figures = controller_figures("off", {"off": [[run((1,), 0.0)]]})
    assert figures["tokens_per_second"]["median"] == 0.0 and figures["speedup"] == 0.0


def test_counters_are_summed_over_all_answers() -> None:
    first, second = Stats(), Stats()
    first.count_round(drafted=4, accepted=3)
    second.count_round(drafted=4, accepted=0)
    figures = controller_figures("off", {"off": [[run((1, 2), 1.0, first), run((1, 2), 1.0, second)]]})
    assert figures["accepted_length_histogram"] == [1, 0, 0, 1]
    assert (figures["drafted"], figures["accepted"], figures["rounds"], figures["tau"]) == (8, 3, 2, 2.5)


def test_the_share_of_the_link_is_measured_against_the_slower_of_disk_and_throttle() -> None:
    plain = {"verify_offloaded_bytes": 900, "decode_seconds": 1.0, "tokens_per_second": {"median": 9.0}}
    free = disk_figures([1000.0, 900.0, 1100.0], plain, sweep_bytes=100, throttle=None)
    assert free["plain_share_of_link"] == 0.9 and free["streamer_bytes_per_second"] == 900
    throttled = disk_figures([1000.0, 900.0, 1100.0], plain, sweep_bytes=100, throttle=950.0)
    assert throttled["plain_tokens_per_second_that_link_allows"] == 9.5


# --- the link ---


def test_every_engine_gets_the_same_rate_and_a_ratio_is_calibrated_on_the_one_that_drafts(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(4096))
    plain = FakeEngine(honest, files=[blob], plan=plan(resident=3, exit_layer=None))
    drafting = FakeEngine(honest, files=[blob, blob])
    found = internals.apply_throttle(
        Throttle(draft_steps_per_sweep=40.0), [plain, drafting], [[1, 2]], SamplingParams(max_new_tokens=32)
    )
    rate = found["bytes_per_second"]
    assert rate == pytest.approx(drafting.plan.sweep_bytes / (40 * found["draft_step_seconds"]))
    assert plain.target.bank.streamer.reader.rate == drafting.target.bank.streamer.reader.rate == rate
    assert found["simulated"] is True


def test_a_ratio_without_layers_on_disk_is_refused() -> None:
    resident = FakeEngine(honest, plan=plan(resident=4))
    with pytest.raises(EesdError, match="layers on disk"):
        internals.apply_throttle(Throttle(draft_steps_per_sweep=40.0), [resident], [[1]], SamplingParams())


def test_the_stopwatch_notes_every_step_but_not_the_time_between_rounds() -> None:
    watch = internals.Stopwatch(3)
    for _ in range(2):
        watch.begin(limit=8)
        while watch.go_on():
            watch.drafted(0.5)
    assert len(watch.seconds) == 6


# --- the disk ---


def test_the_raw_rate_reads_whole_files_of_any_size(tmp_path: Path) -> None:
    sizes = [4096, BLOCK_BYTES + 8192, 5000]
    files = [tmp_path / str(size) for size in sizes]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(bytes(size))
    found = raw_rate(files, seconds=0.0)
    assert found.bytes_read == sum(sizes)
    assert found.bytes_per_second > 0 and found.method in ("O_DIRECT", "fadvise")


def test_the_disks_rate_over_several_turns_is_their_bytes_over_their_seconds() -> None:
    turns = [DiskRate(1000, 1.0, "O_DIRECT"), DiskRate(3000, 1.0, "O_DIRECT"), DiskRate(2000, 4.0, "O_DIRECT")]
    assert mean_rate(turns) == 1000.0 and turns[1].bytes_per_second == 3000.0


def test_an_unreadable_or_empty_blob_is_an_error_and_not_a_rate(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(StreamError, match="empty"):
        raw_rate([empty], seconds=0.0)
    with pytest.raises(StreamError, match="gone"):
        raw_rate([tmp_path / "gone"], seconds=0.0)


# --- all of it ---


def field_of(engine: FakeEngine) -> Field:
    return Field(engine, engine, {"plain": {}})


def test_the_report_has_every_promised_key_and_is_json(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(8192))
    report = measure(settings(), course(), field_of(FakeEngine(honest, files=[blob])), no_progress)
    assert list(report["controllers"]) == ["off", "fixed:4", "calibrated"]
    for figures in report["controllers"].values():
        assert set(PER_CONTROLLER) <= set(figures)
    assert {"plans", "versions", "machine", "disk", "throttle", "baselines", "settings"} <= set(report)
    assert {"raw_bytes_per_second", "streamer_bytes_per_second"} <= set(report["disk"])
    assert all_identical(report)
    json.dumps(report, allow_nan=False)
    table = render({"model": {"name": "m"}, **report})
    assert "plain" in table and "calibrated" in table and "NO" not in table.split("\n", 1)[1]


@pytest.mark.parametrize("throttle", ["50MB/s", "sweep=40"])
def test_a_simulated_link_is_called_so_however_it_was_asked_for(tmp_path: Path, throttle: str) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(8192))
    asked = replace(settings(), throttle=Throttle.parse(throttle))
    report = measure(asked, course(), field_of(FakeEngine(honest, files=[blob])), no_progress)
    assert "simulated link" in render({"model": {"name": "m"}, **report})


def test_a_controller_that_changes_the_text_is_shown_as_not_identical() -> None:
    def liar(controller: str, prompt: Any, position: int) -> int:
        return honest(controller, prompt, position) + (controller == "fixed:4" and prompt[0] == 2 and position == 5)

    report = measure(settings(), course(), field_of(FakeEngine(liar)), no_progress)
    assert not all_identical(report)
    figures = report["controllers"]["fixed:4"]
    assert figures["first_difference"] == {"repeat": 0, "prompt": 2, "token": 5}
    assert "NO" in render({"model": {"name": "m"}, **report})


def opened(asked: BenchSettings) -> tuple[Field, list[dict[str, Any]], list[FakeEngine]]:
    options_seen, engines = [], []

    def open_engine(model: str, options: dict[str, Any], progress: Any) -> FakeEngine:
        options_seen.append(options)
        engines.append(FakeEngine(honest))
        return engines[-1]

    with ExitStack() as stack:
        found = open_field(asked, 256, no_progress, open_engine=open_engine, stack=stack)
        assert not any(engine.closed for engine in engines)
    assert all(engine.closed for engine in engines)
    return found, options_seen, engines


def test_with_one_split_plain_decoding_runs_on_the_engine_of_the_others() -> None:
    found, options, engines = opened(settings(resident_layers=10, exit_layer=10))
    assert len(engines) == 1 and found.plain is found.drafting
    assert options[0]["resident_layers"] == 10 and options[0]["exit_layer"] == 10


def test_with_one_memory_plain_decoding_gets_an_engine_without_head_and_the_same_bytes() -> None:
    found, options, engines = opened(settings(device_memory=1 << 20, exit_layer=10))
    assert len(engines) == 2 and found.plain is not found.drafting
    assert options[0]["head"] == "off" and options[1]["exit_layer"] == 10
    assert options[0]["device_memory"] == options[1]["device_memory"] == 1 << 20
    assert options[0]["context"] == options[1]["context"]


def test_plain_decoding_alone_needs_no_head() -> None:
    found, options, _ = opened(settings(controllers=("off",), exit_layer=10))
    assert options == [found.options["plain"]] and options[0]["head"] == "off"
