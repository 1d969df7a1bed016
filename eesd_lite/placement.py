"""Which layers live where: a pure function of bytes and wishes, integers in and a plan out.

make_plan accounts for everything that the engine allocates, so that what is allocated is what was planned. In order of
priority: what drafting needs (embedding, norms, lm_head, the layers below the exit layer, the exit head and its cache);
the KV cache of the whole context, the stream ring at its smallest, scratch; then further layers from the exit layer
upwards; last, a bigger ring. Layers that are left go to host memory where there is some, and then to disk. If drafting
does not fit, plain decoding is planned and a note says what was missing; if that does not fit either, BudgetError says
so and names what would. Such advice is found by planning again, so that what is said to fit does fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from eesd_lite.errors import BudgetError, ModelError
from eesd_lite.tiers import (
    DEVICE,
    DISK,
    HOST_MODES,
    Plan,
    PlanRequest,
    best_plan,
    device_items,
    host_items,
    host_or_disk,
    leading_device_layers,
    resident_choices,
    ring_sizes,
    total_of,
)
from eesd_lite.units import format_size

__all__ = ["Plan", "PlanRequest", "make_plan"]


def make_plan(request: PlanRequest) -> Plan:
    """The best plan within the budgets, or BudgetError."""
    _check(request)
    notes: list[str] = []
    if request.exit_layer is not None and request.head_bytes > 0:
        plan = best_plan(request, request.exit_layer)
        if plan is not None:
            return plan
        notes.append(_split_too_shallow(request, request.exit_layer) or _speculation_off(request, request.exit_layer))
    elif request.exit_layer is not None:
        notes.append("speculation off: there is no exit head")
    plan = best_plan(request, None, tuple(notes))
    if plan is None:
        raise BudgetError(_too_small(request))
    return plan


def _check(request: PlanRequest) -> None:
    """Refuses wishes that no budget can fulfil."""
    layers = len(request.layer_bytes)
    sizes = [request.kv_bytes_per_token, request.draft_slack, request.embedding_bytes, request.lm_head_bytes]
    sizes += [request.norm_bytes, request.head_bytes, request.scratch_bytes, *request.layer_bytes]
    sizes += [
        request.draft_vocabulary_bytes,
        request.head_state_bytes,
        request.reserve_bytes,
        request.host_reserve_bytes,
        request.host_memory or 0,
    ]
    assert layers > 0 and request.context > 0 and request.ring_slots > 0 and min(sizes) >= 0, request
    assert request.host_mode in HOST_MODES and min(request.link_rate, request.host_rate) > 0, request
    exits = () if request.exit_layer is None else (*request.other_exits, request.exit_layer)
    assert list(exits) == sorted(set(exits)), exits
    for exit_layer in exits:
        if not 0 < exit_layer <= layers:
            raise ModelError(f"exit layer {exit_layer}: this model has {layers} layers")
    if request.resident_layers is None:
        return
    if not 0 <= request.resident_layers <= layers:
        raise BudgetError(f"{request.resident_layers} resident layers were asked for; this model has {layers} layers")
    if request.exit_layer is not None and request.head_bytes > 0 and request.resident_layers < request.exit_layer:
        raise BudgetError(
            f"drafting at exit layer {request.exit_layer} needs {request.exit_layer} resident layers, "
            f"but {request.resident_layers} were asked for; ask for more, or take a shallower exit layer"
        )


def _split_too_shallow(request: PlanRequest, exit_layer: int) -> str | None:
    """The note for a saved plan that has not all layers below the exit on the device."""
    if request.tiers is None or (first := leading_device_layers(request.tiers)) >= exit_layer:
        return None
    return (
        f"speculation off: the saved plan begins with {first} device layers, exit layer {exit_layer} needs {exit_layer}"
    )


def _speculation_off(request: PlanRequest, exit_layer: int) -> str:
    """Why drafting was given up, in bytes, and the nearest ways to have it."""
    device, host = _missing(request, exit_layer)
    ways = []
    alone = replace(request, other_exits=())
    if request.other_exits and best_plan(alone, exit_layer) is not None:
        ways.append(f"exit layer {exit_layer} alone")
    if (context := _context_that_fits(request, exit_layer)) > 0:
        ways.append(f"a context of {context}")
    if request.resident_layers is None:
        shallower = _largest(exit_layer - 1, lambda n: best_plan(alone, n) is not None)
        if shallower:
            ways.append(f"exit layer {shallower} or below")
    hint = f"; {' or '.join(ways)} would fit" if ways else ""
    needs = f"needs {_bytes(device)} more" if device else f"needs {_bytes(host)} more of host memory"
    return f"speculation off: {needs}{hint}"


def _too_small(request: PlanRequest) -> str:
    """What even plain decoding lacks, and what would fit."""
    device, host = _missing(request, None)
    if not device:
        return _host_too_small(request, host)
    assert request.device_memory is not None
    least = request.device_memory + device
    split = "" if request.resident_layers is None else f" and {request.resident_layers} resident layers"
    message = (
        f"the memory budget of {format_size(request.device_memory)} is {_bytes(device)} too small: "
        f"a context of {request.context}{split} needs at least {format_size(least)} without drafting"
    )
    context = _context_that_fits(request, None)
    if context > 0:
        return f"{message}; a context of {context} would fit"
    if request.resident_layers:
        return f"{message}; ask for fewer resident layers or more memory"
    return f"{message}; no shorter context would fit, give it more memory"


def _host_too_small(request: PlanRequest, missing: int) -> str:
    assert request.host_memory is not None
    least = request.host_memory + missing
    return (
        f"the host memory of {format_size(request.host_memory)} is {_bytes(missing)} too small: layers that do not "
        f"fit the device pass through it and need at least {format_size(least)} there"
    )


def _missing(request: PlanRequest, exit_layer: int | None) -> tuple[int, int]:
    """Bytes that the smallest plan lacks on the device; if none, those that the host lacks."""
    boundless = replace(request, host_memory=None if request.host_memory is None else 1 << 62)
    choices = resident_choices(request, exit_layer)
    # The least that the device can do with, and the least for the host where the device can do with what it has.
    splits = [host_or_disk(boundless, exit_layer, resident) for resident in choices]
    splits += [(DEVICE,) * resident + (DISK,) * (len(request.layer_bytes) - resident) for resident in choices]
    needs = [
        (total_of(device_items(request, exit_layer, tiers, ring_sizes(request, tiers)[0])), tiers)
        for tiers in splits
        if tiers is not None
    ]
    least = min(size for size, _ in needs)
    if request.device_memory is not None and least > request.device_memory:
        return least - request.device_memory, 0
    assert request.host_memory is not None, "everything fits"
    fitting = [tiers for size, tiers in needs if request.device_memory is None or size <= request.device_memory]
    return 0, min(total_of(host_items(request, exit_layer, tiers)) for tiers in fitting) - request.host_memory


def _context_that_fits(request: PlanRequest, exit_layer: int | None) -> int:
    """The longest shorter context whose plan fits; 0 if none does."""
    return _largest(
        request.context - 1, lambda context: best_plan(replace(request, context=context), exit_layer) is not None
    )


def _largest(highest: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `highest` that fits, 0 if none does; what fits at a number fits below it."""
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _bytes(size: int) -> str:
    return f"{format_size(size)} ({size} bytes)" if size >= 1024 else f"{size} bytes"
