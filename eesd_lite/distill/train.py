"""Trains one exit head on cached hidden states.

Loss: smooth-L1 between the head's normalized state and the target's at every position, plus KL(target || head) at a
random share of positions over a sampled vocabulary. All randomness is a function of (seed, step), so a checkpoint needs
no generator state, and 20 steps equal 10, a kill, and 10 more, bit for bit in float32. Runs in one process or under
`accelerate launch` (data parallel; all processes see the same output folder).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from eesd_lite.distill.head_module import ExitHead, Packing
from eesd_lite.distill.losses import VocabularySample, draw_vocabulary, frequent_ids, kl_gradient
from eesd_lite.distill.optimizer import HeadOptimizer, learning_rate
from eesd_lite.distill.report import CurvePoint, Quality, append_point, measure, normalized
from eesd_lite.distill.ridge import TargetParts, split
from eesd_lite.distill.settings import TrainSettings
from eesd_lite.distill.state_cache import StateCache
from eesd_lite.errors import PrepareError
from eesd_lite.progress import Progress, no_progress

_MEASURED_STEPS = (2, 12)  # with a minutes budget: the first steps warm caches, the next ten give the speed


@dataclass(frozen=True)
class TrainResult:
    exit_layer: int
    tensors: dict[str, Tensor]
    quality: Quality
    tokens: int
    steps: int
    minutes: float
    skipped: int


def windows_of(cache: StateCache, sequences: range, longest: int) -> list[tuple[int, int]]:
    """(first row, rows) of each training window; a remainder of one token teaches nothing and is dropped."""
    windows = []
    for sequence in sequences:
        for first in range(int(cache.starts[sequence]), int(cache.starts[sequence + 1]), longest):
            rows = min(longest, int(cache.starts[sequence + 1]) - first)
            if rows > 1:
                windows.append((first, rows))
    return windows


def batch_stream(
    windows: list[tuple[int, int]], *, batch_tokens: int, seed: int, rank: int = 0, world: int = 1
) -> Iterator[list[tuple[int, int]]]:
    """Endless batches: every epoch a new permutation, a function of (seed, epoch); process r takes every r-th batch."""
    assert windows
    count, epoch = 0, 0
    batch: list[tuple[int, int]] = []
    filled = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for index in torch.randperm(len(windows), generator=generator).tolist():
            if batch and filled + windows[index][1] > batch_tokens:
                if count % world == rank:
                    yield batch
                count, batch, filled = count + 1, [], 0
            batch.append(windows[index])
            filled += windows[index][1]
        epoch += 1


class HeadTrainer:
    """One head's training run; `run` is the loop, everything else is a stage of it."""

    def __init__(
        self,
        cache: StateCache,
        exit_layer: int,
        parts: TargetParts,
        *,
        start: dict[str, Tensor],
        start_name: str = "",
        out: Path,
        settings: TrainSettings,
        accelerator: Accelerator | None = None,
        progress: Progress = no_progress,
    ) -> None:
        self.cache, self.exit_layer, self.parts = cache, exit_layer, parts
        self.settings, self.progress, self.start_name = settings, progress, start_name
        self.accelerator = accelerator or Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.device = self.accelerator.device
        compute = getattr(torch, settings.compute)
        reach = parts.reaches[exit_layer]
        self.head = ExitHead(parts.shape, reach, eps=parts.rms_norm_eps, compute=compute).load(start)
        self.model = self.accelerator.prepare_model(self.head.to(self.device))
        self.optimizer = HeadOptimizer(self.head, settings.optimizer, weight_decay=settings.weight_decay)
        self.training, self.held_out = split(cache)
        self.windows = windows_of(cache, self.training, settings.window)
        if not self.windows:
            raise PrepareError(f"{cache.folder}: no sequence longer than one token; cache more text")
        self.norm = parts.norm.to(self.device, torch.float32)
        self.lm_head = parts.lm_head.to(self.device, compute)
        self.frequent = frequent_ids(cache, self.lm_head.shape[0], settings.vocabulary)
        self.step, self.tokens, self.skipped, self.seconds = 0, 0, 0, 0.0
        self.total_steps = self._planned_steps()

    # ---- length of the schedule -------------------------------------------------------------------------------------

    def _planned_steps(self) -> int:
        """0 while a minutes budget waits for the measured speed."""
        settings, world = self.settings, self.accelerator.num_processes
        if settings.steps is not None:
            return settings.steps
        if settings.minutes is not None:
            return 0
        rows = sum(rows for _, rows in self.windows)
        return max(1, round(settings.epochs * rows / (settings.batch_tokens * world)))

    def _fix_steps(self, seconds_per_step: float) -> None:
        """Turn the minutes budget into steps, once; the main process decides for all."""
        assert self.settings.minutes is not None
        left = self.settings.minutes * 60 - self.seconds
        choice = [max(self.step + 1, self.step + int(left / seconds_per_step))]
        broadcast_object_list(choice)
        self.total_steps = choice[0]

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Path:
        return self.out / f"checkpoint-exit{self.exit_layer:02d}.pt"

    @property
    def curve(self) -> Path:
        return self.out / "curve.jsonl"

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be continued."""
        meta = self.cache.meta
        length = ("minutes", "steps", "epochs", "checkpoint_minutes", "checkpoint_steps")
        settings = {k: v for k, v in asdict(self.settings).items() if k not in length}
        start = {"start": self.start_name} if self.start_name else {}
        return {"exit": self.exit_layer, "fingerprint": meta.fingerprint, "tokens": meta.tokens, **settings, **start}

    def save(self) -> None:
        if self.accelerator.is_main_process:
            state = {
                "identity": self._identity(),
                "model": self.head.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "counters": [self.step, self.total_steps, self.tokens, self.skipped, self.seconds],
            }
            temporary = self.checkpoint.with_suffix(".tmp")
            torch.save(state, temporary)
            os.replace(temporary, self.checkpoint)
        self.accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Continue from the checkpoint if there is one of the same run."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if state["identity"] != self._identity():
            self.progress(f"exit {self.exit_layer}: the checkpoint is of other settings, starting anew", 0, 0)
            return False
        self.head.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, total, self.tokens, self.skipped, self.seconds = state["counters"]
        if self.settings.steps is None:  # a schedule once begun keeps its length
            self.total_steps = total
        return True

    # ---- one step ---------------------------------------------------------------------------------------------------

    def _one_step(self, batch: list[tuple[int, int]]) -> tuple[float, float]:
        """(state loss, overlap at the KL positions); the weights move unless the gradient is not finite."""
        settings = self.settings
        packing = Packing.of([rows for _, rows in batch], self.device)
        states = torch.cat([self.cache.states(self.exit_layer, at, at + rows) for at, rows in batch]).to(self.device)
        final = torch.cat([self.cache.final(at, at + rows) for at, rows in batch]).to(self.device)
        theirs = normalized(final, self.norm, self.parts.rms_norm_eps)
        ours = self.model(states, packing.positions, packing.to_grid, packing.from_grid)
        state_loss = F.smooth_l1_loss(ours, theirs)
        loss, overlap = settings.state_weight * state_loss, 0.0
        picked = self._picked(len(ours))
        if len(picked):
            gradient, overlap = kl_gradient(ours.detach()[picked], theirs[picked], self._vocabulary())
            # A product with the gradient held fixed: its derivative is exactly that of the KL, in bounded memory.
            loss = loss + settings.kl_weight * (ours[picked] * gradient).sum() / len(picked)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        length = torch.nn.utils.clip_grad_norm_(self.head.parameters(), settings.clip)
        if bool(torch.isfinite(length)):  # gradients are averaged over processes, so all decide alike
            self.optimizer.step(learning_rate(self.step, self.total_steps, settings))
        else:
            self.skipped += 1
        return float(state_loss.detach()), overlap

    def _generator(self, purpose: int) -> torch.Generator:
        place = self.step * self.accelerator.num_processes + self.accelerator.process_index
        return torch.Generator().manual_seed((self.settings.seed * 8 + purpose) * 1_000_000_007 + place)

    def _picked(self, rows: int) -> Tensor:
        count = round(rows * self.settings.kl_share)
        return torch.randperm(rows, generator=self._generator(0))[:count].to(self.device)

    def _vocabulary(self) -> VocabularySample:
        return draw_vocabulary(self.lm_head, self.frequent, self.settings.vocabulary, self._generator(1))

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        settings, world = self.settings, self.accelerator.num_processes
        self.resume()
        stream = batch_stream(
            self.windows,
            batch_tokens=settings.batch_tokens,
            seed=settings.seed,
            rank=self.accelerator.process_index,
            world=world,
        )
        for _ in range(self.step):
            next(stream)
        saved, loss, overlap = time.monotonic(), 0.0, 0.0
        while not self.total_steps or self.step < self.total_steps:
            begun = time.monotonic()
            batch = next(stream)
            state_loss, seen = self._one_step(batch)
            self.step += 1
            self.tokens += sum(rows for _, rows in batch) * world
            share = 0.02 if self.step > 50 else 1.0 / self.step
            loss, overlap = loss + share * (state_loss - loss), overlap + share * (seen - overlap)
            self.seconds += time.monotonic() - begun
            if self.step == _MEASURED_STEPS[0]:
                mark = self.seconds
            if not self.total_steps and self.step == _MEASURED_STEPS[1]:
                self._fix_steps((self.seconds - mark) / (_MEASURED_STEPS[1] - _MEASURED_STEPS[0]))
            text = f"exit {self.exit_layer}: training, overlap {overlap:.3f}, state loss {loss:.3f}"
            self.progress(text, self.step, self.total_steps)
            every = max(1, self.total_steps // max(1, settings.eval_points))
            if self.total_steps and self.step % every == 0 and self.step < self.total_steps:
                self.evaluate(loss, settings.eval_positions)
            if self._save_due(saved):
                self.save()
                saved = time.monotonic()
        self.save()
        quality = self.evaluate(loss, settings.final_positions)
        return TrainResult(
            self.exit_layer, self.head.tensors(), quality, self.tokens, self.step, self.seconds / 60, self.skipped
        )

    def _save_due(self, saved: float) -> bool:
        settings = self.settings
        if settings.checkpoint_steps is not None:
            return self.step % settings.checkpoint_steps == 0
        due = [self.accelerator.is_main_process and time.monotonic() - saved > settings.checkpoint_minutes * 60]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(due)
        return due[0]

    def evaluate(self, loss: float, positions: int) -> Quality:
        """Held-out quality, measured and noted by the main process; the others get a zero they do not use."""
        if not self.accelerator.is_main_process:
            return Quality(0.0, 0.0, 0)
        quality = measure(
            self.head, self.cache, self.exit_layer, self.parts, sequences=self.held_out, positions=positions
        )
        append_point(
            self.curve,
            CurvePoint(
                exit_layer=self.exit_layer,
                step=self.step,
                tokens=self.tokens,
                text_tokens=self.cache.meta.tokens,
                minutes=round(self.seconds / 60, 3),
                loss=round(loss, 5),
                agreement=round(quality.agreement, 4),
                overlap=round(quality.overlap, 4),
                skipped=self.skipped,
            ),
        )
        return quality
