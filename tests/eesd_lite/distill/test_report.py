from pathlib import Path

import pytest
import torch

from eesd_lite.distill.head_module import ExitHead
from eesd_lite.distill.report import CurvePoint, append_point, compare, measure, read_curve


def point(step: int) -> CurvePoint:
    return CurvePoint(
        exit_layer=1, step=step, tokens=10, text_tokens=5, minutes=0.5, loss=1.0, agreement=0.25, overlap=0.5
    )


def test_a_curve_survives_a_line_cut_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    append_point(path, point(1))
    append_point(path, point(2))
    path.write_text(path.read_text()[:-20])
    assert read_curve(path) == [point(1)]


def test_agreement_and_overlap_by_hand() -> None:
    lm_head = torch.eye(3)
    theirs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]).log()
    ours = torch.tensor([[0.5, 0.1, 0.4], [0.2, 0.3, 0.5]]).log()
    agreed, shared = compare(theirs, ours, lm_head)
    assert agreed == 1.0 and shared == pytest.approx((0.5 + 0.1 + 0.1) + (0.2 + 0.3 + 0.3))


def test_thinning_judges_about_as_many_positions_as_asked_for(tiny, small_cache) -> None:  # type: ignore[no-untyped-def]
    parts = tiny.parts()
    head = ExitHead(tiny.shape, parts.reaches[1], eps=1e-5).load(tiny.head())
    everything = measure(head, small_cache, 1, parts, sequences=range(0, 60))
    assert everything.positions == small_cache.meta.tokens
    thinned = measure(head, small_cache, 1, parts, sequences=range(0, 60), positions=200)
    assert 180 <= thinned.positions <= 240
    assert abs(thinned.overlap - everything.overlap) < 0.05
