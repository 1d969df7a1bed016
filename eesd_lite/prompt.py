"""What `Engine.generate` is given, checked before anything runs, and how much of it is known already."""

from __future__ import annotations

from collections.abc import Sequence

from eesd_lite.config import ModelConfig
from eesd_lite.errors import PromptError
from eesd_lite.text import TextCodec


def prompt_ids(prompt: str | Sequence[int], text: TextCodec, config: ModelConfig, context: int) -> list[int]:
    """The ids of a prompt, or PromptError: empty, of ids that the model does not have, or too long."""
    if not isinstance(prompt, str) and any(not isinstance(token, int) for token in prompt):
        raise PromptError("one prompt at a time: a text or a list of token ids (batches are not supported)")
    ids = text.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise PromptError("the prompt is empty")
    wrong = next((token for token in ids if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        raise PromptError(f"token id {wrong} is outside the model's vocabulary of {config.vocab_size}")
    if len(ids) >= context:
        raise PromptError(
            f"the prompt has {len(ids)} tokens and the context holds {context}; "
            "shorten it or load the model with a larger --context"
        )
    return ids


def shared_length(cached: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens at the beginning are the same in both."""
    return next((n for n, (a, b) in enumerate(zip(cached, ids, strict=False)) if a != b), min(len(cached), len(ids)))
