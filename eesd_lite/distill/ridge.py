"""The closed-form head: target layer N as it is, and an affine map solved by ridge regression on cached states.

No training: a minute of linear algebra gives a usable head for any model, and the start of every trained one. Three
weightings of the rows are solved and the one whose head agrees most with the target on held-out rows is kept: a row's
scale is undone by the norm that follows, so which scale to fit is ours to choose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eesd_lite.distill.head_module import ExitHead, Packing
from eesd_lite.distill.report import Quality, measure
from eesd_lite.distill.state_cache import StateCache
from eesd_lite.errors import PrepareError
from eesd_lite.layer_shapes import HeadShape
from eesd_lite.ops import Reach
from eesd_lite.progress import Progress, no_progress

VARIANTS = ("plain", "weighted", "scaled")
_REGULARIZATION = 1e-4  # of the mean diagonal: only there to keep the solve well posed
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class TargetParts:
    """What the trainer needs of the target, dense: `layers[N]` by the names of `HeadShape.layer_shapes`."""

    shape: HeadShape
    rms_norm_eps: float
    reaches: tuple[Reach, ...]  # one for every layer of the target; a head's layer stands where layer N does
    layers: Mapping[int, Mapping[str, Tensor]]
    norm: Tensor  # [H], the final norm
    lm_head: Tensor  # [V, H]


@dataclass(frozen=True)
class Start:
    """A head to train on: file-ready tensors, which weighting won, and how good it is on held-out rows."""

    tensors: dict[str, Tensor]
    variant: str  # one of VARIANTS, or "given"
    quality: Quality

    @property
    def name(self) -> str:
        """What a checkpoint remembers of its start: nothing of a closed form, which follows from the states."""
        if self.variant != "given":
            return ""
        norm = self.tensors["norm.weight"].numpy().tobytes() + self.tensors["affine.bias"].numpy().tobytes()
        return hashlib.sha256(norm).hexdigest()[:16]


def split(cache: StateCache, held_out_share: float = 0.03) -> tuple[range, range]:
    """(training, held-out) sequence numbers: the last 3 % of the sequences teach nothing and judge."""
    count = cache.meta.sequences
    held_out = max(1, round(count * held_out_share))
    if count < 2:
        raise PrepareError(f"{cache.folder}: {count} sequences are too few to train on; cache more text")
    return range(count - held_out), range(count - held_out, count)


def batches_of(cache: StateCache, sequences: range, tokens: int) -> list[list[int]]:
    """Consecutive sequences in batches of about `tokens` tokens, at least one sequence each."""
    batches: list[list[int]] = []
    room = 0
    for sequence in sequences:
        size = int(cache.lengths[sequence])
        if not batches or size > room:
            batches.append([])
            room = tokens
        batches[-1].append(sequence)
        room -= size
    return batches


def instant_head(
    cache: StateCache,
    exit_layer: int,
    parts: TargetParts,
    *,
    max_tokens: int = 200_000,
    eval_positions: int = 4096,
    compute: torch.dtype = torch.bfloat16,
    progress: Progress = no_progress,
) -> Start:
    """Solve the affine map for exit layer N and keep the best weighting."""
    training, held_out = split(cache)
    head = ExitHead(parts.shape, parts.reaches[exit_layer], eps=parts.rms_norm_eps, compute=compute)
    width = parts.shape.hidden_size
    start = {f"layer.{name}": parts.layers[exit_layer][name].float() for name in parts.shape.layer_shapes()}
    start |= {"affine.weight": torch.eye(width), "affine.bias": torch.zeros(width), "norm.weight": parts.norm.float()}
    head.load(start)
    sums = _accumulate(cache, exit_layer, head, _first(cache, training, max_tokens), progress)
    best: Start | None = None
    for done, variant in enumerate(VARIANTS):
        progress(f"exit {exit_layer}: solving the affine map", done, len(VARIANTS))
        weight, bias = _solve(*sums[variant])
        tensors = start | {"affine.weight": weight, "affine.bias": bias}
        quality = measure(head.load(tensors), cache, exit_layer, parts, sequences=held_out, positions=eval_positions)
        if best is None or quality.agreement > best.quality.agreement:
            best = Start(tensors, variant, quality)
    assert best is not None
    return best


def given_head(
    tensors: Mapping[str, Tensor],
    cache: StateCache,
    exit_layer: int,
    parts: TargetParts,
    *,
    eval_positions: int = 4096,
    compute: torch.dtype = torch.bfloat16,
) -> Start:
    """A finished head as the start of more training, judged on this cache's held-out rows."""
    head = ExitHead(parts.shape, parts.reaches[exit_layer], eps=parts.rms_norm_eps, compute=compute).load(tensors)
    _, held_out = split(cache)
    quality = measure(head, cache, exit_layer, parts, sequences=held_out, positions=eval_positions)
    return Start(head.tensors(), "given", quality)


def _first(cache: StateCache, sequences: range, max_tokens: int) -> range:
    ends = cache.starts[1:][sequences.start : sequences.stop] - cache.starts[sequences.start]
    count = max(1, int((ends <= max_tokens).sum()))
    return range(sequences.start, sequences.start + count)


@torch.no_grad()
def _accumulate(
    cache: StateCache, exit_layer: int, head: ExitHead, sequences: range, progress: Progress
) -> dict[str, tuple[Tensor, Tensor]]:
    """Normal equations per variant in float64: (X'X [H+1, H+1], X'Y [H+1, H]) with X = layer output and a one."""
    width = cache.meta.hidden_size
    sums = {
        variant: (
            torch.zeros(width + 1, width + 1, dtype=torch.float64),
            torch.zeros(width + 1, width, dtype=torch.float64),
        )
        for variant in VARIANTS
    }
    batches = batches_of(cache, sequences, _BATCH_TOKENS)
    for done, batch in enumerate(batches):
        progress(f"exit {exit_layer}: closed-form start", done, len(batches))
        first, last = int(cache.starts[batch[0]]), int(cache.starts[batch[-1] + 1])
        packing = Packing.of([int(cache.lengths[s]) for s in batch])
        output = head.run_layer(cache.states(exit_layer, first, last), packing).float()
        # The first position of a sequence carries a far larger state than all others and would own the sums.
        keep = packing.positions > 0
        x = torch.cat((output, torch.ones(len(output), 1)), dim=1)[keep]
        y = cache.final(first, last).float()[keep]
        inverse_rms = y.pow(2).mean(1, keepdim=True).add(1e-12).rsqrt()
        rows = {"plain": (x, y), "weighted": (x * inverse_rms, y * inverse_rms), "scaled": (x, y * inverse_rms)}
        for variant, (left, right) in rows.items():
            sums[variant][0].add_((left.T @ left).double())
            sums[variant][1].add_((left.T @ right).double())
    return sums


def _solve(gram: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """(A [H, H], b [H]) of the ridge regression; the bias column is not penalized."""
    penalty = torch.full((gram.shape[0],), float(_REGULARIZATION * gram.diagonal()[:-1].mean()), dtype=torch.float64)
    penalty[-1] = 0.0
    solution = torch.linalg.solve(gram + torch.diag(penalty), cross)  # [H + 1, H]
    return solution[:-1].T.float().contiguous(), solution[-1].float().contiguous()
