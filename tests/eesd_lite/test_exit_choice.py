"""The choice of an exit layer: expected speeds recomputed by hand, and who wins when."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eesd_lite.engine import Engine
from eesd_lite.errors import BudgetError, EesdError, HeadError
from eesd_lite.exit_choice import check_exit, choose_exit, settle_exit
from eesd_lite.head_list import FORMAT, ON_ANSWERS, HeadFacts, expected_shares, read_head_facts
from eesd_lite.params import SamplingParams
from eesd_lite.plan_cost import Rates
from eesd_lite.planning import PlanWishes, plan_model
from eesd_lite.tiers import PlanRequest

# Eight layers, a head and a table of 100 bytes each, multiplied at 1000 bytes a second: 0.1 s for each of them.
REQUEST = PlanRequest(
    layer_bytes=(100,) * 8, kv_bytes_per_token=0, context=8, draft_slack=16, embedding_bytes=100, lm_head_bytes=0,
    norm_bytes=0, head_bytes=100, scratch_bytes=0, ring_slots=2, exit_layer=None, device_memory=None,
    resident_layers=4, staging=False,
)  # fmt: skip
HEADS = {2: 0.5, 4: 0.6}


def rates(disk: int, row: float = 0.0, **others: int) -> Rates:
    return Rates(link=None, disk=disk, device=1000, layer_time=0, token_time=0, row=row, **others)


def test_the_figures_of_an_exit_recomputed_by_hand() -> None:
    table = choose_exit(REQUEST, {2: HEADS[2]}, rates(disk=100))
    row = table.row(2)
    # A sweep of four layers takes 4 s, two of them while nobody waits. A step: two layers, head, lm_head.
    assert (row.sweep_bytes, row.sweep_seconds) == (400, 4.0)
    assert row.draft_step_seconds == pytest.approx(0.4)
    # Four drafts: 0.2 + 4 * 0.4 below the exit, 0.2 up to the split, 2 of the sweep, 0.1 of lm_head. A fifth adds 0.4.
    assert row.draft_length == 4 and row.round_seconds == pytest.approx(4.1)
    assert row.tau == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert row.tokens_per_second == pytest.approx(1.9375 / 4.1)
    # Plain: 0.4 of resident layers and 0.1 of lm_head hide as much of the sweep.
    assert table.plain.round_seconds == pytest.approx(0.4 + 3.5 + 0.1)
    assert table.plain.tokens_per_second == pytest.approx(0.25)


def test_rows_layers_and_a_draft_vocabulary_have_their_price() -> None:
    table = choose_exit(
        replace(REQUEST, draft_vocabulary_bytes=20), {2: HEADS[2]}, replace(rates(disk=400, row=0.5), layer_time=50_000)
    )
    row = table.row(2)
    # A layer takes 0.15 s with its 50 ms, lm_head of the draft vocabulary 0.02 s.
    assert row.draft_step_seconds == pytest.approx(2 * 0.15 + 0.15 + 0.02)
    # No draft pays: 0.3 below the exit, 0.3 up to the split, then four layers compute longer (0.6) than is waited, 0.1.
    assert row.draft_length == 0 and row.round_seconds == pytest.approx(0.3 + 0.3 + 0.6 + 0.1)
    one = choose_exit(replace(REQUEST, draft_slack=1), {2: 1.0}, rates(disk=400, row=0.5)).row(2)
    assert one.draft_length == 1 and one.tau == pytest.approx(2.0)
    assert one.round_seconds == pytest.approx(0.2 + 0.4 + 0.2 * 1.5 + max(1.0 - 0.5, 0.4 * 1.5) + 0.1)
    # 10 ms for every token that is drafted or emitted.
    slower = replace(rates(disk=400, row=0.5), token_time=10_000)
    chosen = choose_exit(replace(REQUEST, draft_slack=1), {2: 1.0}, slower).row(2)
    assert chosen.round_seconds == pytest.approx(one.round_seconds + 0.01 + 2 * 0.01)
    assert chosen.draft_step_seconds == pytest.approx(0.41)


def test_the_deeper_exit_wins_behind_a_long_sweep_and_the_shallow_one_behind_a_short_one() -> None:
    long = choose_exit(REQUEST, HEADS, rates(disk=10))
    assert long.chosen == 4 and long.row(4).tokens_per_second > long.row(2).tokens_per_second
    short = choose_exit(REQUEST, HEADS, rates(disk=400))
    # The sweep takes 1 s, half of it hidden. Exit 2, one draft: 0.4 + 0.4 + 0.5 + 0.1. Exit 4: 0.4 + 0.6 + 0.5 + 0.1.
    assert short.row(2).tokens_per_second == pytest.approx(1.5 / 1.4)
    assert short.row(4).tokens_per_second == pytest.approx(1.6 / 1.6)
    assert short.chosen == 2


def test_a_heads_bytes_can_cost_more_than_it_gains() -> None:
    assert choose_exit(REQUEST, HEADS, rates(disk=400)).chosen == 2  # the same split
    table = choose_exit(replace(REQUEST, resident_layers=None, device_memory=800), HEADS, rates(disk=400))
    # The same memory: table, two slots and five layers, or four layers and the head.
    assert [row.resident_layers for row in table.rows] == [5, 4, 4]
    # Of its sweep of 0.75 s a quarter of a second is waited for, which computing three layers (0.3 s) outlasts.
    assert table.plain.tokens_per_second == pytest.approx(1 / (0.5 + 0.3 + 0.1))
    assert table.chosen is None


def test_in_memory_nothing_beats_plain_decoding() -> None:
    table = choose_exit(replace(REQUEST, resident_layers=8), HEADS, rates(disk=400, row=0.35))
    assert table.chosen is None
    assert [row.draft_length for row in table.rows] == [0, 0, 0]
    assert table.plain.tokens_per_second == pytest.approx(1 / 0.9)


def test_a_card_verifies_many_rows_for_the_price_of_one_unless_it_is_said_otherwise() -> None:
    card = replace(REQUEST, staging=True, resident_layers=8)
    stated = Rates(layer_time=0, token_time=0)
    assert choose_exit(card, {4: 0.72}, stated).row(4).draft_length > 0
    assert choose_exit(card, {4: 0.72}, replace(stated, row=1.0)).row(4).draft_length == 0
    # 100 bytes in each of ten parts, at 400 GB/s.
    assert choose_exit(card, {4: 0.72}, stated).plain.round_seconds == pytest.approx(900 / 400e9)


def test_more_resident_layers_than_there_are_leave_no_exit_to_choose() -> None:
    table = choose_exit(replace(REQUEST, resident_layers=9), HEADS, rates(disk=100))
    assert table.chosen is None and all(row.note == "does not fit" for row in table.rows)


def test_what_cannot_be_chosen_says_why() -> None:
    tight = replace(REQUEST, resident_layers=None, device_memory=650)
    table = choose_exit(tight, {2: None, 3: 1.0, 5: 1.0}, rates(disk=10))
    assert [row.note for row in table.rows] == [
        "",
        "the head does not say how often it is right",
        "needs 50 B more",
        "needs 250 B more",
    ]
    assert table.chosen is None
    fixed = choose_exit(replace(REQUEST, resident_layers=3), HEADS, rates(disk=10))
    assert fixed.row(4).note == "only 3 resident layers" and fixed.chosen == 2


def head_file(path: Path, **metadata: str) -> Path:
    header = json.dumps({"__metadata__": {"format": FORMAT, "exit_layer": "3", **metadata}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def test_counts_on_answers_come_before_the_agreement_on_text_of_the_models_own(tmp_path: Path) -> None:
    counts = {"0.8": {"kept": [1], "judged": [9]}, "0.0": {"kept": [30, 12], "judged": [50, 20]}}
    stated = {"summary": json.dumps({"agreement": 0.75}), "acceptance": json.dumps({"temperatures": counts})}
    both = head_file(tmp_path / "both.safetensors", **stated)
    assert read_head_facts(both) == HeadFacts(3, 0.75, 0.6)
    assert expected_shares({3: both}) == {3: 0.6}
    alone = head_file(tmp_path / "alone.safetensors", summary=stated["summary"])
    assert expected_shares({3: alone}) == {3: pytest.approx(ON_ANSWERS * 0.75)}
    assert expected_shares({3: head_file(tmp_path / "silent.safetensors")}) == {3: None}
    for number, wrong in enumerate(
        ['{"temperatures": {}}', '{"temperatures": {"0.0": {"kept": [3], "judged": [2]}}}', "["]
    ):
        odd = head_file(tmp_path / f"{number}.safetensors", summary='{"agreement": 2}', acceptance=wrong)
        assert read_head_facts(odd) == HeadFacts(3, None, None)


def test_the_same_integers_give_the_same_table() -> None:
    assert choose_exit(REQUEST, HEADS, rates(disk=77)) == choose_exit(REQUEST, HEADS, rates(disk=77))


def test_a_default_that_fits_is_left_alone() -> None:
    assert settle_exit(REQUEST, HEADS, rates(disk=400), default=4).table is None
    assert settle_exit(REQUEST, HEADS, rates(disk=400), default=4).exit_layer == 4
    assert settle_exit(REQUEST, HEADS, rates(disk=400), default=None).exit_layer == 2


def test_a_default_that_does_not_fit_gives_way_to_what_promises_most() -> None:
    tight = replace(REQUEST, resident_layers=None, device_memory=650)  # two layers beside table, head and ring
    found = settle_exit(tight, HEADS, rates(disk=10), default=4)
    assert found.exit_layer == 2 and found.table is not None
    assert "exit layer 4, this model's default, does not fit; exit layer 2 is chosen" in found.notes[0]
    # Where plain decoding promises more, planning goes on with the default and says what is missing.
    plain = settle_exit(tight, HEADS, rates(disk=4000, row=0.5), default=4)
    assert plain.exit_layer == 4 and plain.table is not None and plain.table.chosen is None
    # A split by hand: the head costs no layer, so drafting stays possible.
    fixed = settle_exit(replace(REQUEST, resident_layers=3), HEADS, rates(disk=4000, row=0.5), default=4)
    assert fixed.exit_layer == 2
    with pytest.raises(HeadError, match="there are none"):
        settle_exit(REQUEST, {}, rates(disk=10), default=None)


def test_wishes_that_leave_no_choice_are_refused() -> None:
    with pytest.raises(EesdError, match="a number of layers or 'auto', not 'deep'"):
        Engine.from_pretrained("smollm2-135m", exit_layer="deep")
    with pytest.raises(EesdError, match="name one with --head instant"):
        Engine.from_pretrained("smollm2-135m", exit_layer="auto", head="instant")


SLOW = Rates(link=None, disk=20 * 10**6, device=20 * 10**9, layer_time=100, token_time=500, row=0.35)


@pytest.mark.parametrize("wish", [2.5, (10, "20"), [None], (10.0, 20), {10, 20}, True, [True, 20]])
def test_exit_layers_that_are_no_numbers_are_one_line(wish: Any) -> None:
    with pytest.raises(EesdError, match="exit_layer must be a number of layers, several of them, or 'auto', not"):
        check_exit(wish, None)


@pytest.mark.real
def test_auto_drafts_at_the_exit_that_was_chosen_and_says_what_plain_decoding_says(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device_memory": "104MiB", "context": 512, "threads": 1}
    params, saved = SamplingParams(max_new_tokens=24, temperature=0.8, seed=3), tmp_path / "plan.json"

    def answer(**more: object) -> tuple[list[int | None], int | None]:
        with Engine.from_pretrained("smollm2-135m", **options, **more) as engine:  # type: ignore[arg-type]
            ids = [event.token_id for event in engine.generate("Name three rivers.", params)]
            assert engine.stats.drafted > 0 or engine.plan.exit_layer is None
            return ids, engine.plan.exit_layer

    plain = answer(head="off")
    measured = plan_model(
        "smollm2-135m", PlanWishes(device_memory=104 << 20, context=512, exit_layer="auto", rates=SLOW)
    )
    monkeypatch.setattr("eesd_lite.exit_opening.measure", lambda *others: SLOW)
    chosen = answer(exit_layer="auto", plan_file=saved, controller="fixed:3")
    assert chosen[0] == plain[0] and chosen[1] == measured.plan.exit_layer == 10
    quick = replace(SLOW, disk=10**12)
    monkeypatch.setattr("eesd_lite.exit_opening.measure", lambda *others: quick)
    off = tmp_path / "off.json"
    assert answer(exit_layer="auto", plan_file=off)[1] is None  # a disk that costs nothing
    monkeypatch.setattr("eesd_lite.exit_opening.measure", lambda *others: SLOW)
    assert answer(exit_layer="auto", plan_file=off)[1] is None
    monkeypatch.setattr("eesd_lite.exit_opening.measure", lambda *others: quick)
    assert answer(exit_layer="auto", plan_file=saved, controller="fixed:3") == chosen  # frozen
    saved.write_text(saved.read_text().replace('"exit_layer": 10,', '"exit_layer": "x",', 1))
    with pytest.raises(BudgetError, match="not a saved plan"):
        answer(exit_layer="auto", plan_file=saved)


@pytest.mark.real
def test_what_auto_measures_is_a_rate_of_everything(demo_model: Path) -> None:
    with Engine.from_pretrained("smollm2-135m", device_memory="104MiB", context=512, exit_layer="auto") as engine:
        assert engine.exits is not None
        found = engine.exits.rates
        assert engine.plan.exit_layer == engine.exits.chosen
    assert found.link is None and found.disk > 10**6 and found.device is not None and found.device > 10**6
    assert found.layer_time >= 0 and found.row is not None and 0 <= found.row <= 1


@pytest.mark.real
@pytest.mark.parametrize(("options", "expected"), [({"throttle": 20e6}, 10), ({}, None)])
def test_the_demo_models_default_gives_way_in_the_engine_as_in_a_plan(
    demo_model: Path, options: dict[str, float], expected: int | None
) -> None:
    rates = Rates(link=None, disk=int(options.get("throttle", 3e9)))
    planned = plan_model("smollm2-135m", PlanWishes(device_memory=104 << 20, context=512, rates=rates))
    with Engine.from_pretrained("smollm2-135m", device_memory="104MiB", context=512, threads=1, **options) as engine:
        assert engine.plan == planned.plan and engine.plan.exit_layer == expected
        assert engine.exits == planned.exits is not None
