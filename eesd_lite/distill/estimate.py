"""What training costs before it starts: time, memory and disk for any model shape, in integers.

Time is operations divided by a rate; the default rates are those of two server cores, and a measured one can be given.
Bytes of files are exact (`state_cache`, `head_file`); memory is an upper bound of the trainer's own tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from eesd_lite.config import ModelConfig
from eesd_lite.distill.settings import TrainSettings
from eesd_lite.distill.state_cache import cache_bytes
from eesd_lite.layer_shapes import HeadShape

_SEQUENCE = 384  # tokens of one self-written conversation


@dataclass(frozen=True)
class Rates:
    """Operations per second (one multiply-add is two). Writing text token by token uses the machine less well."""

    training: int = 250_000_000_000
    teacher: int = 200_000_000_000
    writing: int = 100_000_000_000


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds. `memory` holds while a head trains; `states` and `checkpoint` lie in the output folder."""

    tokens: int
    exits: int
    head_parameters: int
    head_bytes: int  # one head file
    states_bytes: int
    checkpoint_bytes: int
    disk_bytes: int
    memory_bytes: int
    text_seconds: int
    training_seconds: int

    @property
    def seconds(self) -> int:
        return self.text_seconds + self.training_seconds


def layer_parameters(config: ModelConfig) -> int:
    shape = HeadShape.from_config(config)
    return sum(_product(size) for name, size in shape.tensor_shapes().items() if name.startswith("layer."))


def estimate(
    config: ModelConfig,
    *,
    exits: int,
    tokens: int,
    seen_tokens: int,
    settings: TrainSettings | None = None,
    own_text: bool = True,
    rates: Rates | None = None,
) -> Estimate:
    """`tokens` of text are cached once; each of `exits` heads trains on `seen_tokens` of them, with repetition."""
    settings, rates = settings or TrainSettings(), rates or Rates()
    shape = HeadShape.from_config(config)
    parameters = shape.parameter_count()
    hidden, vocab = config.hidden_size, config.vocab_size
    sample = min(settings.vocabulary, vocab) if settings.vocabulary else vocab
    kl_share_permille = round(1000 * settings.kl_share)
    target_operations = 2 * (config.num_hidden_layers * layer_parameters(config) + vocab * hidden)
    # Forward and backward of the head; two products and one backward through the (frozen) lm_head at KL positions.
    head_operations = 6 * parameters + 6 * sample * hidden * kl_share_permille // 1000
    closed_form = min(tokens, 200_000) * (2 * parameters + 3 * 4 * hidden * hidden)
    states = cache_bytes(tokens=tokens, sequences=max(1, tokens // _SEQUENCE), hidden_size=hidden, exits=exits)
    checkpoint = 12 * parameters  # float32 weights and two moments
    head_file = 2 * parameters
    return Estimate(
        tokens=tokens,
        exits=exits,
        head_parameters=parameters,
        head_bytes=head_file,
        states_bytes=states,
        checkpoint_bytes=checkpoint,
        disk_bytes=states + checkpoint * exits + head_file * exits,
        memory_bytes=_memory(config, parameters, settings.batch_tokens, sample),
        text_seconds=tokens * target_operations // (rates.writing if own_text else rates.teacher),
        training_seconds=exits * (seen_tokens * head_operations + closed_form) // rates.training,
    )


def _memory(config: ModelConfig, parameters: int, batch_tokens: int, vocabulary: int) -> int:
    hidden, inner = config.hidden_size, config.intermediate_size
    weights = (4 + 4 + 8 + 2) * parameters  # float32 masters and gradients, two moments, bfloat16 copies
    lm_head = (4 + 4 + 2) * config.vocab_size * hidden  # as handed in, as judged with, as trained with
    sampled = 2 * vocabulary * hidden if vocabulary < config.vocab_size else 0
    kept = batch_tokens * (2 * (8 * hidden + 4 * inner) + 4 * 6 * hidden)  # activations for the backward pass
    logits = 3 * 2 * (1 << 23) + 3 * 4 * 256 * config.vocab_size
    return weights + lm_head + sampled + kept + logits


def _product(size: tuple[int, ...]) -> int:
    result = 1
    for factor in size:
        result *= factor
    return result
