"""Where numbers stop being finite: run after logits came out as NaN or infinite, so that the error names a layer.

Costs one pass over the text, and nothing while all is well. Called by `eesd_lite.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_lite.cache import Rows
from eesd_lite.target import PREFILL_CHUNK, Target
from eesd_lite.transformer import run_layers


@torch.inference_mode()
def first_break(target: Target, token_ids: Sequence[int]) -> str:
    """What first gives a number that is not finite on these tokens, in words, and what may help.

    Passes them through all layers anew: the cache gets the same keys and values again, bit for bit.
    """
    count, rows = target.config.num_hidden_layers, Rows.chain(0, len(token_ids), target.device)
    hidden = target.embed(list(token_ids))
    if not _finite(hidden):
        return f"the first such numbers are in the embedding; {_remedy(target)}"
    broken: int | None = None
    target.bank.abandon()
    for index in range(count):  # to the end in any case: a sweep over offloaded layers is taken whole
        run_layers(
            target.bank, range(index, index + 1), hidden, rows,
            kv=target.kv, reaches=target.reaches, chunk=PREFILL_CHUNK,
        )  # fmt: skip
        if broken is None and not _finite(hidden):
            broken = index
    if broken is None:
        return f"all {count} layers give finite numbers, so it is the final norm or the lm_head; {_remedy(target)}"
    return f"the first such numbers come out of layer {broken} of {count}; {_remedy(target)}"


def _remedy(target: Target) -> str:
    if target.ops.dtype == torch.float32:
        return "that is in float32, so the checkpoint itself is damaged: fetch it again"
    return f"dtype float32 helps if {str(target.ops.dtype).removeprefix('torch.')} overflowed, else it is damaged"


def _finite(hidden: Tensor) -> bool:
    return bool(torch.isfinite(torch.stack(torch.aminmax(hidden))).all())
