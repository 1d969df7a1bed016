"""Plans by hand-computed bytes: what is allocated is what was planned, and the budget is never exceeded."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eesd_lite.errors import BudgetError, ModelError
from eesd_lite.placement import Plan, PlanRequest, make_plan

# Six layers of 100 bytes, 1 byte of KV per layer and token, a context of 10 tokens and 2 drafted ones.
SMALL = PlanRequest(
    layer_bytes=(100,) * 6,
    kv_bytes_per_token=1,
    context=10,
    draft_slack=2,
    embedding_bytes=50,
    lm_head_bytes=40,
    norm_bytes=3,
    head_bytes=70,
    scratch_bytes=7,
    ring_slots=2,
    exit_layer=2,
    device_memory=None,
    resident_layers=None,
)
# Drafting always needs 50 + 40 + 3 + 70 + 12 (head KV) + 72 (KV) + 7 = 254, plain 50 + 40 + 3 + 60 + 7 = 160.


def test_without_a_limit_everything_is_resident_and_nothing_is_streamed() -> None:
    assert make_plan(SMALL) == Plan(
        tiers=("device",) * 6,
        resident_layers=6,
        exit_layer=2,
        context=10,
        ring_slots=0,
        items=(
            ("embedding", 50),
            ("lm_head", 40),
            ("norms", 3),
            ("exit head", 70),
            ("exit head KV cache", 12),
            ("KV cache", 72),
            ("scratch", 7),
            ("resident layers", 600),
        ),
        total_bytes=854,
        sweep_bytes=0,
        layer_bytes=(100,) * 6,
    )


def test_a_draft_vocabulary_takes_its_bytes_where_there_is_drafting() -> None:
    request = replace(SMALL, draft_vocabulary_bytes=9)
    plan = make_plan(request)
    assert ("draft vocabulary", 9) in plan.items and plan.total_bytes == 854 + 9
    plain = make_plan(replace(request, exit_layer=None))
    assert "draft vocabulary" not in dict(plain.items)
    # 254 and a ring of two layers beside two resident ones: a byte less, and drafting is given up.
    assert make_plan(replace(request, device_memory=254 + 9 + 400)).exit_layer == 2
    assert make_plan(replace(request, device_memory=254 + 9 + 399)).exit_layer is None


def test_layers_that_do_not_fit_are_on_disk_behind_a_ring_of_two() -> None:
    assert make_plan(replace(SMALL, device_memory=760)) == Plan(
        tiers=("device", "device", "device", "disk", "disk", "disk"),
        resident_layers=3,
        exit_layer=2,
        context=10,
        ring_slots=2,
        items=(
            ("embedding", 50),
            ("lm_head", 40),
            ("norms", 3),
            ("exit head", 70),
            ("exit head KV cache", 12),
            ("KV cache", 72),
            ("scratch", 7),
            ("stream ring", 200),
            ("resident layers", 300),
        ),
        total_bytes=754,
        sweep_bytes=300,
        layer_bytes=(100,) * 6,
    )


def test_a_tied_lm_head_costs_nothing() -> None:
    plan = make_plan(replace(SMALL, lm_head_bytes=0, device_memory=720))
    assert (plan.total_bytes, plan.resident_layers) == (714, 3)
    assert "lm_head" not in dict(plan.items)


def test_plain_decoding_uses_the_heads_bytes_for_layers() -> None:
    plan = make_plan(replace(SMALL, exit_layer=None, device_memory=760))
    assert plan == Plan(
        tiers=("device",) * 6,
        resident_layers=6,
        exit_layer=None,
        context=10,
        ring_slots=0,
        items=(
            ("embedding", 50),
            ("lm_head", 40),
            ("norms", 3),
            ("KV cache", 60),
            ("scratch", 7),
            ("resident layers", 600),
        ),
        total_bytes=760,
        sweep_bytes=0,
        layer_bytes=(100,) * 6,
    )


def test_resident_layers_come_before_a_bigger_ring() -> None:
    plan = make_plan(replace(SMALL, ring_slots=4, device_memory=254 + 500))
    assert (plan.resident_layers, plan.ring_slots) == (3, 2)
    # With the split fixed by hand, spare bytes do make the ring bigger.
    by_hand = make_plan(replace(SMALL, ring_slots=4, device_memory=254 + 500, resident_layers=2))
    assert (by_hand.resident_layers, by_hand.ring_slots, by_hand.total_bytes) == (2, 3, 754)


def test_the_last_layers_move_in_together_because_their_ring_goes_away() -> None:
    """Four resident layers and a ring of two cost what six resident layers cost."""
    assert make_plan(replace(SMALL, device_memory=853)).resident_layers == 3
    assert make_plan(replace(SMALL, device_memory=854)).resident_layers == 6


def test_a_ring_slot_holds_the_largest_layer_on_disk() -> None:
    plan = make_plan(replace(SMALL, layer_bytes=(900, 10, 20, 30, 25), exit_layer=2, resident_layers=2))
    assert dict(plan.items)["stream ring"] == 60
    assert plan.sweep_bytes == 75


def test_no_ring_has_more_slots_than_layers_on_disk() -> None:
    plan = make_plan(replace(SMALL, ring_slots=4, resident_layers=5))
    assert (plan.ring_slots, dict(plan.items)["stream ring"]) == (1, 100)


def test_a_split_by_hand_is_kept_exactly() -> None:
    plan = make_plan(replace(SMALL, resident_layers=4))
    assert plan.tiers == ("device",) * 4 + ("disk",) * 2
    assert plan.total_bytes == 254 + 400 + 200


def test_plain_decoding_may_stream_every_layer() -> None:
    plan = make_plan(replace(SMALL, exit_layer=None, resident_layers=0))
    assert (plan.tiers, plan.sweep_bytes, plan.total_bytes) == (("disk",) * 6, 600, 160 + 200)


def test_a_split_by_hand_below_the_exit_layer_is_refused() -> None:
    with pytest.raises(BudgetError, match="exit layer 2 needs 2 resident layers, but 1 were asked for"):
        make_plan(replace(SMALL, resident_layers=1))
    assert make_plan(replace(SMALL, resident_layers=1, exit_layer=None)).resident_layers == 1


def test_a_split_or_an_exit_beyond_the_model_is_refused() -> None:
    with pytest.raises(BudgetError, match="7 resident layers .* has 6 layers"):
        make_plan(replace(SMALL, resident_layers=7))
    with pytest.raises(ModelError, match="exit layer 7: this model has 6 layers"):
        make_plan(replace(SMALL, exit_layer=7))


def test_drafting_that_does_not_fit_is_given_up_with_the_missing_bytes() -> None:
    assert make_plan(replace(SMALL, device_memory=654)).exit_layer == 2
    plan = make_plan(replace(SMALL, device_memory=653))
    assert plan.exit_layer is None
    assert plan.resident_layers == 2
    assert plan.notes == ("speculation off: needs 1 bytes more; a context of 9 or exit layer 1 or below would fit",)
    assert make_plan(replace(SMALL, device_memory=653, context=9)).exit_layer == 2
    assert make_plan(replace(SMALL, device_memory=653, exit_layer=1)).exit_layer == 1


def test_a_model_without_a_head_says_that_it_does_not_draft() -> None:
    plan = make_plan(replace(SMALL, head_bytes=0))
    assert (plan.exit_layer, plan.notes) == (None, ("speculation off: there is no exit head",))


def test_a_budget_too_small_for_plain_decoding_names_bytes_and_what_would_fit() -> None:
    with pytest.raises(BudgetError) as error:
        make_plan(replace(SMALL, device_memory=350))
    assert str(error.value) == (
        "the memory budget of 350 B is 10 bytes too small: a context of 10 needs at least 360 B without drafting; "
        "a context of 8 would fit"
    )
    assert make_plan(replace(SMALL, device_memory=350, context=8)).exit_layer is None
    with pytest.raises(BudgetError):
        make_plan(replace(SMALL, device_memory=350, context=9))


def test_a_budget_that_no_context_fits_says_so() -> None:
    with pytest.raises(BudgetError, match="260 bytes too small: .*no shorter context would fit"):
        make_plan(replace(SMALL, device_memory=100))
    with pytest.raises(BudgetError, match="and 5 resident layers .*fewer resident layers"):
        make_plan(replace(SMALL, device_memory=300, resident_layers=5))


REQUESTS = st.builds(
    PlanRequest,
    layer_bytes=st.lists(st.integers(1, 200), min_size=1, max_size=8).map(tuple),
    kv_bytes_per_token=st.integers(0, 5),
    context=st.integers(1, 40),
    draft_slack=st.integers(0, 8),
    embedding_bytes=st.integers(0, 100),
    lm_head_bytes=st.integers(0, 100),
    norm_bytes=st.integers(0, 10),
    head_bytes=st.integers(0, 300),
    scratch_bytes=st.integers(0, 50),
    ring_slots=st.integers(1, 5),
    exit_layer=st.none() | st.just(1),
    device_memory=st.integers(0, 3000),
    resident_layers=st.none(),
)


def plan_or_none(request: PlanRequest) -> Plan | None:
    try:
        return make_plan(request)
    except BudgetError as error:
        assert "\n" not in str(error)
        return None


@given(REQUESTS, st.integers(0, 8))
def test_every_plan_keeps_its_budget_and_its_sums(request_: PlanRequest, resident: int) -> None:
    for wish in (request_, replace(request_, resident_layers=resident)):
        plan = plan_or_none(wish)
        if plan is None:
            continue
        assert wish.device_memory is not None
        assert plan.total_bytes == sum(size for _, size in plan.items) <= wish.device_memory
        assert plan.tiers == ("device",) * plan.resident_layers + ("disk",) * (len(plan.tiers) - plan.resident_layers)
        assert plan.sweep_bytes == sum(wish.layer_bytes[plan.resident_layers :])
        assert (plan.ring_slots > 0) == (plan.sweep_bytes > 0)
        assert plan.resident_layers >= (plan.exit_layer or 0)


@given(REQUESTS, st.integers(1, 500))
def test_more_memory_never_makes_a_plan_worse(request_: PlanRequest, more: int) -> None:
    assert request_.device_memory is not None
    small = plan_or_none(request_)
    large = plan_or_none(replace(request_, device_memory=request_.device_memory + more))
    if small is None:
        return
    assert large is not None
    if small.exit_layer is not None:
        assert large.exit_layer is not None
    if small.exit_layer == large.exit_layer:  # a plan that begins to draft gives layers up for the head
        assert large.resident_layers >= small.resident_layers
        assert large.sweep_bytes <= small.sweep_bytes


@given(REQUESTS)
def test_what_a_refusal_says_would_fit_does_fit(request_: PlanRequest) -> None:
    try:
        make_plan(request_)
    except BudgetError as error:
        words = str(error).split()
        if "a context of" in str(error).split(";")[1]:
            context = int(words[words.index("would") - 1])
            assert make_plan(replace(request_, context=context))
            assert plan_or_none(replace(request_, context=context + 1)) is None
