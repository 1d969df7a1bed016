"""T(nodes, steps) of trees: what the fit does with strange rounds."""

from __future__ import annotations

import pytest

from eesd_lite.tree_costs import TreeCosts


def test_a_hiccup_in_the_largest_tree_so_far_is_forgotten_though_no_such_tree_follows() -> None:
    costs = TreeCosts()
    for _ in range(40):
        costs.observe(0, 0, 1.0, 1)
        costs.observe(3, 1, 1.2, 2)
    costs.observe(8, 2, 9.0, 3)
    assert costs.seconds(8, 2) > 4.0
    for _ in range(100):
        costs.observe(0, 0, 1.0, 1)
        costs.observe(3, 1, 1.2, 2)
    assert costs.seconds(8, 2) < 2.5
    assert costs.seconds(3, 1) == pytest.approx(1.2, rel=0.02) and costs.seconds(0, 0) == pytest.approx(1.0, rel=0.02)
