"""What a model folder holds, from headers and settings alone: modules, bits, groups, bytes, notes and problems.

Works in a moment on a folder of any size, and on folders that the engine would refuse: what is wrong becomes a line in
`problems`. The pre-flight check and `eesd inspect` are made of it. Standard library only; how zero points are really
stored is in the data, see `Checkpoint.zero_version`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quant.block_module import block_state, owner
from quant.config import QuantConfig
from quant.errors import CheckpointError
from quant.gptq_module import PARTS, GPTQModule, gptq_module
from quant.model_folder import ModelFolder

DTYPE_BITS = {"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8}


@dataclass(frozen=True)
class Module:
    """One matrix or vector of the model (with its bias), by its name without `.weight` or `.qweight`.

    `kind` is gptq, nf4 or fp4 (bitsandbytes' 4-bit form), or plain. `shape` is (out_features, in_features), or what is
    stored for a plain tensor. `bits` is the width of one weight; `group_size` -1 means one group, None that there are
    none (plain); for nf4 and fp4 it is the length of a block along a row. `act_order`: True or False where headers and
    settings settle it, None where only the data would (a stored g_idx without desc_act).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str  # of the weight if plain, else of the scales
    bits: int
    group_size: int | None
    act_order: bool | None
    has_g_idx: bool
    has_bias: bool
    nbytes: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class FolderSurvey:
    """Everything that headers and settings tell. `settings` is None for a folder without quantization settings.

    `claimed_version` is how zero points are stored according to the settings (1 or 2; None without any quantized
    module). `other` are tensors that belong to no module, such as old inv_freq buffers.
    """

    folder: Path
    settings: QuantConfig | None
    modules: tuple[Module, ...]
    other: tuple[str, ...]
    files: tuple[str, ...]
    total_bytes: int
    claimed_version: int | None
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def quantized(self) -> tuple[Module, ...]:
        return tuple(module for module in self.modules if module.kind != "plain")

    def bits(self) -> dict[int, int]:
        """How many quantized modules there are of each width."""
        widths = sorted({module.bits for module in self.quantized})
        return {width: sum(module.bits == width for module in self.quantized) for width in widths}


def survey(folder: Path, weights: str | None = None) -> FolderSurvey:
    """Survey a folder. CheckpointError only where there is nothing to survey: no folder, no weights, settings that
    cannot be read or are of another method, several weight files and no index."""
    return survey_folder(ModelFolder(folder, weights, tolerant=True))


def survey_folder(opened: ModelFolder) -> FolderSurvey:
    """The same for a folder that is open already (`ModelFolder(folder, tolerant=True)` or a Checkpoint)."""
    modules, problems, grouped, other = [], list(opened.index.problems), _by_module(opened.tensors), []
    for name, suffixes in grouped.items():
        try:
            module = _module(opened, name, suffixes)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if module is not None:
            modules.append(module)
        else:
            other += [f"{name}.{suffix}" if suffix else name for suffix in suffixes]
    return FolderSurvey(
        folder=opened.folder,
        settings=opened.quant_config,
        modules=tuple(modules),
        other=tuple(other),
        files=tuple(path.name for path in opened.index.files),
        total_bytes=sum(info.nbytes for info in opened.tensors.values()),
        claimed_version=_claimed_version(modules, opened.quant_config),
        notes=(*opened.notes, *contradictions(opened, modules)),
        problems=tuple(problems),
    )


def _claimed_version(modules: Iterable[Module], settings: QuantConfig | None) -> int | None:
    return settings.version if settings is not None and any(module.kind == "gptq" for module in modules) else None


def _by_module(tensors: Mapping[str, object]) -> dict[str, list[str]]:
    """Tensor suffixes (weight, bias, qweight, ...) by module name, in the order of the files."""
    grouped: dict[str, list[str]] = {}
    for tensor in tensors:
        module = owner(tensors, tensor)
        name, dot, suffix = tensor.rpartition(".") if module is None else (module, ".", tensor[len(module) + 1 :])
        grouped.setdefault(name if dot else tensor, []).append(suffix if dot else "")
    return grouped


def _module(opened: ModelFolder, name: str, suffixes: list[str]) -> Module | None:
    tensors = opened.tensors
    present = [f"{name}.{suffix}" for suffix in (*PARTS, "weight", "bias") if suffix in suffixes]
    if "qweight" not in suffixes and "weight" not in suffixes:
        return None
    nbytes = sum(tensors[tensor].nbytes for tensor in present)
    files = tuple(sorted({tensors[tensor].file.name for tensor in present}))
    kind = opened.stored_blocks(name)
    if kind is not None and "weight" in suffixes:
        found_state = block_state(tensors, name)
        return Module(
            name, kind, found_state.shape, tensors[f"{name}.weight"].dtype, 4, found_state.blocksize, False, False,
            "bias" in suffixes, sum(tensors[f"{name}.{suffix}"].nbytes for suffix in suffixes), files,
        )  # fmt: skip
    if "qweight" not in suffixes:
        info = tensors[f"{name}.weight"]
        return Module(
            name, "plain", info.shape, info.dtype, DTYPE_BITS.get(info.dtype, 8), None, False, False,
            "bias" in suffixes, nbytes, files,
        )  # fmt: skip
    found = gptq_module(tensors, name, opened.quant_config, opened.claims[name])
    return Module(
        name, "gptq", (found.out_features, found.in_features), tensors[f"{name}.scales"].dtype, found.bits,
        found.group_size, _act_order(found, opened.quant_config), found.has_g_idx, found.has_bias, nbytes, files,
    )  # fmt: skip


def _act_order(found: GPTQModule, settings: QuantConfig | None) -> bool | None:
    if not found.has_g_idx or found.groups == 1:
        return False
    return True if settings is not None and settings.desc_act else None


def contradictions(opened: ModelFolder, modules: Iterable[Module]) -> list[str]:
    """Where the settings say something else than the tensors, one line for each kind with the first such module."""
    settings = opened.quant_config
    if settings is None:
        return []
    found: dict[str, list[str]] = {}
    for module in modules:
        claim = opened.claims[module.name]
        if module.kind == "gptq":
            bits, group = claim.bits or settings.bits, claim.group_size or settings.group_size
            if not claim.quantized:
                found.setdefault("quantized, though the settings leave it alone", []).append(module.name)
            elif module.bits != bits:
                found.setdefault(f"{module.bits}-bit, the settings say {bits}", []).append(module.name)
            elif module.group_size != group and not _same_groups(module, group):
                found.setdefault(f"of group size {module.group_size}, the settings say {group}", []).append(module.name)
        elif settings.overrides.rules and (claim.bits is not None or claim.group_size is not None):
            found.setdefault("not quantized, though the settings give it a width", []).append(module.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more modules are' if len(names) > 1 else ' is'} {what}; the tensors win"
        for what, names in found.items()
    ]


def _same_groups(module: Module, group: int) -> bool:
    """A group that is as long as all features is the one group of -1."""
    return module.group_size == -1 and (group == -1 or group >= module.shape[1])
