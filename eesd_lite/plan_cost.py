"""What a plan's sweep costs: seconds over the slowest of disk, link and CPU, and tokens per second for a given tau.

A bound, not a measurement: the three work at the same time, and drafting and the device's own products are left out,
since they hide behind the transfers when transfers are what a run waits for. Plain Python, rates in bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass

from eesd_lite.tiers import DISK, HOST_COMPUTE, HOST_STREAM, Plan


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second. `link` None: layers are computed where they are read to, nothing crosses a link."""

    link: int | None = 25 * 10**9
    disk: int = 3 * 10**9
    host: int = 20 * 10**9  # of packed weights, multiplied by the rows of one verification
    # What a choice of the exit layer needs beside that (`eesd_lite.exit_choice`):
    device: int | None = (
        None  # of resident weights, multiplied by one row; None: as `host`, a card's where there is one
    )
    layer_time: int = 100  # microseconds that a pass through a layer takes beside that
    token_time: int = 500  # microseconds that drafting or emitting a token takes beside products: choosing it, Python
    row: float | None = None  # what one more row takes, as a share of one row; None: what is usual for the device


@dataclass(frozen=True, kw_only=True)
class SweepCost:
    """Bytes and seconds of one sweep, by what carries it."""

    disk_bytes: int
    link_bytes: int
    host_bytes: int
    disk_seconds: float
    link_seconds: float
    host_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.disk_seconds, self.link_seconds, self.host_seconds)

    def tokens_per_second(self, tau: float) -> float | None:
        """At `tau` tokens per sweep; None if nothing is offloaded, so that no transfer bounds the speed."""
        return tau / self.seconds if self.seconds > 0 else None


def sweep_cost(plan: Plan, rates: Rates) -> SweepCost:
    """The cost of one pass through all layers that are not resident."""
    disk, host = plan.tier_bytes(DISK), plan.tier_bytes(HOST_COMPUTE)
    link = plan.tier_bytes(HOST_STREAM) + disk if rates.link is not None else 0
    return SweepCost(
        disk_bytes=disk,
        link_bytes=link,
        host_bytes=host,
        disk_seconds=disk / rates.disk,
        link_seconds=link / rates.link if rates.link is not None else 0.0,
        host_seconds=host / rates.host,
    )
