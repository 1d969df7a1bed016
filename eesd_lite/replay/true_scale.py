"""Simulation at true scale: luck recorded on a small model, costs of a large one from its plan and a model of a card.

Nothing here was run on such a card. Acceptance is that of the recorded model at the same relative exit depth; bytes are
those of `eesd plan`; a pass through layers on the card takes as long as reading their weights or multiplying by them,
whichever is longer, and a stated time per layer for launching; what is streamed takes the link's time. Fetching
ahead while drafting, attention over the context, and sampling are left out. Plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eesd_lite.controller import LARGEST_TREE
from eesd_lite.errors import TraceError
from eesd_lite.plan_cost import Rates
from eesd_lite.planning import PRESETS, PlannedModel, PlanWishes, plan_shape
from eesd_lite.replay.compare_trees import FixedShapes, TreeReplaySettings, tree_point
from eesd_lite.replay.tree_curves import TreeCurve
from eesd_lite.replay.tree_trace import TreeTrace
from eesd_lite.sizing import module_shapes

# Bytes a second from the card's memory (0.7 of a usual card's own figure: 448, 504, 672, 1008 GB/s) and operations a
# second of a product with 4-bit weights (a third to a half of what such cards state for 16 bit).
CARDS = {"8gb": (310e9, 20e12), "12gb": (350e9, 25e12), "16gb": (470e9, 40e12), "24gb": (700e9, 80e12)}
LAYER_SECONDS = 100e-6  # launching some twenty kernels
LINK_RATE = 25 * 10**9
_HEAD_ROWS = 4  # rows of lm_head that a verify asks for at a time

PUBLIC_FIGURES = (
    "8.6 tokens/s: 70B in 4 bit, RTX 4090, a second model of 8B drafts in a tuned tree",
    "4 to 6 tokens/s: 70B GPTQ, SpecExec",
    "16.9 tokens/s: 14B in 4 bit, RTX 2080 with 8 GB, no speculation",
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is assumed of the device and the link: per second, and seconds per layer and pass."""

    memory_rate: float
    operations: float
    layer_seconds: float = LAYER_SECONDS
    link_rate: float = LINK_RATE

    def reads(self, nbytes: float, weights: float, rows: int) -> float:
        """Seconds of a product of some rows with resident weights."""
        return max(nbytes / self.memory_rate, 2.0 * weights * rows / self.operations)


def find_scale(name: str) -> tuple[str, str]:
    """(shape, preset) of a name such as llama-2-70b@24gb; TraceError lists the presets."""
    shape, _, preset = name.strip().lower().partition("@")
    if not shape or preset not in PRESETS:
        raise TraceError(f"a scale is SHAPE@PRESET, such as llama-2-13b@8gb, with {', '.join(PRESETS)}; not {name!r}")
    return shape, preset


def make_card(
    scale: str,
    *,
    link_rate: float | None = None,
    device_rate: float | None = None,
    device_tflops: float | None = None,
    layer_time: float | None = None,  # microseconds
) -> Card:
    """The card of a scale's preset with what the user knows better."""
    memory, operations = CARDS[find_scale(scale)[1]]
    return Card(
        memory_rate=device_rate or memory,
        operations=device_tflops * 1e12 if device_tflops is not None else operations,
        layer_seconds=layer_time * 1e-6 if layer_time is not None else LAYER_SECONDS,
        link_rate=link_rate or LINK_RATE,
    )


def plan_at_scale(name: str, about: dict[str, Any], card: Card) -> PlannedModel:
    """The plan of the large model with drafting at the trace's relative depth; TraceError if that does not fit."""
    shape, preset = find_scale(name)
    wishes = replace(
        PlanWishes.preset(preset), draft_limit=LARGEST_TREE, rates=Rates(link=int(card.link_rate)), exit_layer=0
    )
    layers = plan_shape(shape, wishes).config.num_hidden_layers
    exit_layer = max(1, layers * about["exit_layer"] // about["layers"])  # not relatively deeper
    planned = plan_shape(shape, replace(wishes, exit_layer=exit_layer))
    if planned.plan.exit_layer is None:
        fits = planned.draft_capable
        possible = f"exits 1 to {fits[-1]} of {layers} would fit" if fits else "no exit would fit"
        raise TraceError(
            f"{name}: exit {about['exit_layer']} of {about['layers']} is exit {exit_layer} of {layers}, which does not "
            f"fit; {possible}: replay a trace of a shallower exit"
        )
    return planned


def scale_curve(planned: PlannedModel, card: Card, name: str) -> TreeCurve:
    """Seconds of a round's parts at true scale, by rows."""
    plan, config = planned.plan, planned.config
    assert plan.exit_layer is not None
    cells = sum(out * inner for out, inner in module_shapes(config).values())
    table = config.vocab_size * config.hidden_size
    sizes = plan.layer_bytes
    lower, middle, rest = (
        sizes[: plan.exit_layer], sizes[plan.exit_layer : plan.resident_layers], sizes[plan.resident_layers :]
    )  # fmt: skip
    head_bytes = dict(plan.items)["exit head"]

    def layers(part: Sequence[int], rows: int) -> float:
        return sum(card.reads(size, cells, rows) + card.layer_seconds for size in part)

    def head(rows: int) -> float:
        return card.reads(head_bytes, head_bytes / 2, rows) + card.layer_seconds + card.reads(2 * table, table, rows)

    def verify(rows: int) -> float:
        carried = max(planned.cost.seconds, layers(rest, rows))
        return layers(middle, rows) + carried + card.reads(2 * table, table, min(rows, _HEAD_ROWS))

    return TreeCurve(name, lambda rows: layers(lower, rows), head, verify)


def simulate(trace: TreeTrace, name: str, card: Card, settings: TreeReplaySettings) -> dict[str, Any]:
    """The JSON object: tokens per second of every controller at true scale, and all that was assumed."""
    about = trace.chains.about
    planned = plan_at_scale(name, about, card)
    curve = scale_curve(planned, card, name)
    point = tree_point(trace, curve, FixedShapes(trace), settings)
    plan = planned.plan
    return {
        "benchmark": "eesd replay",
        "simulated": True,
        "scale": name,
        "trace": {**about, "answers": len(trace.trees)},
        "assumptions": {
            "exit_layer": plan.exit_layer,
            "layers": len(plan.tiers),
            "resident_layers": plan.resident_layers,
            "context": plan.context,
            "offloaded_bytes": plan.sweep_bytes,
            "link_rate": card.link_rate,
            "sweep_seconds": round(planned.cost.seconds, 4),
            "device_memory_rate": card.memory_rate,
            "device_operations": card.operations,
            "layer_seconds": card.layer_seconds,
            "draft_step_seconds": [round(curve.lower(n) + curve.head(n), 5) for n in (1, 16, 64)],
            "verify_seconds": [round(curve.verify(n), 4) for n in (1, 16, 64)],
        },
        "point": point,
        "settings": {**vars(settings), "curves": (name,)},
        "public_figures": PUBLIC_FIGURES,
    }
