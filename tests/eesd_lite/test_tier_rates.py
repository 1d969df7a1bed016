"""The rates behind the host mode `auto`, under a clock that only moves when something is done."""

from __future__ import annotations

import torch
from torch import Tensor

from eesd_lite.cache import KVCache, Rows
from eesd_lite.ops import Reach
from eesd_lite.tier_rates import ROWS, measure_rates


def test_rates_are_bytes_over_the_seconds_that_copies_and_products_take() -> None:
    now = [0.0]
    rows_seen: list[int] = []

    class Layer:
        def forward(self, hidden: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], reach: object) -> None:
            rows_seen.append(len(rows))
            now[0] += 0.001 * len(rows)

    def copy() -> None:
        now[0] += 0.25

    kv = KVCache(1, max(ROWS), num_key_value_heads=1, head_dim=2, dtype=torch.float32)
    reach = Reach((torch.zeros(16, 1), torch.zeros(16, 1)))
    found = measure_rates(
        Layer(), 31_000, hidden=lambda rows: torch.ones(rows, 4), kv=kv, reach=reach, copy=copy, clock=lambda: now[0]
    )
    assert found.link == 124_000
    assert abs(found.host - 31_000 * 1000 * len(ROWS) / sum(ROWS)) <= 1
    assert set(rows_seen) == set(ROWS)
