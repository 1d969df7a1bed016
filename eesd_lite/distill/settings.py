"""How a head is trained: the one place with defaults that were found by trial, light enough for programs to import."""

from __future__ import annotations

from dataclasses import dataclass

from eesd_lite.errors import PrepareError


@dataclass(frozen=True)
class TrainSettings:
    """How to train. `minutes` (per head), else `steps`, else `epochs` fixes the length of the schedule."""

    epochs: float = 4.0
    minutes: float | None = None
    steps: int | None = None
    batch_tokens: int = 2048  # per process; small batches gave more agreement per minute (docs/heads.md)
    window: int = 512  # longer sequences are cut
    learning_rate: float = 1e-3
    final_rate: float = 0.02  # of learning_rate, at the end of the cosine
    warmup_steps: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    optimizer: str = "adamw"  # or "muon" (for matrices; AdamW for the rest)
    state_weight: float = 1.0
    kl_weight: float = 1.0
    kl_share: float = 0.1  # of the positions
    vocabulary: int = 0  # sampled vocabulary for the KL, 0: all of it
    compute: str = "bfloat16"
    seed: int = 0
    checkpoint_minutes: float = 2.0
    checkpoint_steps: int | None = None
    eval_points: int = 8  # learning-curve points over the schedule
    eval_positions: int = 2048
    final_positions: int = 8192

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise PrepareError(f"optimizer {self.optimizer!r} is not known; use adamw or muon")
        if self.compute not in ("bfloat16", "float32"):
            raise PrepareError(f"compute type {self.compute!r} is not known; use bfloat16 or float32")
        if not 0.0 <= self.kl_share <= 1.0 or self.batch_tokens < 1 or self.window < 2:
            raise PrepareError(
                f"kl_share {self.kl_share} must be 0 to 1, batch_tokens {self.batch_tokens} and window {self.window}"
                " positive"
            )
