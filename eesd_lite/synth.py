"""Synthetic targets: random GPTQ checkpoints of a true shape and size, for tests of capacity and bandwidth.

Every byte is real and random (no holes that a file system would not read), yet scales keep activations finite, so that
the engine runs. What such a model says means nothing. Memory is bounded by a few pieces, whatever the shape. Called by
`eesd synth`; `eesd_lite.synth_packed` writes the packed layers in place of the checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eesd_lite.errors import EesdError
from eesd_lite.home import atomic_dir, require_free
from eesd_lite.planning import shape_config
from eesd_lite.progress import Progress, no_progress
from eesd_lite.sizing import module_shapes
from models.shapes import Shape
from quant.tensor_stream import TensorSpec, write_folder

PIECE = 16 * 2**20  # bytes that are made and written at a time
CODE_SPREAD = math.sqrt((16**2 - 1) / 12)  # standard deviation of a code that is uniform over 0 to 15
_MIB = 2**20
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{{ 'assistant: ' }}"


@dataclass(frozen=True)
class SynthSettings:
    """What to write. `layers` cuts the depth; `content` False leaves holes where the weights would be."""

    shape: Shape
    group_size: int
    seed: int = 0
    content: bool = True

    @classmethod
    def of(
        cls, shape: Shape, *, group_size: int | None = None, layers: int | None = None, seed: int = 0,
        content: bool = True,
    ) -> SynthSettings:  # fmt: skip
        """Checked settings; EesdError for a depth or a group size that cannot be."""
        if layers is not None:
            if not 1 <= layers <= shape.num_hidden_layers:
                raise EesdError(f"{shape.name} has {shape.num_hidden_layers} layers; --layers cuts that, to 1 or more")
            shape = replace(shape, num_hidden_layers=layers)
        group = shape.group_size if group_size is None else group_size
        features = (shape.hidden_size, shape.intermediate_size, shape.num_attention_heads * shape.head_dim)
        if group != -1 and (group < 32 or any(size % group for size in features)):
            raise EesdError(
                f"group size {group} does not divide {features[0]} and {features[1]} of {shape.name}, or is below 32"
            )
        return cls(shape, group, seed, content)


def write_checkpoint(target: Path, settings: SynthSettings, progress: Progress = no_progress) -> None:
    """A GPTQ folder (version 1, symmetric) that any loader reads; `target` appears whole or not at all."""
    tensors = [*outer_tensors(settings.shape), *layer_tensors(settings)]
    total = sum(tensor.nbytes for tensor in tensors)
    if settings.content:
        require_free(target, total, f"the synthetic {settings.shape.name}")
    with atomic_dir(target) as partial:
        content = Pieces(settings, tensors).of if settings.content else None
        write_folder(partial, tensors, content, counting(progress, total))
        write_settings(partial, settings)


def outer_tensors(shape: Shape) -> list[TensorSpec]:
    """Everything outside the layers, in 16 bit."""
    table = (shape.vocab_size, shape.hidden_size)
    found = [
        TensorSpec("model.embed_tokens.weight", "F16", table),
        TensorSpec("model.norm.weight", "F16", (shape.hidden_size,)),
    ]
    return found if shape.tie_word_embeddings else [*found, TensorSpec("lm_head.weight", "F16", table)]


def layer_tensors(settings: SynthSettings) -> list[TensorSpec]:
    """The quantized projections and the norms of all layers, in the order of the layers."""
    shape = settings.shape
    found = []
    for index in range(shape.num_hidden_layers):
        for name, (out_features, in_features) in module_shapes(shape_config(shape)).items():
            block = "self_attn" if name in _ATTENTION else "mlp"
            module = f"model.layers.{index}.{block}.{name}"
            groups = 1 if settings.group_size == -1 else in_features // settings.group_size
            found += [
                TensorSpec(f"{module}.qweight", "I32", (in_features // 8, out_features)),
                TensorSpec(f"{module}.qzeros", "I32", (groups, out_features // 8)),
                TensorSpec(f"{module}.scales", "F16", (groups, out_features)),
                TensorSpec(f"{module}.g_idx", "I32", (in_features,)),
            ]
            if shape.attention_bias and name in _ATTENTION[:3]:
                found.append(TensorSpec(f"{module}.bias", "F16", (out_features,)))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found.append(TensorSpec(f"model.layers.{index}.{norm}.weight", "F16", (shape.hidden_size,)))
    return found


class Pieces:
    """The content of every tensor. A tensor's bytes depend on the seed and on its name's place, nothing else."""

    def __init__(self, settings: SynthSettings, tensors: Sequence[TensorSpec]) -> None:
        self._settings = settings
        self._places = {tensor.name: place for place, tensor in enumerate(tensors)}

    def of(self, tensor: TensorSpec) -> Iterator[memoryview]:
        """Pieces of at most PIECE bytes."""
        random = np.random.Generator(np.random.SFC64([self._settings.seed, self._places[tensor.name]]))
        count = math.prod(tensor.shape)
        width = 2 if tensor.dtype == "F16" else 4
        step = PIECE // width
        for first in range(0, count, step):
            numbers = self._numbers(tensor, random, first, min(step, count - first))
            yield np.ascontiguousarray(numbers).view(np.uint8).data

    def _numbers(self, tensor: TensorSpec, random: np.random.Generator, first: int, count: int) -> np.ndarray:
        kind = tensor.name.rpartition(".")[2]
        shape = self._settings.shape
        if kind == "qweight":
            return random_bytes(random, count * 4).view(np.uint32)
        if kind == "qzeros":  # a zero point of 8 in every field, stored as 7
            return np.full(count, 0x77777777, dtype=np.uint32)
        if kind == "g_idx":
            size = tensor.shape[0] if self._settings.group_size == -1 else self._settings.group_size
            return (np.arange(first, first + count) // size).astype(np.int32)
        if kind == "scales":
            module = tensor.name.split(".")[-2]
            return (weight_scale(shape, module) * random.uniform(0.7, 1.3, count)).astype(np.float16)
        if kind == "bias":
            return (0.1 * random.standard_normal(count, dtype=np.float32)).astype(np.float16)
        if "norm" in tensor.name:
            return np.ones(count, dtype=np.float16)
        spread = 2.0 / math.sqrt(shape.hidden_size) if tensor.name.startswith("lm_head") else 0.5
        return (spread * random.standard_normal(count, dtype=np.float32)).astype(np.float16)


def weight_scale(shape: Shape, projection: str) -> float:
    """The mean scale with which a projection keeps the size of what passes through it.

    What is added to the residual stream is smaller by the root of how much is added, so that no depth overflows.
    """
    in_features = module_shapes(shape_config(shape))[projection][1]
    spread = 1 / math.sqrt(in_features)
    if projection in ("o_proj", "down_proj"):
        spread /= math.sqrt(2 * shape.num_hidden_layers)
    return spread / CODE_SPREAD


def random_bytes(random: np.random.Generator, count: int) -> np.ndarray:
    """uint8 [count]"""
    words = random.integers(0, 2**64, size=-(-count // 8), dtype=np.uint64)
    return words.view(np.uint8)[:count]


def write_settings(folder: Path, settings: SynthSettings, **more: Any) -> None:
    """config.json, quantize_config.json and a tokenizer of single bytes; `more` is noted with what was made up."""
    begin, end = write_tokenizer(folder)
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": settings.group_size,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    config = {
        **settings.shape.config_json(),
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": "float16",
        "quantization_config": quantization,
        "eesd_synthetic": {
            "shape": settings.shape.name,
            "seed": settings.seed,
            "content": "random" if settings.content else "none",
            **more,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "quantize_config.json").write_text(json.dumps(quantization, indent=2), encoding="utf-8")


def write_tokenizer(folder: Path) -> tuple[int, int]:
    """A tokenizer with one token for every byte; returns the ids that begin and end a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    assert begin is not None and end is not None
    return begin, end


def counting(progress: Progress, total: int) -> Callable[[int], None]:
    """Reports of pieces as progress in MiB."""
    done = 0

    def written(size: int) -> None:
        nonlocal done
        done += size
        progress("writing random weights, MiB", done // _MIB, -(-total // _MIB))

    return written
