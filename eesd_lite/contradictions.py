"""What a folder says twice, and not the same: found with a few small reads, after the pre-flight check.

Headers cannot tell whether a bias is all zero or a stored copy of the embedding is one, so some values are looked at.
What would make a model say something else than its makers meant is refused; where the tensors decide, a note says so.
"""

from __future__ import annotations

import torch

from eesd_lite.config import ModelConfig
from eesd_lite.dense import layer_prefix
from eesd_lite.errors import ModelError
from eesd_lite.preflight import EMBEDDING, LM_HEAD
from quant.checkpoint import Checkpoint
from quant.errors import shown

_SAMPLE = 256  # rows of a table that are compared: two different matrices differ nearly everywhere


def contradictions(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """Notes; ModelError for an lm_head that is tied by config.json and stored with other values."""
    _check_tied(checkpoint, config)
    return [*_double(checkpoint), *_unclaimed_biases(checkpoint, config), *_idle_settings(checkpoint)]


def _check_tied(checkpoint: Checkpoint, config: ModelConfig) -> None:
    name = f"{LM_HEAD}.weight"
    if not config.tie_word_embeddings or name not in checkpoint or checkpoint.is_quantized(LM_HEAD):
        return
    stored, embedding = checkpoint.tensor(name), checkpoint.tensor(EMBEDDING)
    step = max(1, embedding.shape[0] // _SAMPLE)
    if stored.shape != embedding.shape or not torch.equal(stored[::step].float(), embedding[::step].float()):
        raise ModelError(
            f"{checkpoint.folder}: config.json ties lm_head to the embedding, but '{name}' is stored with other "
            "values; set tie_word_embeddings to false to use it, or remove the tensor"
        )


def _double(checkpoint: Checkpoint) -> list[str]:
    modules = (name.removesuffix(".qweight") for name in checkpoint.tensors if name.endswith(".qweight"))
    double = sorted(module for module in modules if f"{module}.weight" in checkpoint)
    if not double:
        return []
    more = f" and {len(double) - 1} more modules" if len(double) > 1 else ""
    return [f"'{shown(double[0])}'{more}: stored in 16 bit and quantized; the quantized one is used"]


def _unclaimed_biases(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """Of the first layer: a file that has them has them everywhere."""
    prefix = layer_prefix(0)
    found = []
    for name in sorted(checkpoint.tensors):
        module, inner, _ = name.rpartition(".bias")
        if inner and module.startswith(f"{prefix}.") and module.rpartition(".")[2] not in config.biases:
            if checkpoint.bias(module) is not None:
                found.append(module.removeprefix(f"{prefix}."))
    if not found:
        return []
    return [f"biases of {', '.join(found)} are stored, not all zero, though config.json has none there: they are added"]


def _idle_settings(checkpoint: Checkpoint) -> list[str]:
    layers = [name for name in checkpoint.tensors if ".layers." in name]  # none where packed layers come along
    if checkpoint.quant_config is None or not layers or any(n.endswith((".qweight", ".quant_map")) for n in layers):
        return []
    return ["the settings say that the model is quantized, but all of its tensors are in 16 bit: run as such"]
