"""The distillation gradient over the vocabulary, in bounded memory.

A full-vocabulary softmax per position costs more than the head itself. The KL can therefore run over a sample: the
tokens most frequent in the text always, others drawn anew each step with their logits raised by log(outside / drawn),
which keeps both partition functions right on average (importance sampling). Called by `train`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eesd_lite.distill.state_cache import StateCache

_CHUNK_LOGITS = 1 << 23  # logits per chunk: 16 MB in bfloat16, so that a chunk stays near the caches


@dataclass(frozen=True)
class VocabularySample:
    """Rows of lm_head, and what to add to their logits (None: the whole vocabulary)."""

    lm_head: Tensor  # [vocabulary, H]
    raised: Tensor | None  # [vocabulary]


def frequent_ids(cache: StateCache, vocab_size: int, vocabulary: int) -> Tensor:
    """Two thirds of the sample: the most frequent tokens of the cached text, ties to the lower id."""
    keep = min(vocabulary * 2 // 3, vocab_size)
    counts = np.bincount(np.asarray(cache.tokens), minlength=vocab_size)
    return torch.from_numpy(np.argsort(-counts, kind="stable")[:keep].copy())


def draw_vocabulary(lm_head: Tensor, frequent: Tensor, vocabulary: int, generator: torch.Generator) -> VocabularySample:
    """`frequent` plus random others up to `vocabulary` tokens; 0 or too many: all of them."""
    size = lm_head.shape[0]
    if not 0 < vocabulary < size:
        return VocabularySample(lm_head, None)
    outside = torch.ones(size, dtype=torch.bool)
    outside[frequent] = False
    others = outside.nonzero().squeeze(1)
    drawn = others[torch.randperm(len(others), generator=generator)[: vocabulary - len(frequent)]]
    raised = torch.zeros(vocabulary)
    raised[len(frequent) :] = math.log(len(others) / max(1, len(drawn)))
    ids = torch.cat((frequent, drawn)).to(lm_head.device)
    return VocabularySample(lm_head.index_select(0, ids), raised.to(lm_head))


@torch.no_grad()
def kl_gradient(ours: Tensor, theirs: Tensor, sample: VocabularySample) -> tuple[Tensor, float]:
    """(d KL(target || head) / d ours [rows, H] float32, mean overlap of the two distributions).

    The derivative by the logits is draft_probs - target_probs, so no logits outlive their chunk.
    """
    weight = sample.lm_head
    rows = max(1, _CHUNK_LOGITS // weight.shape[0])
    gradient = torch.empty_like(ours)
    distance = 0.0
    for at in range(0, len(ours), rows):
        mine, wanted = ours[at : at + rows].to(weight.dtype), theirs[at : at + rows].to(weight.dtype)
        # softmax of bfloat16 logits computes in float32 inside and rounds the result
        difference = F.linear(mine, weight, sample.raised).softmax(-1)
        difference -= F.linear(wanted, weight, sample.raised).softmax(-1)
        gradient[at : at + rows] = (difference @ weight).float()
        distance += float(torch.linalg.vector_norm(difference, 1, dtype=torch.float32))
    return gradient, 1.0 - 0.5 * distance / max(1, len(ours))
