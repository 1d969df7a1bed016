"""The look before the load: does the folder hold every tensor that the target needs, whole and in the right shape?

Headers only (and one small tensor of zero points), so that a bad download is named in a second and not after minutes.
Everything that is wrong is collected and reported at once. What a layer consists of comes from `layer_shapes` alone.
Called by `Engine.from_pretrained` before anything is packed or allocated, and by `eesd inspect`, which lists the same
problems: no torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from eesd_lite.config import ModelConfig
from eesd_lite.errors import ModelError
from eesd_lite.layer_shapes import HeadShape, layer_prefix
from eesd_lite.packed_beside import packed_beside
from quant.block_module import block_state, owner
from quant.errors import CheckpointError, in_one_line, shown
from quant.gptq_module import PARTS
from quant.model_folder import ModelFolder
from quant.survey import survey_folder

if TYPE_CHECKING:
    from quant.checkpoint import Checkpoint

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head"
FLOATS = ("F16", "BF16", "F32", "F64")
_IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # recomputed, whatever they hold


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of one decoder layer, by Hugging Face's names inside it (`mlp.up_proj.weight`), and their shapes."""
    return HeadShape.from_config(config).layer_shapes()  # a head's layer has the shape of the target's


def header_problems(opened: ModelFolder, config: ModelConfig) -> list[str]:
    """Everything that is missing or misshapen, one line each; empty where the folder may be loaded.

    The folder may have been opened `tolerant`: damaged files are reported here, together with the rest.
    """
    problems = [line.removeprefix(f"{opened.folder}/") for line in opened.index.problems]
    if problems and not opened.tensors:
        return problems
    problems += _absent_layers(opened, _layer_count(opened, config), layer_shapes(config))
    expected = _expected(opened, config)
    problems += [line for name, shape in expected.items() for line in _faults(opened, name, shape)]
    problems += _foreign_norms(opened, config, expected)
    return problems


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> tuple[str, ...]:
    """Notes on what was decided or ignored; ModelError, in one line, that names all `header_problems`, or what is wrong
    with the zero points of the first matrix (the one tensor that is read)."""
    problems = header_problems(checkpoint, config)
    if not problems:
        try:
            _, version_note = checkpoint.zero_version()
        except CheckpointError as error:
            problems.append(str(error).removeprefix(f"{checkpoint.folder}: "))
    if problems:
        raise ModelError(in_one_line(checkpoint.folder, problems))
    notes = survey_folder(checkpoint).notes
    return (
        *notes,
        *([version_note] if version_note else []),
        *_sixteen_bit(checkpoint),
        *unused_tensors(checkpoint, config),
    )


def has_own_lm_head(checkpoint: ModelFolder, config: ModelConfig) -> bool:
    """Whether the output matrix is stored apart from the embedding.

    A quantized one always is. Where config.json ties it, a stored copy in 16 bit is only that: a copy.
    """
    if checkpoint.is_quantized(LM_HEAD):
        return True
    stored = f"{LM_HEAD}.weight" in checkpoint
    if not stored and not config.tie_word_embeddings:
        raise ModelError(f"{checkpoint.folder}: 'lm_head.weight' is missing and config.json does not tie it")
    return stored and not config.tie_word_embeddings


def _outside_layers(checkpoint: ModelFolder, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    table = (config.vocab_size, config.hidden_size)
    yield EMBEDDING, table
    yield FINAL_NORM, (config.hidden_size,)
    if checkpoint.is_quantized(LM_HEAD) or not config.tie_word_embeddings:
        yield f"{LM_HEAD}.weight", table


def _expected(opened: ModelFolder, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all that is needed, save layers of which nothing is there: they are one line together."""
    expected = dict(_outside_layers(opened, config))
    present, shapes = _layers_with_tensors(opened), layer_shapes(config)
    for index in range(_layer_count(opened, config)):
        if index in present:
            expected |= {f"{layer_prefix(index)}.{name}": shape for name, shape in shapes.items()}
    return expected


def _layer_count(opened: ModelFolder, config: ModelConfig) -> int:
    """A folder may bring its layers along packed, and in no other form (`eesd synth --packed`): then it needs none."""
    needed = bool(_layers_with_tensors(opened)) or packed_beside(opened.folder) is None
    return config.num_hidden_layers if needed else 0


def _layers_with_tensors(checkpoint: ModelFolder) -> set[int]:
    """Indexes of decoder layers of which at least one tensor is known, readable or not."""
    names = (*checkpoint.tensors, *checkpoint.index.lost, *checkpoint.index.unlisted)
    parts = (name.split(".", 3) for name in names if name.startswith("model.layers."))
    return {int(part[2]) for part in parts if len(part) == 4 and part[2].isdecimal() and len(part[2]) < 6}


def _absent_layers(checkpoint: ModelFolder, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Layers without any tensor, in one line; whole layers that config.json does not count, in another."""
    present = _layers_with_tensors(checkpoint)
    missing = [index for index in range(layers) if index not in present]
    lines = []
    if missing:
        many = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        lines.append(f"layer {missing[0]} of {layers} has no tensors{many}")
    surplus = [
        index
        for index in sorted(present)
        if index >= layers and all(_stored(checkpoint, f"{layer_prefix(index)}.{name}") for name in shapes)
    ]
    if surplus:
        lines.append(f"config.json says {layers} layers, but layer {surplus[-1]} is stored too")
    return lines


def _stored(checkpoint: ModelFolder, name: str) -> bool:
    return name in checkpoint or checkpoint.is_quantized(name.removesuffix(".weight"))


def _faults(checkpoint: ModelFolder, name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """What is wrong with the tensor `name`, or with the quantized matrix in its place, and with its bias."""
    module = name.removesuffix(".weight")
    parts = [f"{module}.{part}" for part in PARTS]
    lost = checkpoint.index.lost
    if any(part in checkpoint for part in parts) and name.endswith(".weight"):
        if not any(part in lost for part in parts):
            yield from _quantized_faults(checkpoint, module, shape)
    elif name.endswith(".weight") and checkpoint.stored_blocks(module) is not None and name in checkpoint:
        yield from _block_faults(checkpoint, module, shape)
    elif name not in lost and not any(part in lost for part in parts):
        yield from _plain_faults(checkpoint, name, shape)
    bias = f"{module}.bias"
    if bias != name and bias in checkpoint:
        yield from _plain_faults(checkpoint, bias, shape[:1])


def _quantized_faults(checkpoint: ModelFolder, module: str, shape: tuple[int, ...]) -> Iterator[str]:
    try:
        found = checkpoint.module(module)
    except CheckpointError as error:
        yield str(error).removeprefix(f"{checkpoint.folder}: ")
        return
    if len(shape) != 2:
        yield f"'{module}' is quantized, where a vector of {shape[0]} belongs"
    elif (found.out_features, found.in_features) != shape:
        yield (
            f"'{module}' is {found.out_features} x {found.in_features} ({found.bits}-bit, qweight "
            f"{checkpoint.info(f'{module}.qweight').shape}), config.json says {shape[0]} x {shape[1]}"
        )


def _block_faults(checkpoint: ModelFolder, module: str, shape: tuple[int, ...]) -> Iterator[str]:
    """The same for a matrix in bitsandbytes' 4-bit form, whose shape is in its own description."""
    try:
        found = block_state(checkpoint.tensors, module)
    except CheckpointError as error:
        yield str(error)
        return
    rows, columns = found.shape
    nbytes, needed = checkpoint.info(f"{module}.weight").nbytes, -(-rows * columns // 2)
    if found.shape != shape:
        yield f"'{module}' is {rows} x {columns} ({found.kind}), config.json says {' x '.join(map(str, shape))}"
    elif nbytes != needed:
        yield f"'{module}.weight' has {nbytes} bytes, {rows} x {columns} codes of {found.kind} need {needed}"
    for part in ("absmax", "quant_map"):
        if f"{module}.weight.{part}" not in checkpoint and f"{module}.weight.{part}" not in checkpoint.index.lost:
            yield f"tensor '{module}.weight.{part}' is missing"


def _plain_faults(checkpoint: ModelFolder, name: str, shape: tuple[int, ...]) -> Iterator[str]:
    if name not in checkpoint:
        where = checkpoint.index.unlisted.get(name)
        hint = f" from the index, though {where.name} has it; the index is stale" if where is not None else ""
        tie = " and config.json does not tie it" if name == f"{LM_HEAD}.weight" else ""
        yield f"tensor '{name}' is missing{hint}{tie}"
        return
    info = checkpoint.info(name)
    if info.shape != shape:
        yield f"'{name}' has shape {info.shape}, config.json says {shape}"
    elif info.dtype not in FLOATS:
        yield f"'{name}' is stored as {info.dtype}; {', '.join(FLOATS)} and GPTQ are read, take such a version"


def _foreign_norms(
    checkpoint: ModelFolder, config: ModelConfig, expected: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Norms of a layer that the family does not have: leaving them out would be another model, however it loads."""
    for name in checkpoint.tensors:
        if name.startswith("model.layers.") and name.endswith("norm.weight") and name not in expected:
            parts = name.split(".", 3)
            if parts[2].isdecimal() and int(parts[2]) < config.num_hidden_layers:
                yield f"'{shown(name)}' is stored, and model_type {config.model_type} has no such norm"


def _sixteen_bit(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What to say of a model that nobody has quantized."""
    plain = any(".layers." in name and len(info.shape) == 2 for name, info in checkpoint.tensors.items())
    if not plain or checkpoint.any_blocks or checkpoint.quant_config is not None:
        return ()
    return ("16-bit weights, run as they are; --quantize nf4 takes less than a third of the memory",)


def unused_tensors(checkpoint: ModelFolder, config: ModelConfig) -> list[str]:
    """One line about tensors that nothing will use."""
    expected = _expected(checkpoint, config)
    known = {name.removesuffix(".weight") for name in expected}
    suffixes = (".weight", ".bias", *(f".{part}" for part in PARTS))
    strange = [
        name
        for name in checkpoint.tensors
        if not name.endswith(_IGNORED)
        and not (name in expected or name.endswith(suffixes) and name.rpartition(".")[0] in known)
        and name != f"{LM_HEAD}.weight"
        and owner(checkpoint.tensors, name) is None
    ]
    if not strange:
        return []
    more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
    return [f"tensors that nothing uses are ignored: '{shown(strange[0])}'{more}"]
