"""How good a head is on held-out text, and the learning curve.

agreement: share of positions where head and target have the same first choice; overlap: mean of sum(min(p, q)), the
expected acceptance when sampling at temperature 1. Logits are float32 products: in bfloat16 the two best tokens often
tie. Points are appended to a JSON lines file, so that a killed run keeps its curve.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eesd_lite.distill.head_module import ExitHead, Packing
from eesd_lite.distill.state_cache import StateCache

if TYPE_CHECKING:
    from eesd_lite.distill.ridge import TargetParts

_CHUNK = 256  # positions whose full-vocabulary float32 logits exist at once


@dataclass(frozen=True)
class Quality:
    agreement: float
    overlap: float
    positions: int


@dataclass(frozen=True)
class CurvePoint:
    """One line of the learning curve. `text_tokens` is what the cache holds, `tokens` what training has seen of it."""

    exit_layer: int
    step: int
    tokens: int
    text_tokens: int
    minutes: float
    loss: float
    agreement: float
    overlap: float
    skipped: int = 0


def append_point(path: Path, point: CurvePoint) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps(asdict(point)) + "\n")


def read_curve(path: Path) -> list[CurvePoint]:
    """All complete lines; a line cut short by a kill is dropped."""
    points = []
    for line in Path(path).read_text().splitlines():
        try:
            points.append(CurvePoint(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return points


@torch.no_grad()
def measure(
    head: ExitHead,
    cache: StateCache,
    exit_layer: int,
    parts: TargetParts,
    *,
    sequences: range,
    positions: int | None = None,
) -> Quality:
    """Agreement and overlap over the sequences' positions, thinned evenly to about `positions`."""
    device = head.affine.weight.device
    total = int(cache.starts[sequences.stop] - cache.starts[sequences.start])
    stride = 1 if positions is None else max(1, total // positions)
    lm_head = parts.lm_head.to(device, torch.float32)
    norm = parts.norm.to(device, torch.float32)
    agreed, shared, seen = 0.0, 0.0, 0
    for sequence in sequences:
        first, last = int(cache.starts[sequence]), int(cache.starts[sequence + 1])
        packing = Packing.of([last - first], device)
        states = cache.states(exit_layer, first, last).to(device)
        ours = head(states, packing.positions, packing.to_grid, packing.from_grid)
        theirs = normalized(cache.final(first, last).to(device), norm, parts.rms_norm_eps)
        rows = torch.arange((-first) % stride, last - first, stride, device=device)
        for chunk in rows.split(_CHUNK):
            a, b = compare(theirs[chunk], ours[chunk], lm_head)
            agreed, shared, seen = agreed + a, shared + b, seen + len(chunk)
    return Quality(agreed / max(seen, 1), shared / max(seen, 1), seen)


def compare(theirs: Tensor, ours: Tensor, lm_head: Tensor) -> tuple[float, float]:
    """(rows with the same first choice, summed overlap) of normalized states [rows, H]."""
    target_logits, head_logits = theirs @ lm_head.T, ours @ lm_head.T
    same = (target_logits.argmax(-1) == head_logits.argmax(-1)).sum()
    target_probs, draft_probs = target_logits.softmax(-1), head_logits.softmax(-1)
    return float(same), float(torch.minimum(target_probs, draft_probs).sum())


def normalized(final: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The target's state as its lm_head sees it: [rows, H] float32."""
    return torch.nn.functional.rms_norm(final.float(), (final.shape[-1],), weight, eps)
