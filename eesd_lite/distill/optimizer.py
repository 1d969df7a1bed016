"""Optimizers and the learning-rate schedule of a head.

The rate is a function of the step alone (linear warm-up, then a cosine), so a checkpoint needs no scheduler state.
"muon" orthogonalizes the momentum of every matrix (torch.optim.Muon) and leaves vectors to AdamW; rates are on AdamW's
scale for both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from eesd_lite.distill.settings import TrainSettings


class HeadOptimizer:
    """One or two torch optimizers behind one step."""

    def __init__(self, head: nn.Module, kind: str, *, weight_decay: float) -> None:
        matrices = [p for p in head.parameters() if p.ndim == 2]
        vectors = [p for p in head.parameters() if p.ndim != 2]
        # Norm weights and the bias are not decayed: zero is no sensible prior for them.
        plain = [{"params": vectors, "weight_decay": 0.0}]
        self._parts: list[torch.optim.Optimizer] = []
        if kind == "muon":
            self._parts.append(
                torch.optim.Muon(
                    matrices, lr=0.0, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
                )
            )
        else:
            plain.append({"params": matrices, "weight_decay": weight_decay})
        self._parts.append(torch.optim.AdamW(plain, lr=0.0, betas=(0.9, 0.95), fused=True))

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


def learning_rate(step: int, total_steps: int, settings: TrainSettings) -> float:
    """`total_steps` 0 means not known yet, which is so only during the warm-up."""
    peak, warmup = settings.learning_rate, max(1, settings.warmup_steps)
    if total_steps:
        warmup = min(warmup, max(1, total_steps // 4))
    if step < warmup or not total_steps:
        return peak * min(1.0, (step + 1) / warmup)
    done = (step - warmup) / max(1, total_steps - warmup)
    return peak * (settings.final_rate + (1 - settings.final_rate) * 0.5 * (1 + math.cos(math.pi * done)))
