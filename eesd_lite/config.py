"""The shape of a target model, read from its folder and checked once.

ModelConfig keeps Hugging Face's key names. It reads config.json and generation_config.json in the spellings of
transformers 4 and 5, refuses families that the engine does not compute, and refuses values that cannot be right, in one
line that names the file and the key. torch_dtype is ignored: the engine chooses its own. Plain Python.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eesd_lite.errors import ModelError
from quant.errors import CheckpointError, shown
from quant.safetensors_index import MAX_JSON_BYTES, check_regular

SUPPORTED_MODEL_TYPES = ("llama", "mistral")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3")
_LARGEST = 1 << 31  # no dimension of a real model comes near
_LARGEST_NUMBER = 1e30
_MISSING = object()


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
    sliding_window: int | None = None

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
        main = _Keys(folder / "config.json")
        model_type = main.text("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            families = ", ".join(SUPPORTED_MODEL_TYPES)
            raise ModelError(f"{main.file}: model_type {model_type!r} is not supported; supported: {families}")
        _refuse_unknown_arithmetic(main)
        heads = main.whole("num_attention_heads", low=1)
        hidden = main.whole("hidden_size", low=1)
        if "head_dim" not in main.values and hidden % heads:
            raise ModelError(f"{main.file}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        kv_heads = main.whole("num_key_value_heads", low=1, default=heads)
        if heads % kv_heads:
            raise ModelError(
                f"{main.file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = main.whole("head_dim", low=1, default=hidden // heads)
        if head_dim % 2:
            raise ModelError(f"{main.file}: head_dim {head_dim} must be even for rotary embeddings")
        positions = main.whole("max_position_embeddings", low=1, default=2048)
        vocab_size = main.whole("vocab_size", low=1)
        theta, scaling = _rope(main, positions)
        return cls(
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=main.whole("intermediate_size", low=1),
            num_hidden_layers=main.whole("num_hidden_layers", low=1, high=10_000),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=main.number("rms_norm_eps", low=0.0, high=0.1, default=1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=positions,
            tie_word_embeddings=main.flag("tie_word_embeddings", default=False),
            eos_token_ids=_eos_token_ids(main, folder / "generation_config.json", vocab_size),
            bos_token_id=main.optional_whole("bos_token_id", high=vocab_size - 1),
            sliding_window=_sliding_window(main),
        )


def _refuse_unknown_arithmetic(main: _Keys) -> None:
    """Settings that change what a layer computes and that the forward pass does not have."""
    activation = main.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{main.file}: hidden_act {activation!r} is not supported; supported: silu")
    if main.flag("mlp_bias", default=False):
        raise ModelError(f"{main.file}: mlp_bias true is not supported")


def _rope(main: _Keys, positions: int) -> tuple[float, RopeScaling | None]:
    """Rope settings from rope_parameters (transformers 5) or rope_scaling and rope_theta (before)."""
    for key in ("rope_parameters", "rope_scaling"):
        table = main.values.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise ModelError(f"{main.file}: {key} must be a table, not {table!r}")
        rope = _Keys(main.file, table, prefix=f"{key}.")
        break
    else:
        rope = _Keys(main.file, {}, prefix="")
    # Older files keep the base beside the table, newer ones inside it.
    theta = rope.number("rope_theta", low=1.0, default=main.number("rope_theta", low=1.0, default=10000.0))
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"{main.file}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
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


def _sliding_window(main: _Keys) -> int | None:
    """The attention window; some files state one and switch it off beside it."""
    if not main.flag("use_sliding_window", default=True):
        return None
    return main.optional_whole("sliding_window", low=1)


def _eos_token_ids(main: _Keys, generation_file: Path, vocab_size: int) -> tuple[int, ...]:
    """All ids that end an answer, from both files: chat models often name the end of a turn in the second only."""
    ids: set[int] = set()
    sources = [main] + ([_Keys(generation_file)] if generation_file.exists() else [])
    for keys in sources:
        value = keys.values.get("eos_token_id")
        for token_id in [] if value is None else value if isinstance(value, list) else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ModelError(f"{keys.file}: eos_token_id {token_id!r} is not an id below vocab_size {vocab_size}")
            ids.add(token_id)
    return tuple(sorted(ids))


class _Keys:
    """One JSON table and where it came from, read with checks that name file and key."""

    def __init__(self, file: Path, values: dict[str, Any] | None = None, *, prefix: str = "") -> None:
        self.file = file
        self.prefix = prefix
        self.values = _read_json(file) if values is None else values

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelError(f"{self.file}: {self.prefix}{key} is missing")
        return default

    def _wrong(self, key: str, value: object, expected: str) -> ModelError:
        return ModelError(f"{self.file}: {self.prefix}{key} must be {expected}, not {value!r}")

    def text(self, key: str) -> str:
        value = self._get(key, _MISSING)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def whole(self, key: str, *, low: int = 0, high: int = _LARGEST, default: Any = _MISSING) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some writers turn 8192 into 8192.0
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"a whole number from {low} to {high}")
        return value

    def optional_whole(self, key: str, *, low: int = 0, high: int = _LARGEST) -> int | None:
        return None if self.values.get(key) is None else self.whole(key, low=low, high=high)

    def number(self, key: str, *, low: float, high: float = math.inf, default: Any = _MISSING) -> float:
        value = self._get(key, default)
        usable = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Whole numbers of JSON may be larger than any float; those that are not finite compare as false.
        if not usable or not max(low, -_LARGEST_NUMBER) <= value <= min(high, _LARGEST_NUMBER):
            bound = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise self._wrong(key, value, f"a number {bound}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.exists():
            check_regular(file, MAX_JSON_BYTES)
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file; a model folder holds config.json") from None
    except CheckpointError as error:
        raise ModelError(str(error)) from None
    except NotADirectoryError:
        raise ModelError(f"{file.parent}: not a folder; a model is a folder that holds config.json") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # of JSON, of its encoding, or an integer of thousands of digits
        raise ModelError(f"{file}: not valid JSON ({shown(error)}); fetch the model again") from None
    except RecursionError:
        raise ModelError(f"{file}: not valid JSON (nested too deeply); fetch the model again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: must hold a JSON table, not a {type(values).__name__}")
    return values
