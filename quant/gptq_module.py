"""What one quantized module is, from headers alone: bits, groups and features follow from the shapes of its tensors.

The settings only choose between readings that the shapes leave open. Used by `quant.checkpoint` before it reads,
by the pre-flight check and by `quant.survey`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quant.config import BITS, QuantConfig
from quant.errors import CheckpointError
from quant.overrides import Claim
from quant.safetensors_index import TensorInfo

PARTS = ("qweight", "qzeros", "scales", "g_idx")
NOTHING_SPECIAL = Claim()
_USUAL_GROUPS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class GPTQModule:
    """A matrix [out_features, in_features] in `groups` groups; `group_size` -1 is one group.

    `has_g_idx`: the group of every input feature is stored, so only the data tell whether there is an act-order.
    """

    name: str
    bits: int
    in_features: int
    out_features: int
    groups: int
    group_size: int
    has_g_idx: bool
    has_bias: bool
    nbytes: int


def gptq_module(
    tensors: Mapping[str, TensorInfo], name: str, settings: QuantConfig | None, special: Claim = NOTHING_SPECIAL
) -> GPTQModule:
    """Module `name` (such as model.layers.0.mlp.up_proj); CheckpointError, without a folder, when its tensors
    contradict each other or something is missing. `special` is what the settings claim of this module alone."""
    if settings is None:
        raise CheckpointError(
            f"'{name}' is quantized but the folder has no quantization settings (quantize_config.json)"
        )
    found = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
    for part in ("qweight", "qzeros", "scales"):
        if part not in found:
            raise CheckpointError(f"tensor '{name}.{part}' is missing")
    _check_kinds(name, found)
    (rows, out_features), (groups, columns), (zero_rows, zero_words) = (
        found[part].shape for part in ("qweight", "scales", "qzeros")
    )
    claim = special.bits or settings.bits
    stored = found["g_idx"].shape[0] if "g_idx" in found else None
    bits = _bits(rows, out_features, zero_words, stored, claim)
    if bits is None or columns != out_features or zero_rows != groups or groups == 0 or out_features == 0:
        raise CheckpointError(
            f"'{name}' has qweight {found['qweight'].shape}, scales {found['scales'].shape}, "
            f"qzeros {found['qzeros'].shape}{'' if stored is None else f' and g_idx ({stored},)'}, "
            f"which do not belong together at {claim} bits or any other"
        )
    in_features = stored if stored is not None else rows * 32 // bits
    if groups > in_features:
        raise CheckpointError(f"'{name}' has {groups} groups for {in_features} input features")
    if stored is None and settings.desc_act and groups > 1:
        raise CheckpointError(f"desc_act is true but '{name}.g_idx' is missing; the file is incomplete")
    wanted = special.group_size or settings.group_size
    group_size = _group_size(in_features, groups, wanted)
    if group_size is None:
        if stored is None:
            raise CheckpointError(
                f"'{name}' has {groups} groups for {in_features} input features and neither g_idx nor a group_size "
                f"that fits (the settings say {wanted}); the file is incomplete"
            )
        group_size = -(-in_features // groups)
    return GPTQModule(
        name, bits, in_features, out_features, groups, group_size, "g_idx" in found, f"{name}.bias" in tensors,
        sum(info.nbytes for info in found.values()),
    )  # fmt: skip


def _check_kinds(name: str, found: Mapping[str, TensorInfo]) -> None:
    """Each tensor has the rank and the kind of number that its part in the format asks for."""
    kinds = {
        "qweight": (("I32",), 2), "qzeros": (("I32",), 2), "scales": (("F16", "BF16", "F32"), 2),
        "g_idx": (("I32", "I64"), 1),
    }  # fmt: skip
    for part, info in found.items():
        dtypes, rank = kinds[part]
        if info.dtype not in dtypes or len(info.shape) != rank:
            raise CheckpointError(
                f"'{name}.{part}' is {info.dtype} of shape {info.shape}, not GPTQ "
                f"({' or '.join(dtypes)}, {rank} dimensions)"
            )


def _bits(rows: int, out_features: int, zero_words: int, in_features: int | None, claim: int) -> int | None:
    """The width under which all shapes agree; the claimed one where several do, None where none does."""
    fitting = [
        bits
        for bits in BITS
        if zero_words == -(-out_features * bits // 32)
        and (rows == -(-in_features * bits // 32) if in_features is not None else rows > 0)
    ]
    return claim if claim in fitting else fitting[0] if len(fitting) == 1 else None


def _group_size(in_features: int, groups: int, claim: int) -> int | None:
    """The number of neighbours that share a scale; None where shapes and claim leave more than one possibility."""
    if groups == 1:
        return -1
    if claim > 0 and -(-in_features // claim) == groups:
        return claim
    fitting = {size for size in _USUAL_GROUPS if -(-in_features // size) == groups}
    if in_features % groups == 0:
        fitting.add(in_features // groups)
    return fitting.pop() if len(fitting) == 1 else None
