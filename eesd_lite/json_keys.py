"""JSON tables of a model folder, read with checks whose messages name the file and the key. Used by `eesd_lite.config`.

Plain Python.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from eesd_lite.errors import ModelError
from quant.errors import CheckpointError, shown
from quant.safetensors_index import MAX_JSON_BYTES, check_regular

_LARGEST = 1 << 31  # no dimension of a real model comes near
_LARGEST_NUMBER = 1e30
_MISSING = object()


class JsonKeys:
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
