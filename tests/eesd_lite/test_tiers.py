"""Plans over four tiers: host memory between device and disk, streamed or computed by the CPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_lite.errors import BudgetError
from eesd_lite.placement import Plan, PlanRequest, make_plan
from eesd_lite.plan_cost import Rates, sweep_cost
from eesd_lite.tiers import DISK, HOST_COMPUTE, HOST_MODES, HOST_STREAM, TIERS, best_plan, draft_capable

# Eight layers of 100 bytes, 1 byte of KV per layer and token, a context of 10 tokens and 2 drafted ones.
EIGHT = PlanRequest(
    layer_bytes=(100,) * 8,
    kv_bytes_per_token=1,
    rope_bytes_per_token=2,
    context=10,
    draft_slack=2,
    embedding_bytes=50,
    lm_head_bytes=40,
    norm_bytes=3,
    head_bytes=70,
    scratch_bytes=7,
    scratch_bytes_per_token=1,
    reserve_bytes=20,
    ring_slots=2,
    exit_layer=2,
    device_memory=1000,
    resident_layers=None,
    host_memory=10_000,
)
# Drafting: 50 + 40 + 3 + 24 (rope) + 70 + 12 (head KV) + 96 (KV) + 7 + 10 (scratch) + 20 = 332 beside layers and ring.


def test_what_the_device_lacks_is_streamed_from_host_memory() -> None:
    plan = make_plan(EIGHT)
    assert plan.tiers == ("device",) * 4 + ("host-stream",) * 4
    assert plan.total_bytes == 332 + 400 + 200 and plan.ring_slots == 2
    assert plan.host_items == (("layers to stream", 400),) and plan.host_total_bytes == 400
    assert (plan.sweep_bytes, plan.host_ring_slots) == (400, 0)


def test_what_the_host_lacks_is_on_disk_evenly_spread_and_passes_through_a_ring_in_host_memory() -> None:
    less = replace(EIGHT, resident_layers=2, host_memory=600, host_reserve_bytes=30)
    plan = make_plan(less)
    assert plan.tiers == ("device",) * 2 + (HOST_STREAM, DISK) * 3
    assert dict(plan.host_items) == {"layers to stream": 300, "disk ring": 200, "reserve": 30}
    assert (plan.sweep_bytes, plan.tier_bytes(DISK), plan.host_ring_slots) == (600, 300, 2)
    # With one or two layers on disk their slots would eat what is won, so the next step down from none is three.
    on_disk = [make_plan(replace(less, host_memory=n)).tiers.count(DISK) for n in (630, 629, 530, 529)]
    assert on_disk == [0, 3, 3, 4]


def test_layers_that_the_cpu_multiplies_take_their_keys_and_values_with_them() -> None:
    plan = make_plan(replace(EIGHT, host_mode="compute"))
    # Nothing is streamed, so no ring: 332 - 12 of KV per layer that is computed, and six layers stay.
    assert plan.tiers == ("device",) * 6 + ("host-compute",) * 2
    assert plan.total_bytes == 332 - 24 + 600 and plan.ring_slots == 0 and plan.sweep_bytes == 0
    assert dict(plan.host_items) == {"layers to compute": 200, "KV cache": 24, "rope tables": 24, "scratch": 17}


def test_a_balance_gives_link_and_cpu_equal_time_and_mixes_them() -> None:
    plan = make_plan(replace(EIGHT, resident_layers=2, host_mode="auto", link_rate=20, host_rate=10))
    assert (plan.tiers.count(HOST_STREAM), plan.tiers.count(HOST_COMPUTE)) == (4, 2)
    assert plan.tiers[2:] == (HOST_STREAM, HOST_COMPUTE, HOST_STREAM, HOST_STREAM, HOST_COMPUTE, HOST_STREAM)
    cost = sweep_cost(plan, Rates(link=20, host=10, disk=1))
    assert cost.link_seconds == cost.host_seconds == cost.seconds == 20.0
    assert cost.tokens_per_second(2.5) == 0.125
    other = make_plan(replace(EIGHT, resident_layers=2, host_mode="auto", link_rate=1, host_rate=10**9))
    assert other.tiers.count(HOST_COMPUTE) == 6


def test_a_sweep_costs_the_slowest_of_disk_link_and_cpu() -> None:
    plan = make_plan(replace(EIGHT, resident_layers=2, host_memory=500))
    cost = sweep_cost(plan, Rates(link=100, disk=10, host=1))
    assert (cost.disk_bytes, cost.link_bytes, cost.host_bytes) == (300, 600, 0)
    assert (cost.disk_seconds, cost.link_seconds, cost.seconds) == (30.0, 6.0, 30.0)
    assert sweep_cost(plan, Rates(link=None, disk=10)).link_bytes == 0
    everything = make_plan(replace(EIGHT, device_memory=None))
    assert sweep_cost(everything, Rates()).tokens_per_second(3) is None


def test_a_host_that_cannot_even_pass_layers_through_is_named_with_the_missing_bytes() -> None:
    with pytest.raises(BudgetError, match=r"host memory of 150 B is 50 bytes too small.*at least 200 B") as error:
        make_plan(replace(EIGHT, host_memory=150))
    assert "\n" not in str(error.value)
    assert make_plan(replace(EIGHT, host_memory=200)).tiers.count(DISK) == 4
    assert make_plan(replace(EIGHT, host_memory=0, device_memory=None)).host_items == ()  # nothing has to pass


def test_a_big_piece_that_cannot_be_split_does_not_keep_later_layers_out() -> None:
    """Layers of 10 MB in 4 bit, an lm_head of 120 MB, 200 MB: sizes as stored, and the rest filled with layers."""
    mb = 10**6
    request = PlanRequest(
        layer_bytes=(10 * mb,) * 16, kv_bytes_per_token=0, context=8, draft_slack=0, embedding_bytes=0,
        lm_head_bytes=120 * mb, norm_bytes=0, head_bytes=0, scratch_bytes=0, ring_slots=2, exit_layer=None,
        device_memory=200 * mb, resident_layers=None,
    )  # fmt: skip
    plan = make_plan(request)
    assert plan.resident_layers == 6 and plan.total_bytes == 120 * mb + 6 * 10 * mb + 2 * 10 * mb == 200 * mb


def test_what_drafting_needs_is_the_last_to_leave_the_device() -> None:
    draft_set = {"embedding": 50, "lm_head": 40, "norms": 3, "exit head": 70, "exit head KV cache": 12}
    drafting = []
    for budget in range(1300, 0, -1):
        plan = best_plan(replace(EIGHT, device_memory=budget), 2)
        if plan is None:
            break
        assert draft_set.items() <= dict(plan.items).items() and plan.resident_layers >= 2
        drafting.append(budget)
    smallest = drafting[-1]
    assert smallest == 332 + 200 + 200  # the exit's two layers, the smallest ring, and nothing else
    off = make_plan(replace(EIGHT, device_memory=smallest - 1))
    assert off.exit_layer is None
    assert off.notes == ("speculation off: needs 1 bytes more; a context of 9 or exit layer 1 or below would fit",)


def test_a_longer_context_leaves_fewer_layers_on_the_device() -> None:
    resident = [make_plan(replace(EIGHT, context=context)).resident_layers for context in (5, 10, 20, 40)]
    assert resident == sorted(resident, reverse=True) and resident[0] > resident[-1]


def test_the_exit_layers_that_can_draft_are_those_for_which_a_plan_exists() -> None:
    for budget in (500, 732, 800, 900, 1300):
        request = replace(EIGHT, device_memory=budget)
        capable = [n for n in range(1, 8) if make_plan(replace(request, exit_layer=n)).exit_layer == n]
        assert list(draft_capable(request)) == capable, budget
    assert list(draft_capable(replace(EIGHT, resident_layers=3))) == [1, 2, 3]


REQUESTS = st.builds(
    PlanRequest,
    layer_bytes=st.lists(st.integers(1, 200), min_size=1, max_size=10).map(tuple),
    kv_bytes_per_token=st.integers(0, 5),
    rope_bytes_per_token=st.integers(0, 3),
    context=st.integers(1, 40),
    draft_slack=st.integers(0, 8),
    embedding_bytes=st.integers(0, 100),
    lm_head_bytes=st.integers(0, 100),
    norm_bytes=st.integers(0, 10),
    head_bytes=st.integers(0, 300),
    scratch_bytes=st.integers(0, 50),
    scratch_bytes_per_token=st.integers(0, 3),
    reserve_bytes=st.integers(0, 50),
    host_reserve_bytes=st.integers(0, 50),
    ring_slots=st.integers(1, 5),
    exit_layer=st.none() | st.just(1),
    device_memory=st.none() | st.integers(0, 3000),
    resident_layers=st.none(),
    host_memory=st.none() | st.integers(0, 2000),
    host_mode=st.sampled_from(HOST_MODES),
    link_rate=st.integers(1, 50),
    host_rate=st.integers(1, 50),
)


def check(request: PlanRequest, plan: Plan) -> None:
    """Independent sums over the tiers of a plan."""
    assert len(plan.tiers) == len(request.layer_bytes) and set(plan.tiers) <= set(TIERS)
    assert all((tier == "device") == (n < plan.resident_layers) for n, tier in enumerate(plan.tiers))
    assert plan.total_bytes == sum(size for _, size in plan.items)
    assert plan.host_total_bytes == sum(size for _, size in plan.host_items)
    assert request.device_memory is None or plan.total_bytes <= request.device_memory
    assert plan.host_total_bytes <= (request.host_memory or 0)
    by_tier = {
        tier: sum(b for b, t in zip(request.layer_bytes, plan.tiers, strict=True) if t == tier) for tier in TIERS
    }
    device, host = dict(plan.items), dict(plan.host_items)
    assert device.get("resident layers", 0) == by_tier["device"]
    assert host.get("layers to stream", 0) == by_tier["host-stream"]
    assert host.get("layers to compute", 0) == by_tier["host-compute"]
    assert plan.sweep_bytes == by_tier["host-stream"] + by_tier["disk"]
    tokens = request.context + (request.draft_slack if plan.exit_layer is not None else 0)
    caches = device.get("KV cache", 0) + host.get("KV cache", 0)
    assert caches == request.kv_bytes_per_token * tokens * len(plan.tiers)
    assert plan.resident_layers >= (plan.exit_layer or 0)
    if request.host_memory is None:
        assert by_tier["host-stream"] == by_tier["host-compute"] == 0


@settings(max_examples=150)
@given(REQUESTS)
def test_any_request_yields_a_plan_that_fits_or_an_error_that_names_missing_bytes(request: PlanRequest) -> None:
    try:
        plan = make_plan(request)
    except BudgetError as error:
        message = str(error)
        found = re.search(r" is (?:[\d.]+ \w+ \()?(\d+) bytes\)? too small", message)
        assert found is not None and "\n" not in message, message
        missing = int(found[1])
        assert missing > 0
        larger = request
        if message.startswith("the host memory"):
            larger = replace(request, host_memory=(request.host_memory or 0) + missing)
        elif request.host_memory is None:  # else the host may lack something too
            larger = replace(request, device_memory=(request.device_memory or 0) + missing)
        if larger is not request:
            check(larger, make_plan(larger))
    else:
        check(request, plan)
