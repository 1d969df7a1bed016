"""tau of a new head from real decoding: the engine continues held-out conversations with it, greedily.

Agreement on cached states says how often the head is right; tau says what that is worth, drafts cut short included.
What the head's confidence was worth on the same conversations is written into its file, for controllers to begin with.
Called by `eesd_lite.distill.run` when a head has been saved.
"""

from __future__ import annotations

from pathlib import Path

from eesd_lite.distill.ridge import split
from eesd_lite.distill.state_cache import StateCache
from eesd_lite.head_file import write_acceptance
from eesd_lite.params import SamplingParams
from eesd_lite.progress import Progress

CONTROLLER = "fixed:4"
CONVERSATIONS = 8
PROMPT_TOKENS = 64
NEW_TOKENS = 64


def measure_tau(
    folder: Path, head: Path, cache: StateCache, progress: Progress, *, quantize: str | None = None,
    weights: str | None = None,
) -> float:  # fmt: skip
    """Mean tokens per round over the beginnings of held-out sequences, with up to four drafted tokens a round.

    Writes the head's acceptance into its file.
    """
    from eesd_lite.engine import Engine  # the engine may ask for an instant head, which leads here again
    from eesd_lite.replay.judge import measure_prior

    _, held_out = split(cache)
    sequences = [i for i in held_out if cache.lengths[i] > 8][:CONVERSATIONS]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with Engine.from_pretrained(
        folder, head=head, controller=CONTROLLER, context=PROMPT_TOKENS + NEW_TOKENS, draft_limit=4, progress=progress,
        quantize=quantize, weights=weights,
    ) as engine:  # fmt: skip
        prompts = []
        for number, sequence in enumerate(sequences):
            progress("decoding with the new head, conversation", number, len(sequences))
            start = int(cache.starts[sequence])
            count = min(PROMPT_TOKENS, int(cache.lengths[sequence]) // 2)
            prompts.append([int(token) for token in cache.tokens[start : start + count]])
            for _ in engine.generate(prompts[-1], params):
                pass
        tau = engine.stats.tau
        prior = measure_prior(engine, prompts, params, progress=progress)
    write_acceptance(head, prior)
    return tau
