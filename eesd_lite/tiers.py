"""What a plan is, and the search for the best one: which tier every layer is in, and every byte that is allocated.

`best_plan` knows one order of wishes: most resident layers, then most layers in host memory, then the largest ring.
Pure functions over integers. `eesd_lite.placement` decides what to try and says what is missing when nothing fits.
"""

from __future__ import annotations

from dataclasses import dataclass

DEVICE, HOST_STREAM, HOST_COMPUTE, DISK = TIERS = ("device", "host-stream", "host-compute", "disk")
HOST_MODES = ("stream", "compute", "auto")
_SMALLEST_RING = 2  # one slot computes while the next is filled; with one slot nothing would overlap

Items = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Bytes of the parts and what the user asked for."""

    layer_bytes: tuple[int, ...]  # packed weights of each decoder layer
    kv_bytes_per_token: int  # one layer, one token, keys and values
    context: int  # tokens
    draft_slack: int  # KV slots beyond the context that drafted tokens may use
    embedding_bytes: int
    lm_head_bytes: int  # 0 if tied to the embedding
    norm_bytes: int
    head_bytes: int  # 0: there is no exit head
    scratch_bytes: int
    ring_slots: int  # wished for; at least two are used, fewer than wished before a layer leaves memory
    exit_layer: int | None  # None: no drafting; of several heads the deepest
    device_memory: int | None  # None: no limit
    resident_layers: int | None  # None: as many as fit
    other_exits: tuple[int, ...] = ()  # of further heads that are resident, ascending
    head_state_bytes: int = 0  # states that wait until the head computes their keys and values
    draft_vocabulary_bytes: int = 0  # rows of lm_head that are copied for drafting
    rope_bytes_per_token: int = 0  # rotary tables, one for all layers
    scratch_bytes_per_token: int = 0  # what a prompt of the whole context needs on top
    reserve_bytes: int = 0  # of the device memory, for others
    host_memory: int | None = None  # None: no host tier, layers are on the device or on disk
    host_reserve_bytes: int = 0
    host_mode: str = "stream"  # what happens to layers in host memory: stream, compute, or a balance by the rates
    link_rate: int = 25 * 10**9  # bytes per second from host to device
    host_rate: int = 20 * 10**9  # bytes of packed weights per second that the CPU multiplies by a verification's rows
    staging: bool = True  # False where the device is the CPU: nothing is staged, tables and scratch are shared
    tiers: tuple[str, ...] | None = None  # of a saved plan: every layer's place is given


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where each layer lives and what is allocated for it."""

    tiers: tuple[str, ...]  # one of TIERS per layer; resident layers come first, others in any order
    resident_layers: int
    exit_layer: int | None  # None: plain decoding
    context: int
    ring_slots: int  # on the device; 0 if nothing is streamed
    items: Items  # on the device: name and bytes; they sum to total_bytes
    total_bytes: int
    sweep_bytes: int  # moved once per pass: layers that are streamed from host memory or read from disk
    notes: tuple[str, ...] = ()
    layer_bytes: tuple[int, ...] = ()
    host_items: Items = ()
    host_total_bytes: int = 0
    other_exits: tuple[int, ...] = ()  # shallower than `exit_layer`: a round may draft at one of them instead
    host_ring_slots: int = 0  # buffers in host memory through which layers on disk pass

    def tier_bytes(self, tier: str) -> int:
        """Packed weights of the layers in that tier."""
        return sum(size for size, where in zip(self.layer_bytes, self.tiers, strict=True) if where == tier)


def best_plan(request: PlanRequest, exit_layer: int | None, notes: tuple[str, ...] = ()) -> Plan | None:
    """The plan with most resident layers, then most in host memory, then the largest ring; None if nothing fits."""
    for resident in reversed(resident_choices(request, exit_layer)):
        if not _may_fit(request, exit_layer, resident):
            continue
        tiers = host_or_disk(request, exit_layer, resident)
        if tiers is None:
            continue
        smallest, wished = ring_sizes(request, tiers)
        for ring_slots in range(wished, smallest - 1, -1):
            items = device_items(request, exit_layer, tiers, ring_slots)
            total = total_of(items)
            if request.device_memory is None or total <= request.device_memory:
                on_host = host_items(request, exit_layer, tiers)
                moved = (size for size, tier in zip(request.layer_bytes, tiers, strict=True) if _is_moved(tier))
                return Plan(
                    tiers=tiers,
                    resident_layers=resident,
                    exit_layer=exit_layer,
                    context=request.context,
                    ring_slots=ring_slots,
                    items=items,
                    total_bytes=total,
                    sweep_bytes=sum(moved),
                    notes=notes,
                    layer_bytes=request.layer_bytes,
                    host_items=on_host,
                    host_total_bytes=total_of(on_host),
                    host_ring_slots=_host_ring(request, tiers),
                    other_exits=request.other_exits if exit_layer is not None else (),
                )
    return None


def resident_choices(request: PlanRequest, exit_layer: int | None) -> range:
    """How many first layers may be resident: exactly what the user said, else all that drafting needs or more."""
    if request.tiers is not None:
        first = leading_device_layers(request.tiers)
        return range(first, first + 1) if first >= (exit_layer or 0) else range(0)
    if request.resident_layers is not None:  # more than there are: none; make_plan refuses that
        return range(request.resident_layers, min(request.resident_layers, len(request.layer_bytes)) + 1)
    return range(exit_layer or 0, len(request.layer_bytes) + 1)


def leading_device_layers(tiers: tuple[str, ...]) -> int:
    """How many layers at the beginning are on the device: the deepest exit layer that can draft."""
    return next((n for n, tier in enumerate(tiers) if tier != DEVICE), len(tiers))


def _may_fit(request: PlanRequest, exit_layer: int | None, resident: int) -> bool:
    """False where the first layers alone are too much: saves looking for a place for the others."""
    return request.device_memory is None or sum(request.layer_bytes[:resident]) <= request.device_memory


def host_or_disk(request: PlanRequest, exit_layer: int | None, resident: int) -> tuple[str, ...] | None:
    """The tier of every layer when the first `resident` stay on the device; None: the host's memory is too small.

    As few layers as possible are on disk. They are spread evenly over the rest, and so are layers that the CPU
    multiplies, so that disk, link and CPU all work all the time and a small ring is enough.
    """
    offloaded = len(request.layer_bytes) - resident
    if request.tiers is not None:
        fits = (
            request.host_memory is None
            or total_of(host_items(request, exit_layer, request.tiers)) <= request.host_memory
        )
        return request.tiers if fits else None
    if request.host_memory is None:
        return (DEVICE,) * resident + (DISK,) * offloaded

    def excess(on_disk: int) -> int:
        return total_of(host_items(request, exit_layer, _spread(request, resident, on_disk))) - host_memory

    host_memory = request.host_memory
    if (too_much := excess(0)) <= 0:
        return _spread(request, resident, 0)
    if excess(offloaded) > 0:
        return None
    # A layer that leaves frees its weights and, where the CPU multiplied it, its keys and values, but no more.
    most = max(request.layer_bytes[resident:]) + request.kv_bytes_per_token * _tokens(request, exit_layer)
    shared = _scratch(request) + request.rope_bytes_per_token * _tokens(request, exit_layer)
    first = max(1, (too_much - shared) // max(most, 1))
    return _spread(request, resident, next(n for n in range(first, offloaded + 1) if excess(n) <= 0))


def _spread(request: PlanRequest, resident: int, on_disk: int) -> tuple[str, ...]:
    """Tiers with `on_disk` layers on disk, evenly spread, and the others in host memory, streamed or computed."""
    offloaded = len(request.layer_bytes) - resident
    disk = _evenly(on_disk, offloaded)
    host = [number for number in range(offloaded) if number not in disk]
    computed = {host[place] for place in _evenly(_computed(request, resident, disk, host), len(host))}
    kinds = (DISK if n in disk else HOST_COMPUTE if n in computed else HOST_STREAM for n in range(offloaded))
    return (DEVICE,) * resident + tuple(kinds)


def _evenly(count: int, places: int) -> set[int]:
    """`count` of `places` numbers from 0, at equal distances."""
    return {(2 * i + 1) * places // (2 * count) for i in range(count)}


def _computed(request: PlanRequest, resident: int, disk: set[int], host: list[int]) -> int:
    """How many host layers the CPU multiplies: all, none, or so many that link and CPU need equal time."""
    if request.host_mode != "auto" or not host:
        return len(host) if request.host_mode == "compute" else 0
    sizes = request.layer_bytes[resident:]
    over_link, in_host = sum(sizes[number] for number in disk), sum(sizes[number] for number in host)

    def slower(count: int) -> int:  # the time of link or CPU, whichever is longer, in a common unit
        computed = in_host * count // len(host)
        return max((over_link + in_host - computed) * request.host_rate, computed * request.link_rate)

    equal = (over_link + in_host) * request.host_rate // (request.host_rate + request.link_rate)
    count = min(len(host), equal * len(host) // max(in_host, 1))
    return min(count, min(count + 1, len(host)), key=slower)


def _is_moved(tier: str) -> bool:
    return tier in (HOST_STREAM, DISK)


def ring_sizes(request: PlanRequest, tiers: tuple[str, ...]) -> tuple[int, int]:
    """The smallest and the wished number of slots; more slots than layers that pass through would stay empty."""
    streamed = sum(map(_is_moved, tiers))
    wished = min(request.ring_slots, streamed)
    return min(_SMALLEST_RING, wished), wished


def _host_ring(request: PlanRequest, tiers: tuple[str, ...]) -> int:
    """Without a budget for the host its ring is not planned: every slot then has a staging buffer of its own."""
    return 0 if request.host_memory is None or not request.staging else min(_SMALLEST_RING, tiers.count(DISK))


def _sizes(request: PlanRequest, tiers: tuple[str, ...], *wanted: str) -> list[int]:
    return [size for size, tier in zip(request.layer_bytes, tiers, strict=True) if tier in wanted]


def _tokens(request: PlanRequest, exit_layer: int | None) -> int:
    return request.context + (request.draft_slack if exit_layer is not None else 0)


def _scratch(request: PlanRequest) -> int:
    return request.scratch_bytes + request.scratch_bytes_per_token * request.context


def device_items(request: PlanRequest, exit_layer: int | None, tiers: tuple[str, ...], ring_slots: int) -> Items:
    """Every allocation on the device by name; parts of no bytes are left out."""
    tokens = _tokens(request, exit_layer)
    heads = 1 + len(request.other_exits) if exit_layer is not None else 0
    slot_bytes = max(_sizes(request, tiers, HOST_STREAM, DISK), default=0)
    items = (
        ("embedding", request.embedding_bytes),
        ("lm_head", request.lm_head_bytes),
        ("norms", request.norm_bytes),
        ("rope tables", request.rope_bytes_per_token * tokens),
        ("exit head", request.head_bytes * heads),
        ("draft vocabulary", request.draft_vocabulary_bytes if heads else 0),
        ("exit head KV cache", request.kv_bytes_per_token * tokens * heads),
        ("exit head states", request.head_state_bytes * heads),
        ("KV cache", request.kv_bytes_per_token * tokens * (len(tiers) - tiers.count(HOST_COMPUTE))),
        ("scratch", _scratch(request)),
        ("reserve", request.reserve_bytes),
        ("stream ring", slot_bytes * ring_slots),
        ("resident layers", sum(_sizes(request, tiers, DEVICE))),
    )
    return tuple((name, size) for name, size in items if size)


def host_items(request: PlanRequest, exit_layer: int | None, tiers: tuple[str, ...]) -> Items:
    """Every allocation in host memory by name. Layers that the CPU multiplies have their keys and values there."""
    if request.host_memory is None and request.tiers is None:
        return ()
    computed = tiers.count(HOST_COMPUTE)
    apart = computed > 0 and request.staging
    slot_bytes = max(_sizes(request, tiers, DISK), default=0)
    items = (
        ("layers to stream", sum(_sizes(request, tiers, HOST_STREAM))),
        ("layers to compute", sum(_sizes(request, tiers, HOST_COMPUTE))),
        ("KV cache", request.kv_bytes_per_token * _tokens(request, exit_layer) * computed),
        ("rope tables", request.rope_bytes_per_token * _tokens(request, exit_layer) if apart else 0),
        ("scratch", _scratch(request) if apart else 0),
        ("disk ring", slot_bytes * _host_ring(request, tiers)),
        ("reserve", request.host_reserve_bytes),
    )
    return tuple((name, size) for name, size in items if size)


def total_of(items: Items) -> int:
    """Bytes of all items together."""
    return sum(size for _, size in items)


def draft_capable(request: PlanRequest) -> range:
    """The exit layers at which a plan within the budgets can draft, given a head; the head's size does not vary."""
    layers = len(request.layer_bytes)
    last = request.resident_layers if request.resident_layers is not None else layers - 1
    low, high = 0, min(last, layers - 1)
    while low < high:  # what fits with more layers below the exit fits with fewer
        middle = (low + high + 1) // 2
        low, high = (middle, high) if best_plan(request, middle) is not None else (low, middle - 1)
    return range(1, low + 1)
