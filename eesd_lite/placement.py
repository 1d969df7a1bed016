"""Which layers stay in memory: a pure function of bytes and wishes, integers in and a plan out.

make_plan accounts for everything that the engine allocates, so that what is allocated is what was planned. In order of
priority: what drafting needs (embedding, norms, lm_head, the layers below the exit layer, the exit head and its cache);
the KV cache of the whole context, the stream ring at its smallest, scratch; then further layers from the exit layer
upwards; last, a bigger ring. The rest is on disk. If drafting does not fit, plain decoding is planned and a note says
what was missing; if that does not fit either, BudgetError says so and names what would.
"""

from __future__ import annotations

from dataclasses import dataclass

from eesd_lite.errors import BudgetError, ModelError
from eesd_lite.units import format_size

_SMALLEST_RING = 2  # one slot computes while the next is filled; with one slot nothing would overlap


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
    exit_layer: int | None  # None: no drafting
    device_memory: int | None  # None: no limit
    resident_layers: int | None  # None: as many as fit


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where each layer lives and what is allocated for it."""

    tiers: tuple[str, ...]  # "device" or "disk", one per layer
    resident_layers: int
    exit_layer: int | None  # None: plain decoding
    context: int
    ring_slots: int  # 0 if nothing is streamed
    items: tuple[tuple[str, int], ...]  # name and bytes; they sum to total_bytes
    total_bytes: int
    sweep_bytes: int  # read once per pass through the layers on disk
    notes: tuple[str, ...] = ()


def make_plan(request: PlanRequest) -> Plan:
    """The best plan within the budget, or BudgetError."""
    _check(request)
    notes: list[str] = []
    if request.exit_layer is not None and request.head_bytes > 0:
        plan = _best(request, request.exit_layer)
        if plan is not None:
            return plan
        notes.append(_speculation_off(request, request.exit_layer))
    elif request.exit_layer is not None:
        notes.append("speculation off: there is no exit head")
    plan = _best(request, None, tuple(notes))
    if plan is None:
        raise BudgetError(_too_small(request))
    return plan


def _check(request: PlanRequest) -> None:
    """Refuses wishes that no budget can fulfil."""
    layers = len(request.layer_bytes)
    sizes = [request.kv_bytes_per_token, request.draft_slack, request.embedding_bytes, request.lm_head_bytes]
    sizes += [request.norm_bytes, request.head_bytes, request.scratch_bytes, *request.layer_bytes]
    assert layers > 0 and request.context > 0 and request.ring_slots > 0 and min(sizes) >= 0, request
    if request.exit_layer is not None and not 0 < request.exit_layer <= layers:
        raise ModelError(f"exit layer {request.exit_layer}: this model has {layers} layers")
    if request.resident_layers is None:
        return
    if not 0 <= request.resident_layers <= layers:
        raise BudgetError(f"{request.resident_layers} resident layers were asked for; this model has {layers} layers")
    if request.exit_layer is not None and request.head_bytes > 0 and request.resident_layers < request.exit_layer:
        raise BudgetError(
            f"drafting at exit layer {request.exit_layer} needs {request.exit_layer} resident layers, "
            f"but {request.resident_layers} were asked for; ask for more, or take a shallower exit layer"
        )


def _best(request: PlanRequest, exit_layer: int | None, notes: tuple[str, ...] = ()) -> Plan | None:
    """The plan with most resident layers, then the largest ring, that fits; None if none does."""
    for resident in reversed(_resident_choices(request, exit_layer)):
        smallest, wished = _ring_sizes(request, resident)
        for ring_slots in range(wished, smallest - 1, -1):
            items = _items(request, exit_layer, resident, ring_slots)
            total = sum(size for _, size in items)
            if request.device_memory is None or total <= request.device_memory:
                on_disk = len(request.layer_bytes) - resident
                return Plan(
                    tiers=("device",) * resident + ("disk",) * on_disk,
                    resident_layers=resident,
                    exit_layer=exit_layer,
                    context=request.context,
                    ring_slots=ring_slots,
                    items=items,
                    total_bytes=total,
                    sweep_bytes=sum(request.layer_bytes[resident:]),
                    notes=notes,
                )
    return None


def _resident_choices(request: PlanRequest, exit_layer: int | None) -> range:
    """How many first layers may be resident: exactly what the user said, else all that drafting needs or more."""
    if request.resident_layers is not None:
        return range(request.resident_layers, request.resident_layers + 1)
    return range(exit_layer or 0, len(request.layer_bytes) + 1)


def _ring_sizes(request: PlanRequest, resident: int) -> tuple[int, int]:
    """The smallest and the wished number of slots; more slots than layers on disk would stay empty."""
    on_disk = len(request.layer_bytes) - resident
    wished = min(request.ring_slots, on_disk)
    return min(_SMALLEST_RING, wished), wished


def _items(request: PlanRequest, exit_layer: int | None, resident: int, ring_slots: int) -> tuple[tuple[str, int], ...]:
    """Every allocation of a plan by name; parts of no bytes are left out."""
    drafting = exit_layer is not None
    tokens = request.context + (request.draft_slack if drafting else 0)
    slot_bytes = max(request.layer_bytes[resident:], default=0)
    items = (
        ("embedding", request.embedding_bytes),
        ("lm_head", request.lm_head_bytes),
        ("norms", request.norm_bytes),
        ("exit head", request.head_bytes if drafting else 0),
        ("exit head KV cache", request.kv_bytes_per_token * tokens if drafting else 0),
        ("KV cache", request.kv_bytes_per_token * tokens * len(request.layer_bytes)),
        ("scratch", request.scratch_bytes),
        ("stream ring", slot_bytes * ring_slots),
        ("resident layers", sum(request.layer_bytes[:resident])),
    )
    return tuple((name, size) for name, size in items if size)


def _least(request: PlanRequest, exit_layer: int | None) -> int:
    """Bytes of the smallest plan, whatever the budget."""
    return min(
        sum(size for _, size in _items(request, exit_layer, resident, _ring_sizes(request, resident)[0]))
        for resident in _resident_choices(request, exit_layer)
    )


def _context_that_fits(request: PlanRequest, exit_layer: int | None) -> int:
    """The longest context whose smallest plan fits; 0 or less if none does."""
    assert request.device_memory is not None
    caches = len(request.layer_bytes) + (exit_layer is not None)
    missing = _least(request, exit_layer) - request.device_memory
    per_token = request.kv_bytes_per_token * caches
    return request.context - -(-missing // per_token) if per_token else 0


def _speculation_off(request: PlanRequest, exit_layer: int) -> str:
    """Why drafting was given up, in bytes, and the nearest ways to have it."""
    assert request.device_memory is not None
    missing = _least(request, exit_layer) - request.device_memory
    ways = []
    if (context := _context_that_fits(request, exit_layer)) > 0:
        ways.append(f"a context of {context}")
    if request.resident_layers is None:
        shallower = [n for n in range(1, exit_layer) if _least(request, n) <= request.device_memory]
        if shallower:
            ways.append(f"exit layer {shallower[-1]} or below")
    hint = f"; {' or '.join(ways)} would fit" if ways else ""
    return f"speculation off: needs {_bytes(missing)} more{hint}"


def _too_small(request: PlanRequest) -> str:
    """What even plain decoding lacks, and what would fit."""
    assert request.device_memory is not None
    least = _least(request, None)
    split = "" if request.resident_layers is None else f" and {request.resident_layers} resident layers"
    missing = _bytes(least - request.device_memory)
    message = (
        f"the memory budget of {format_size(request.device_memory)} is {missing} too small: "
        f"a context of {request.context}{split} needs at least {format_size(least)} without drafting"
    )
    context = _context_that_fits(request, None)
    if context > 0:
        return f"{message}; a context of {context} would fit"
    if request.resident_layers:
        return f"{message}; ask for fewer resident layers or more memory"
    return f"{message}; no shorter context would fit, give it more memory"


def _bytes(size: int) -> str:
    return f"{format_size(size)} ({size} bytes)" if size >= 1024 else f"{size} bytes"
