"""`eesd quantize`: a 16-bit Hugging Face folder becomes a 4-bit GPTQ folder, layer by layer.

One layer is in memory at a time. Its Hessians come from the outputs of the layers that are already quantized, and
within the layer from the projections that are (true_sequential: q/k/v, then o, then gate/up, then down). The
arithmetic for one matrix is `quant.gptq`; the folder is written by `quant.writer`. Also called by `eesd_lite.prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from eesd_lite.config import ModelConfig
from eesd_lite.dense import (
    PROJECTION_GROUPS,
    DenseLayer,
    attend,
    layer_forward,
    mlp_inner,
    mlp_input,
    read_dense_layer,
    rms_norm,
)
from eesd_lite.errors import EesdError
from eesd_lite.home import atomic_dir
from eesd_lite.layer_shapes import layer_prefix
from eesd_lite.ops import Reach
from eesd_lite.progress import Progress, no_progress
from eesd_lite.rope import layer_reaches
from quant.checkpoint import Checkpoint
from quant.config import read_quant_config
from quant.gptq import GridSettings, gptq_quantize, round_to_nearest
from quant.matrix import QuantizedMatrix
from quant.packing import SUPPORTED_BITS
from quant.safetensors_index import read_json
from quant.writer import GPTQWriter

BATCH_TOKENS = 8192  # calibration tokens per forward call
LAYOUTS = {"auto": 0, "gptq": 1, "gptq_v2": 2}  # checkpoint_format -> how zero points are stored; 0: by the grid


def quantize_folder(
    src: Path,
    dst: Path,
    *,
    bits: int = 4,
    group_size: int = 64,
    desc_act: bool = False,
    sym: bool = True,
    method: str = "gptq",
    layout: str = "auto",
    calibration: Sequence[Sequence[int]] = (),
    progress: Progress = no_progress,
) -> None:
    """Write a GPTQ folder `dst` from the 16-bit folder `src`; `dst` appears whole or not at all.

    `calibration` holds token ids, one sequence each (method "rtn" needs none). `layout` is a key of LAYOUTS; "gptq"
    makes a folder that AutoGPTQ loads too, "auto" takes version 1 for symmetric grids and version 2 for others. Raises
    EesdError for settings that cannot be, CheckpointError for a source that cannot be read.
    """
    if method not in ("gptq", "rtn"):
        raise EesdError(f"method must be 'gptq' or 'rtn', not '{method}'")
    if layout not in LAYOUTS:
        raise EesdError(f"layout must be one of {', '.join(LAYOUTS)}, not '{layout}'")
    if dst.exists():
        raise EesdError(f"{dst} exists already; remove it or name another folder")
    config = ModelConfig.from_folder(src)
    version = LAYOUTS[layout] or (1 if sym else 2)
    settings = GridSettings(
        bits=bits, group_size=group_size, sym=sym, desc_act=desc_act and method == "gptq",
        least_zero=1 if version == 1 else 0,
    )  # fmt: skip
    _check_settings(config, settings)
    batches = _batches(config, calibration) if method == "gptq" else []
    refuse_quantized(src)
    checkpoint = Checkpoint(src)
    with atomic_dir(dst) as partial:
        writer = GPTQWriter(partial, checkpoint, settings, version=version)
        writer.copy_small_files()
        writer.add_unquantized(repeat_embedding=layout == "gptq" and config.tie_word_embeddings)
        embed = checkpoint.tensor("model.embed_tokens.weight").to(torch.float32)
        hidden = [F.embedding(batch, embed) for batch in batches]
        reaches = layer_reaches(config, max((batch.shape[1] for batch in batches), default=1))
        for index in range(config.num_hidden_layers):
            progress(f"quantizing ({method}, {bits} bit, group {group_size}), layer", index, config.num_hidden_layers)
            layer = read_dense_layer(checkpoint, index)
            for name, matrix in _quantize_layer(config, layer, settings, hidden, reaches[index]):
                writer.add_matrix(f"{layer_prefix(index)}.{name}", matrix)
                layer = replace(layer, **{name.rsplit(".", 1)[1]: matrix.dequantize()})
            hidden = [layer_forward(config, layer, batch, reaches[index]) for batch in hidden]
        writer.finish()
        progress("quantizing: done", config.num_hidden_layers, config.num_hidden_layers)


def refuse_quantized(folder: Path) -> None:
    """EesdError for a folder that holds a quantized model: quantizing twice only loses."""
    config = folder / "config.json"
    in_blocks = config.exists() and read_json(config).get("quantization_config")  # bitsandbytes says it only there
    if read_quant_config(folder) is not None or in_blocks:
        raise EesdError(f"{folder} is quantized already; quantize the 16-bit model that it was made from")


def _check_settings(config: ModelConfig, settings: GridSettings) -> None:
    if settings.bits not in SUPPORTED_BITS:
        raise EesdError(f"bits must be 2, 3, 4 or 8, not {settings.bits}")
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_attention_heads * config.head_dim,
    }
    for label, size in widths.items():
        if settings.group_size != -1 and (settings.group_size < 8 or size % settings.group_size):
            raise EesdError(
                f"group size {settings.group_size} does not divide {label} {size}; try 64, 32 or -1 (one group per row)"
            )


def _batches(config: ModelConfig, calibration: Sequence[Sequence[int]]) -> list[Tensor]:
    """Sequences cut to the shortest length, grouped into [batch, seq] tensors of about BATCH_TOKENS."""
    if not calibration:
        raise EesdError("GPTQ needs calibration token ids; give --calibration, or use --method rtn")
    length = min(len(ids) for ids in calibration)
    if length < 2:
        raise EesdError("a calibration sequence holds fewer than 2 tokens")
    largest = max(max(ids) for ids in calibration)
    if largest >= config.vocab_size:
        raise EesdError(f"calibration token id {largest} is beyond the model's vocabulary of {config.vocab_size}")
    rows = torch.tensor([list(ids[:length]) for ids in calibration])
    return list(rows.split(max(1, BATCH_TOKENS // length)))


def _quantize_layer(
    config: ModelConfig,
    layer: DenseLayer,
    settings: GridSettings,
    hidden: list[Tensor],
    reach: Reach,
) -> Iterator[tuple[str, QuantizedMatrix]]:
    """Yield (`self_attn.q_proj`, matrix) ...; projections that are done feed the inputs of those that follow."""
    for block, names in PROJECTION_GROUPS:
        hessian = _hessian(config, layer, names[0], hidden, reach) if hidden else None
        stacked = torch.cat([getattr(layer, name) for name in names])  # one Hessian, so one pass for all of them
        whole = (
            gptq_quantize(stacked, hessian, settings) if hessian is not None else round_to_nearest(stacked, settings)
        )
        row = 0
        for name in names:
            rows = slice(row, row + getattr(layer, name).shape[0])
            row = rows.stop
            part = replace(
                whole, codes=whole.codes[rows], scales=whole.scales[:, rows], zeros=whole.zeros[:, rows],
                bias=layer.bias(name),
            )  # fmt: skip
            layer = replace(layer, **{name: part.dequantize()})
            yield f"{block}.{name}", part


def _hessian(config: ModelConfig, layer: DenseLayer, projection: str, hidden: list[Tensor], reach: Reach) -> Tensor:
    """Mean of x x^T over the inputs of `projection`, float32 [in, in] (a constant factor does not matter to GPTQ)."""
    total: Tensor | None = None
    count = 0
    for batch in hidden:
        inputs = _inputs(config, layer, projection, batch, reach).flatten(0, 1)
        total = inputs.t() @ inputs if total is None else total.addmm_(inputs.t(), inputs)
        count += inputs.shape[0]
    assert total is not None
    return total / count


def _inputs(config: ModelConfig, layer: DenseLayer, projection: str, hidden: Tensor, reach: Reach) -> Tensor:
    """What `projection` sees, [batch, seq, in_features]."""
    normed = rms_norm(hidden, layer.input_layernorm, config.rms_norm_eps)
    if projection == "q_proj":
        return normed
    mixed = attend(config, layer, normed, reach)
    if projection == "o_proj":
        return mixed
    _, normed = mlp_input(config, layer, hidden, mixed)
    return normed if projection == "gate_proj" else mlp_inner(layer, normed)
