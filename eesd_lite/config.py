"""The shape of a target model, read from its folder and checked once.

ModelConfig keeps Hugging Face's key names. It reads config.json and generation_config.json in the spellings of
transformers 4 and 5, refuses what the engine does not compute (`eesd_lite.families`) and values that cannot be right,
in one line that names the file and the key. torch_dtype is ignored: the engine chooses its own. Plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eesd_lite.errors import ModelError
from eesd_lite.families import (
    ATTENTION_PROJECTIONS,
    BIAS_KEYS,
    MLP_PROJECTIONS,
    Family,
    family_of,
    refuse_foreign_arithmetic,
)
from eesd_lite.json_keys import JsonKeys
from quant.errors import shown

ROPE_TYPES = ("default", "linear", "dynamic", "llama3")
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "finetuned",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was trained on."""

    rope_type: str  # "linear", "dynamic" or "llama3"; "default" is represented by no RopeScaling at all
    factor: float
    low_freq_factor: float = 1.0  # llama3 only
    high_freq_factor: float = 4.0  # llama3 only
    original_max_position_embeddings: int = 0  # llama3 and dynamic; 0: not stated


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about the target's shape that a forward pass needs."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sliding_window: int | None = None  # how many keys back a row sees, itself included
    full_attention_layers: tuple[int, ...] = ()  # layers that see everything although there is a window
    unrotated_layers: tuple[int, ...] = ()  # layers whose queries and keys are not rotated (SmolLM3)
    biases: tuple[str, ...] = ()  # the projections that have one, such as q_proj
    qk_norm: bool = False  # an RMSNorm over every head of queries and keys before they are rotated (Qwen3)

    def window_of(self, layer: int) -> int | None:
        """How many keys back a row of this layer sees, itself included; None: all of them."""
        return None if layer in self.full_attention_layers else self.sliding_window

    @property
    def longest_context(self) -> int:
        """The most positions that this model can be asked for."""
        scaling = self.rope_scaling
        if scaling is None:
            return self.max_position_embeddings
        if scaling.rope_type == "linear":  # files state the length before scaling, or the one after it
            return int(self.max_position_embeddings * scaling.factor)
        if scaling.rope_type == "dynamic":  # see eesd_lite/rope.py: beyond it, earlier keys would have to change
            return min(self.max_position_embeddings, scaling.original_max_position_embeddings)
        return self.max_position_embeddings

    def check_length(self, positions: int) -> None:
        """ModelError where dynamic scaling would have to change keys that are already in the cache."""
        scaling = self.rope_scaling
        if scaling is not None and scaling.rope_type == "dynamic" and positions > self.longest_context:
            raise ModelError(
                f"{positions} positions: rope scaling 'dynamic' is supported up to the model's original context of "
                f"{self.longest_context}; beyond it every new token would change the keys of all earlier ones"
            )

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Reads config.json, and generation_config.json if there is one."""
        try:
            return cls._read(Path(path))
        except ModelError as error:  # messages quote values, and a value may be of any length and hold anything
            raise ModelError(shown(error, 600)) from None
        except RecursionError:
            raise ModelError(f"{path}: config.json is nested too deeply; fetch the model again") from None

    @classmethod
    def _read(cls, folder: Path) -> ModelConfig:
        main = JsonKeys(folder / "config.json")
        model_type = main.text("model_type")
        family = family_of(model_type, main.file)
        refuse_foreign_arithmetic(main.values, model_type, main.file)
        layers = main.whole("num_hidden_layers", low=1, high=10_000)
        positions = main.whole("max_position_embeddings", low=1, default=2048)
        vocab_size = main.whole("vocab_size", low=1)
        theta, scaling = _rope(main, positions, family)
        unrotated = _unrotated_layers(main, layers) if family.rope_by_layer else ()
        window, full = _window(main, family, layers, unrotated)
        return cls(
            model_type=model_type,
            vocab_size=vocab_size,
            intermediate_size=main.whole("intermediate_size", low=1),
            num_hidden_layers=layers,
            rms_norm_eps=main.number("rms_norm_eps", low=0.0, high=0.1, default=1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=positions,
            tie_word_embeddings=main.flag("tie_word_embeddings", default=family.tied),
            eos_token_ids=_eos_token_ids(main, folder / "generation_config.json", vocab_size),
            bos_token_id=main.optional_whole("bos_token_id", high=vocab_size - 1),
            sliding_window=window,
            full_attention_layers=full,
            unrotated_layers=unrotated,
            biases=_biases(main, family),
            qk_norm=family.qk_norm,
            **_heads(main, family),
        )


def _heads(main: JsonKeys, family: Family) -> dict[str, int]:
    """hidden_size and how attention divides it; heads need not fill it (head_dim is a value of its own)."""
    heads = main.whole("num_attention_heads", low=1)
    hidden = main.whole("hidden_size", low=1)
    kv_heads = main.whole("num_key_value_heads", low=1, default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"{main.file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if main.values.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ModelError(f"{main.file}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = main.whole("head_dim", low=1, default=family.head_dim or hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{main.file}: head_dim {head_dim} must be even for rotary embeddings")
    return {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


def _biases(main: JsonKeys, family: Family) -> tuple[str, ...]:
    """The projections that have a bias, in the order of a layer."""
    found = set(family.biases)
    for key in family.bias_keys:
        if main.flag(key, default=False):
            found.update(BIAS_KEYS[key])
    return tuple(name for name in (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS) if name in found)


def _rope_table(main: JsonKeys) -> JsonKeys:
    """The one table that there is. Two that differ are refused: readers disagree about which of them wins."""
    found = {key: main.values[key] for key in ("rope_parameters", "rope_scaling") if main.values.get(key) is not None}
    for key, table in found.items():
        if not isinstance(table, dict):
            raise ModelError(f"{main.file}: {key} must be a table, not {table!r}")
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise ModelError(
            f"{main.file}: rope_parameters {found['rope_parameters']!r} and rope_scaling {found['rope_scaling']!r} "
            "contradict each other; remove the one that is wrong"
        )
    key = next(iter(found), "")
    return JsonKeys(main.file, found.get(key, {}), prefix=f"{key}." if key else "")


def _rope(main: JsonKeys, positions: int, family: Family) -> tuple[float, RopeScaling | None]:
    """Rope settings from rope_parameters (transformers 5) or rope_scaling and rope_theta (before)."""
    rope = _rope_table(main)
    # Older files keep the base beside the table, newer ones inside it.
    theta = rope.number("rope_theta", low=1.0, default=main.number("rope_theta", low=1.0, default=family.rope_theta))
    if rope.number("partial_rotary_factor", low=0.0, default=1.0) != 1.0:
        value = rope.values["partial_rotary_factor"]
        raise ModelError(f"{main.file}: {rope.prefix}partial_rotary_factor {value!r} is not supported; supported: 1")
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"{main.file}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    unknown = next((key for key, value in rope.values.items() if key not in _ROPE_KEYS and value is not None), None)
    if unknown is not None:
        raise ModelError(f"{main.file}: {rope.prefix}{unknown} {rope.values[unknown]!r} is not supported")
    if kind == "default":
        return theta, None
    factor = rope.number("factor", low=1.0)
    if kind == "linear":
        return theta, RopeScaling(rope_type=kind, factor=factor)
    if kind == "dynamic":
        outer = main.whole("original_max_position_embeddings", low=1, default=positions)
        original = rope.whole("original_max_position_embeddings", low=1, default=outer)
        return theta, RopeScaling(rope_type=kind, factor=factor, original_max_position_embeddings=original)
    low_factor, high_factor = rope.number("low_freq_factor", low=0.0), rope.number("high_freq_factor", low=0.0)
    if not 0 < low_factor < high_factor:
        raise ModelError(
            f"{main.file}: rope low_freq_factor {low_factor} must be above 0 and below high_freq_factor {high_factor}"
        )
    return theta, RopeScaling(
        rope_type=kind,
        factor=factor,
        low_freq_factor=low_factor,
        high_freq_factor=high_factor,
        original_max_position_embeddings=rope.whole("original_max_position_embeddings", low=1),
    )


def _unrotated_layers(main: JsonKeys, layers: int) -> tuple[int, ...]:
    """no_rope_layers holds a 1 for every layer that rotates; absent: every no_rope_layer_interval-th layer does not."""
    flags = main.values.get("no_rope_layers")
    if flags is None:
        interval = main.whole("no_rope_layer_interval", low=1, default=4)
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(flags, list) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise ModelError(f"{main.file}: no_rope_layers must hold a 0 or a 1 for each of {layers} layers, not {flags!r}")
    return tuple(index for index in range(layers) if not flags[index])


def _window(
    main: JsonKeys, family: Family, layers: int, unrotated: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """The attention window, and the layers that it is not for."""
    switched_on = main.flag("use_sliding_window", default=family.window != "by layer")
    window = main.optional_whole("sliding_window", low=1)
    if window is None and "sliding_window" not in main.values:
        window = family.sliding_window
    if not switched_on:
        window = None
    if window is not None and family.window == "never":
        positions = main.whole("max_position_embeddings", low=1, default=2048)
        if window < positions:
            raise ModelError(
                f"{main.file}: sliding_window {window} is not part of model_type {main.text('model_type')}"
            )
        window = None
    full = _full_attention_layers(main, family, window, layers, unrotated)
    return (window, full) if len(full) < layers else (None, ())


def _full_attention_layers(
    main: JsonKeys, family: Family, window: int | None, layers: int, unrotated: tuple[int, ...]
) -> tuple[int, ...]:
    """From layer_types, which must not contradict the window; else by the family's own rule."""
    types = main.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) < layers:
            raise ModelError(f"{main.file}: layer_types must name the kind of each of {layers} layers, not {types!r}")
        allowed = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
        if window is not None and family.window == "always":
            allowed = {"sliding_attention"}
        for index, kind in enumerate(types[:layers]):
            if not isinstance(kind, str) or kind not in allowed:
                raise ModelError(
                    f"{main.file}: layer_types: {kind!r} for layer {index} is not supported in "
                    f"model_type {main.text('model_type')} with sliding_window {window}"
                )
        return tuple(index for index in range(layers) if types[index] == "full_attention")
    if window is None or family.window != "by layer":
        return tuple(range(layers)) if window is None else ()
    if family.rope_by_layer:  # SmolLM3's rule: the window is for the layers that do not rotate
        return tuple(index for index in range(layers) if index not in unrotated)
    return tuple(range(min(layers, main.whole("max_window_layers", default=28))))


def _eos_token_ids(main: JsonKeys, generation_file: Path, vocab_size: int) -> tuple[int, ...]:
    """All ids that end an answer, from both files: chat models often name the end of a turn in the second only."""
    ids: set[int] = set()
    sources = [main] + ([JsonKeys(generation_file)] if generation_file.exists() else [])
    for keys in sources:
        value = keys.values.get("eos_token_id")
        for token_id in [] if value is None else value if isinstance(value, list) else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ModelError(f"{keys.file}: eos_token_id {token_id!r} is not an id below vocab_size {vocab_size}")
            ids.add(token_id)
    return tuple(sorted(ids))
