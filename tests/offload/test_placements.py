"""Every mixture of tiers: the same ids as with everything on the device, and bytes that close. Tiny models.

A placement is given through a saved plan, the way in which a user repeats one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eesd_lite import SamplingParams
from eesd_lite.allocated import allocated_bytes
from eesd_lite.engine import Engine
from eesd_lite.errors import BudgetError, EesdError, StreamError
from eesd_lite.layer_bank import HostLayer
from eesd_lite.tiers import DEVICE, DISK, HOST_COMPUTE, HOST_STREAM, TIERS
from tests.puppets import all_puppets, assert_caches_are_those_of, caches, drafting, ids_of, plain_ids
from tests.readers import WatchedReader, fail_at
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=6)
EXIT = 2
PROMPT = list(b"A tier for every layer")
DRAFTS: dict[str, Any] = {"head": "random", "exit_layer": EXIT, "draft_limit": 6}
TinyOf = Callable[[TinySpec], Tiny]
EngineOf = Callable[..., Engine]
MIXED = (DEVICE, DEVICE, DISK, HOST_STREAM, HOST_COMPUTE, DISK)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 20, "ignore_eos": True, **changes})


SAMPLED = params(temperature=0.9, seed=11)


def open_with(tiny: Tiny, folder: Path, tiers: Sequence[str], **options: Any) -> Engine:
    """An engine with exactly these tiers."""
    path = folder / "plan.json"
    if not path.exists():
        tiny.engine(**DRAFTS, plan_file=path).close()  # writes the plan that we then change
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "tiers": list(tiers)}))
    return tiny.engine(**{**DRAFTS, **options}, plan_file=path)


def moved(tiers: Sequence[str]) -> list[int]:
    return [index for index, tier in enumerate(tiers) if tier in (DISK, HOST_STREAM)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(beyond=st.lists(st.sampled_from(TIERS), min_size=4, max_size=4), controller=st.sampled_from(["fixed:3", "beta"]))
def test_any_mixture_of_tiers_emits_the_ids_of_the_resident_model_and_moves_the_bytes_it_planned(
    tiny_of: TinyOf, engine_of: EngineOf, tmp_path: Path, beyond: list[str], controller: str
) -> None:
    tiers = (DEVICE,) * EXIT + tuple(beyond)
    resident = engine_of(SPEC, **DRAFTS)
    expected = [plain_ids(resident, PROMPT, how) for how in (params(), SAMPLED)]
    with open_with(tiny_of(SPEC), tmp_path, tiers) as engine:
        assert engine.plan.tiers == tiers
        for how, ids in zip((params(), SAMPLED), expected, strict=True):
            for name in ("off", controller):
                engine.reset()
                engine.set_controller(name)
                before = engine.target.bank.streamed_bytes
                sweeps = engine.stats.sweeps
                assert ids_of(engine, PROMPT, how) == ids
                per_sweep = sum(engine.target.bank.layer_bytes[index] for index in moved(tiers))
                assert per_sweep == engine.plan.sweep_bytes
                assert engine.target.bank.streamed_bytes - before == per_sweep * (engine.stats.sweeps - sweeps)
        assert engine.stats.draft_offloaded_bytes == 0 and engine.stats.balanced()


@pytest.mark.parametrize("how", [params(), SAMPLED], ids=["greedy", "sampled"])
def test_puppets_draft_over_mixed_tiers_without_changing_a_token_or_a_cache(
    tiny_of: TinyOf, engine_of: EngineOf, tmp_path: Path, how: SamplingParams
) -> None:
    ids = plain_ids(engine_of(SPEC, **DRAFTS), PROMPT, how)
    with open_with(tiny_of(SPEC), tmp_path, MIXED, controller="fixed:4") as engine:
        for name, proposal in all_puppets(PROMPT + ids, engine.config.vocab_size).items():
            engine.reset()
            with drafting(engine, proposal):
                assert ids_of(engine, PROMPT, how) == ids, name
            held = list(engine.cached_ids)
            assert_caches_are_those_of(engine, held, caches(engine, len(held)))


def test_tiers_are_where_the_plan_says_and_take_the_bytes_it_says(tiny_of: TinyOf, tmp_path: Path) -> None:
    with open_with(tiny_of(SPEC), tmp_path, MIXED) as engine:
        bank = engine.target.bank
        assert isinstance(bank.layer(4), HostLayer) and set(bank.fixed) == {0, 1, 4}
        assert bank.streamer is not None and bank.streamer.layers == (2, 3, 5) and set(bank.streamer.host) == {3}
        found = allocated_bytes(engine)
        planned = {name: size for name, size in engine.plan.items if name not in ("scratch", "reserve")}
        assert found["device"] == planned
        on_host = dict(engine.plan.host_items)
        shared = ("rope tables", "scratch")  # on a CPU engine the host's are the device's
        assert found["host"] == {name: size for name, size in on_host.items() if name not in shared}


def test_host_memory_keeps_layers_from_the_disk_and_the_mode_says_how_they_are_used(
    tiny_of: TinyOf, engine_of: EngineOf
) -> None:
    ids = plain_ids(engine_of(SPEC, **DRAFTS), PROMPT, params())
    for mode, tier in (("stream", HOST_STREAM), ("compute", HOST_COMPUTE), ("auto", HOST_COMPUTE)):
        options = {**DRAFTS, "resident_layers": EXIT, "host_memory": "1GiB", "host_mode": mode}
        with tiny_of(SPEC).engine(**options) as engine:
            assert engine.plan.tiers == (DEVICE,) * EXIT + (tier,) * 4, mode
            assert ids_of(engine, PROMPT, params()) == ids
    with pytest.raises(EesdError, match="host_mode must be one of stream, compute, auto, not 'swap'"):
        tiny_of(SPEC).engine(**DRAFTS, host_mode="swap")


def test_a_saved_plan_is_repeated_and_refused_for_another_model_or_kernel(tiny_of: TinyOf, tmp_path: Path) -> None:
    tiny, path = tiny_of(SPEC), tmp_path / "plan.json"
    with tiny.engine(**DRAFTS, resident_layers=3, plan_file=path) as first:
        tiers = first.plan.tiers
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.json"]
    with tiny.engine(**DRAFTS, plan_file=path) as second:
        assert second.plan.tiers == tiers == (DEVICE,) * 3 + (DISK,) * 3
    with pytest.raises(BudgetError, match="plan.json: a plan with 3 resident layers, but 4 were asked for"):
        tiny.engine(**DRAFTS, resident_layers=4, plan_file=path)
    with pytest.raises(BudgetError, match="plan.json: made for kernels .* this run has"):
        tiny.engine(**DRAFTS, dtype="float32", plan_file=path)
    with pytest.raises(BudgetError, match="plan.json: a plan for 6 layers; this model has 7"):
        tiny_of(TinySpec(layers=7)).engine(**DRAFTS, plan_file=path)
    for text in ("", "[]", "{}", json.dumps({"format": 1, "kernels": "", "tiers": ["tape"] * 6})):
        path.write_text(text)
        with pytest.raises(BudgetError, match="plan.json: not a saved plan"):
            tiny.engine(**DRAFTS, plan_file=path)


def test_a_saved_plan_beyond_the_budget_or_without_room_to_draft_says_so(tiny_of: TinyOf, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="the memory budget of 100 KiB is .* too small"):
        open_with(tiny_of(SPEC), tmp_path, MIXED, device_memory="100KiB")
    with open_with(tiny_of(SPEC), tmp_path, (DEVICE, DISK, DEVICE, DISK, DEVICE, DISK)) as engine:
        assert engine.head is None and any("speculation off" in notice for notice in engine.notices)


@pytest.mark.parametrize("failing", [1, 4, 7])
def test_an_error_of_the_reader_surfaces_at_once_and_leaves_the_engine_usable(
    tiny_of: TinyOf, engine_of: EngineOf, tmp_path: Path, failing: int
) -> None:
    ids = plain_ids(engine_of(SPEC, **DRAFTS), PROMPT, params())
    with open_with(tiny_of(SPEC), tmp_path, MIXED, reader=WatchedReader(before=fail_at(failing))) as engine:
        with pytest.raises(StreamError, match=f"read {failing} failed on purpose"):
            ids_of(engine, PROMPT, params())
        engine.reset()
        assert ids_of(engine, PROMPT, params()) == ids


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_leaves_no_thread_and_no_open_file_and_engines_do_not_disturb_each_other(
    tiny_of: TinyOf, tmp_path: Path
) -> None:
    tiny = tiny_of(SPEC)
    open_with(tiny, tmp_path, MIXED).close()  # whatever is opened once for the process
    threads, files = threading.active_count(), open_files()
    for _ in range(3):
        with open_with(tiny, tmp_path, MIXED) as one, tiny.engine(**DRAFTS, resident_layers=EXIT) as other:
            streams = [engine.generate(PROMPT, SAMPLED) for engine in (one, other)]
            pairs = list(zip(*streams, strict=True))
            assert [a.token_id for a, _ in pairs] == [b.token_id for _, b in pairs]
        assert (threading.active_count(), open_files()) == (threads, files)
    with pytest.raises(EesdError, match="the engine is closed"):
        one.generate(PROMPT)
