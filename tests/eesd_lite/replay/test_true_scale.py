"""Costs at true scale follow from the plan and the card, by hand."""

from __future__ import annotations

import pytest

from eesd_lite.errors import TraceError
from eesd_lite.replay.true_scale import CARDS, Card, find_scale, make_card, plan_at_scale, scale_curve
from models.shapes import find_shape

THIRD = {"exit_layer": 10, "layers": 30}


def test_a_rounds_parts_by_hand() -> None:
    card = Card(memory_rate=1e15, operations=1e18, layer_seconds=0.001, link_rate=10e9)  # launching and the link only
    planned = plan_at_scale("llama-2-70b@24gb", THIRD, card)
    assert planned.plan.exit_layer == 26 and planned.plan.host_total_bytes > 0
    curve = scale_curve(planned, card, "x")
    assert curve.lower(1) == pytest.approx(0.026, rel=0.01) and curve.head(8) == pytest.approx(0.001, rel=0.01)
    between = planned.plan.resident_layers - 26
    assert curve.verify(1) == pytest.approx(planned.plan.sweep_bytes / 10e9 + 0.001 * between, rel=0.01)


def test_few_rows_cost_the_reading_of_weights_and_many_the_multiplying() -> None:
    card = Card(memory_rate=100e9, operations=1e12, layer_seconds=0.0)
    planned = plan_at_scale("llama-2-13b@8gb", THIRD, card)
    curve = scale_curve(planned, card, "x")
    layers, shape = planned.plan.layer_bytes[:13], find_shape("llama-2-13b")
    assert curve.lower(1) == pytest.approx(sum(layers) / 100e9)
    square, wide = shape.hidden_size**2, shape.hidden_size * shape.intermediate_size
    assert curve.lower(64) == pytest.approx(13 * 64 * 2 * (4 * square + 3 * wide) / 1e12)


def test_a_depth_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(TraceError, match="exit 20 of 30 is exit 53 of 80, which does not fit; exits 1 to 42"):
        plan_at_scale("llama-2-70b@24gb", {"exit_layer": 20, "layers": 30}, make_card("llama-2-70b@24gb"))
    for name in ("llama-2-70b", "@24gb", "llama-2-70b@2tb"):
        with pytest.raises(TraceError, match="SHAPE@PRESET"):
            find_scale(name)


def test_what_the_user_knows_better_replaces_the_defaults() -> None:
    card = make_card("llama-2-13b@8gb", link_rate=6e9, device_tflops=5, layer_time=0.0)
    assert card == Card(memory_rate=CARDS["8gb"][0], operations=5e12, layer_seconds=0.0, link_rate=6e9)
