"""How fast host layers are, streamed or computed: a short measurement that settles the host mode `auto`.

Two numbers: bytes per second from host memory to the device, and packed bytes per second that the CPU multiplies when a
few rows share a pass, as in a verification. The choice that follows from them changes kernels, and with them low bits,
so it belongs into a saved plan (`eesd_lite.saved_plan`) wherever ids have to be the same again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from eesd_lite.cache import KVCache, Rows
from eesd_lite.ops import Reach
from eesd_lite.transformer import RunnableLayer

ROWS = (1, 2, 4, 8, 16)
_REPEAT = 5


@dataclass(frozen=True)
class TierRates:
    """Bytes per second."""

    link: int
    host: int


def measure_rates(
    layer: RunnableLayer,
    nbytes: int,
    *,
    hidden: Callable[[int], Tensor],
    kv: KVCache,
    reach: Reach,
    copy: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> TierRates:
    """Rates for a layer of `nbytes` that is bound on the CPU; `copy` brings such a blob to the device and waits.

    `hidden(rows)` makes float32 states [rows, hidden]. The CPU's rate is the harmonic mean over 1 to 16 rows.
    """

    def seconds(run: Callable[[], None]) -> float:
        run()
        times = []
        for _ in range(_REPEAT):
            started = clock()
            run()
            times.append(clock() - started)
        return max(statistics.median(times), 1e-9)

    def product(rows: int) -> Callable[[], None]:
        states, where = hidden(rows), Rows.chain(0, rows)
        return lambda: layer.forward(states, where, kv.layer(0), reach)

    host = statistics.mean(seconds(product(rows)) for rows in ROWS)
    return TierRates(link=int(nbytes / seconds(copy)), host=int(nbytes / host))
