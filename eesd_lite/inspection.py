"""What a model folder is, without loading it: from headers, settings, and two small tensors.

A folder that the engine would refuse is inspected all the same, and what speaks against it becomes a line in
`refusals`. Takes a moment whatever the size, and imports no torch. Called by `eesd inspect`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd_lite.config import ModelConfig
from eesd_lite.errors import ModelError
from eesd_lite.head_list import available_heads
from eesd_lite.packed_beside import packed_beside
from eesd_lite.preflight import header_problems, unused_tensors
from eesd_lite.prepare import ModelSource, find_local
from eesd_lite.sizing import DTYPE_BYTES, folder_layers, kernel_for, kv_bytes_per_token
from eesd_lite.text_facts import TextFacts, read_text_facts
from quant.errors import CheckpointError
from quant.model_folder import ModelFolder
from quant.safetensors_index import read_json
from quant.small_reads import order_of, zero_version_of
from quant.survey import FolderSurvey, Module, survey_folder

_LAYERS = "model.layers."


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the files hold. `stored_layers` and `packed_layers` are bytes per layer: on disk as they came, and packed
    for the int4 kernel (empty where that cannot be told)."""

    files: int
    total_bytes: int
    outside_layers: dict[str, int]  # embedding, lm_head, ...: bytes by module
    stored_layers: tuple[int, ...]
    packed_layers: tuple[int, ...]
    bits: dict[str, int]  # width and form, such as "4-bit GPTQ": how many modules
    group_sizes: dict[int, int]  # -1: one group
    plain_modules: int  # matrices in 16 bit inside the layers
    packed_only: bool  # the layers are there in packed form alone
    sym: bool | None
    act_order: str
    zero_points: str
    lm_head: str  # tied, own, quantized or missing


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything that is printed. `config` holds the keys of config.json that say something about the shape."""

    name: str
    folder: str
    recipe: str | None
    config: dict[str, Any]
    rope: str
    context: int | None
    kv_bytes_per_token: int | None  # all layers, bfloat16
    weights: Weights | None
    text: TextFacts
    heads: tuple[int, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def inspect_model(model: str | Path, weights_file: str | None = None) -> Inspection:
    """Inspect a prepared recipe's name, a folder, or a Hub id in the cache; ModelError where there is none of these.

    `weights_file` names the file or index to look at where a folder holds several.
    """
    source = find_local(model)
    raw = _raw_config(source.folder)
    refusals: list[str] = []
    notes: list[str] = []
    config = None
    try:
        config = ModelConfig.from_folder(source.folder)
    except ModelError as error:
        refusals.append(str(error))
    weights = _inspect_weights(source, config, weights_file, refusals, notes)
    text = read_text_facts(source.folder)
    refusals += text.problems or _tokenizer_problems(source.folder, text)
    rows = config.vocab_size if config is not None else None
    if rows is not None and text.tokens is not None and text.tokens != rows:
        few = "rows without a token are never chosen" if text.tokens < rows else "ids beyond the embedding do not work"
        notes.append(f"tokenizer {text.tokens}, embedding {rows} rows: {few}")
    made_up = raw.get("eesd_synthetic")
    if isinstance(made_up, dict):
        empty = made_up.get("content") == "none"
        notes.append("synthetic: " + ("headers without weights, for sizes only" if empty else "random weights"))
    return Inspection(
        name=source.name,
        folder=str(source.folder),
        recipe=source.recipe.name if source.recipe is not None else None,
        config=_shape_keys(config, raw),
        rope=_rope(config),
        context=config.longest_context if config is not None else None,
        kv_bytes_per_token=(
            config.num_hidden_layers * kv_bytes_per_token(config, DTYPE_BYTES["bfloat16"])
            if config is not None
            else None
        ),
        weights=weights,
        text=text,
        heads=tuple(sorted(available_heads(source))),
        refusals=tuple(dict.fromkeys(refusals)),
        notes=tuple(dict.fromkeys((*notes, *text.notes))),
    )


def _raw_config(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except CheckpointError:
        return {}  # ModelConfig has the same to say, as a refusal


def _tokenizer_problems(folder: Path, text: TextFacts) -> list[str]:
    """What the library says that will read it; of other formats nothing, since transformers takes seconds to import."""
    if text.tokenizer != "tokenizer.json":
        return []
    from eesd_lite.tokenizer_files import read_tokenizer

    try:
        read_tokenizer(folder)
    except ModelError as error:
        return [str(error)]
    return []


def _shape_keys(config: ModelConfig | None, raw: dict[str, Any]) -> dict[str, Any]:
    keys = (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "sliding_window", "biases", "qk_norm",
    )  # fmt: skip
    if config is not None:
        return {key: getattr(config, key) for key in keys}
    return {key: raw[key] for key in keys if isinstance(raw.get(key), (int, str))}


def _rope(config: ModelConfig | None) -> str:
    if config is None:
        return "unknown"
    parts, scaling = [f"theta {config.rope_theta:g}"], config.rope_scaling
    if scaling is not None:
        original = scaling.original_max_position_embeddings
        parts.append(f"{scaling.rope_type} by {scaling.factor:g}" + (f" from {original}" if original else ""))
    if config.unrotated_layers:
        parts.append(f"{len(config.unrotated_layers)} layers without it")
    return ", ".join(parts)


def _inspect_weights(
    source: ModelSource, config: ModelConfig | None, weights_file: str | None, refusals: list[str], notes: list[str]
) -> Weights | None:
    try:
        opened = ModelFolder(source.folder, weights_file, tolerant=True)
    except CheckpointError as error:
        refusals.append(str(error))
        return None
    found = survey_folder(opened)
    refusals += header_problems(opened, config) if config is not None else found.problems
    notes += found.notes
    notes += unused_tensors(opened, config) if config is not None else []
    beside = packed_beside(source.folder)
    if beside is not None:
        notes.append(f"brings packed layers along, for {beside.made_for}")
    inside = [module for module in found.modules if module.name.startswith(_LAYERS)]
    outside = [module for module in found.modules if not module.name.startswith(_LAYERS)]
    packed_only = beside is not None and not inside
    gptq = [module for module in found.quantized if module.kind == "gptq"]
    first = min(gptq, key=_by_layer_and_size, default=None)
    return Weights(
        files=len(found.files),
        total_bytes=found.total_bytes + (sum(beside.layers) if beside is not None else 0),
        outside_layers={module.name: module.nbytes for module in outside},
        stored_layers=beside.layers if beside is not None and packed_only else _stored_layers(inside),
        packed_layers=beside.layers if beside is not None and packed_only else _packed_layers(opened, config),
        bits=dict(sorted(Counter(f"{module.bits}-bit {_form(module)}" for module in found.quantized).items())),
        group_sizes=dict(sorted(Counter(module.group_size or -1 for module in found.quantized).items())),
        plain_modules=sum(module.kind == "plain" and len(module.shape) == 2 for module in inside),
        packed_only=packed_only,
        sym=found.settings.sym if found.settings is not None else None,
        act_order=_act_order(opened, first, notes),
        zero_points=_zero_points(opened, found, first, notes),
        lm_head=_lm_head(opened, config),
    )


def _packed_layers(opened: ModelFolder, config: ModelConfig | None) -> tuple[int, ...]:
    if config is None:
        return ()
    try:
        return folder_layers(opened, config, kernel=kernel_for("cpu", "bfloat16"), itemsize=DTYPE_BYTES["bfloat16"])
    except (CheckpointError, ValueError):  # ValueError: a matrix that is none; both are refusals already
        return ()


def _form(module: Module) -> str:
    return "GPTQ" if module.kind == "gptq" else f"{module.kind} (bitsandbytes)"


def _by_layer_and_size(module: Module) -> tuple[bool, int]:
    """The module whose small tensors are read: inside a layer if possible, and the smallest."""
    return not module.name.startswith(_LAYERS), module.nbytes


def _stored_layers(inside: list[Module]) -> tuple[int, ...]:
    sizes: Counter[int] = Counter()
    for module in inside:
        number = module.name.removeprefix(_LAYERS).partition(".")[0]
        if number.isdecimal() and len(number) < 6:
            sizes[int(number)] += module.nbytes
    return tuple(sizes[index] for index in sorted(sizes))


def _act_order(opened: ModelFolder, first: Module | None, notes: list[str]) -> str:
    """From the settings, and from one stored g_idx."""
    claimed = opened.quant_config is not None and opened.quant_config.desc_act
    if first is None:
        return "no"
    real = order_of(opened, first.name) if first.has_g_idx else None
    if real is None:
        return "claimed" if claimed else "no"
    if real != claimed:
        words = "g_idx is permuted" if real else "g_idx is in natural order"
        notes.append(f"desc_act is {str(claimed).lower()}, but {words} in '{first.name}': the tensors win")
    return "yes" if real else "no"


def _zero_points(opened: ModelFolder, found: FolderSurvey, first: Module | None, notes: list[str]) -> str:
    if first is None or found.claimed_version is None:
        return "none"
    detected = zero_version_of(opened, first.name)
    claim = f"version {found.claimed_version} claimed"
    if detected is None:
        symmetric = found.settings is not None and found.settings.sym
        return f"{claim}, " + ("the data do not show it" if symmetric else "asymmetric: the data cannot show it")
    if detected != found.claimed_version:
        notes.append(f"zero points are stored as version {detected}, the settings claim {found.claimed_version}")
    return f"{claim}, version {detected} detected"


def _lm_head(opened: ModelFolder, config: ModelConfig | None) -> str:
    if opened.is_quantized("lm_head"):
        return "quantized"
    if config is not None and config.tie_word_embeddings:
        return "tied to the embedding" + (" (a copy is stored)" if "lm_head.weight" in opened else "")
    return "own" if "lm_head.weight" in opened else "missing"
