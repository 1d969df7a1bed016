"""Hidden states on disk: written once by the teacher, read many times by the trainer.

A folder: tokens.bin int32 [T], starts.bin int64 [sequences] (offset of each sequence; positions restart at 0),
state-NN.bin bfloat16 [T, H] per exit layer N (the float residual stream entering target layer N), final.bin bfloat16
[T, H] (the stream after the last layer, before the final norm), meta.json (counts and whose states these are).
meta.json is replaced after each appended batch, so a kill loses the last batch at most; bytes beyond it are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from eesd_lite.errors import PrepareError

FORMAT = "eesd-states-1"


@dataclass(frozen=True)
class CacheMeta:
    hidden_size: int
    exit_layers: tuple[int, ...]
    fingerprint: str
    rope: dict[str, object]
    tokens: int = 0
    sequences: int = 0
    dtype: str = "bfloat16"
    format: str = FORMAT


def cache_bytes(*, tokens: int, sequences: int, hidden_size: int, exits: int) -> int:
    """Bytes of the data files (meta.json, under a kilobyte, apart)."""
    return tokens * (4 + 2 * hidden_size * (exits + 1)) + 8 * sequences


def _state_file(layer: int) -> str:
    return f"state-{layer:02d}.bin"


def _read_meta(folder: Path) -> CacheMeta:
    path = folder / "meta.json"
    try:
        data = json.loads(path.read_text())
        if data.get("format") != FORMAT:
            raise PrepareError(f"{path}: state cache format {data.get('format')}, this version reads {FORMAT}")
        return CacheMeta(**{**data, "exit_layers": tuple(data["exit_layers"])})
    except FileNotFoundError:
        raise PrepareError(f"{folder}: no state cache here (meta.json is missing)") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PrepareError(f"{path}: unreadable ({error}); delete the folder and cache the states again") from None


def _write_meta(folder: Path, meta: CacheMeta) -> None:
    temporary = folder / "meta.json.tmp"
    with temporary.open("w") as file:
        json.dump(asdict(meta), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "meta.json")


class StateCacheWriter:
    """Appends batches of whole sequences. Opening a folder that already holds a cache of the same kind continues it."""

    def __init__(
        self,
        folder: Path,
        *,
        hidden_size: int,
        exit_layers: Sequence[int],
        fingerprint: str,
        rope: Mapping[str, object],
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = CacheMeta(hidden_size, tuple(sorted(exit_layers)), fingerprint, dict(rope))
        if (self.folder / "meta.json").exists():
            found = _read_meta(self.folder)
            same = replace(found, tokens=0, sequences=0)
            if (same.hidden_size, same.exit_layers, same.fingerprint) != (
                wanted.hidden_size,
                wanted.exit_layers,
                wanted.fingerprint,
            ):
                raise PrepareError(f"{folder}: holds states of another model or other exit layers; use another folder")
            self.meta = found
        else:
            self.meta = wanted
        self._files = {name: self._open(name, size) for name, size in self._sizes().items()}
        _write_meta(self.folder, self.meta)

    def _sizes(self) -> dict[str, int]:
        meta = self.meta
        names = [_state_file(layer) for layer in meta.exit_layers] + ["final.bin"]
        sizes = dict.fromkeys(names, meta.tokens * meta.hidden_size * 2)
        return sizes | {"tokens.bin": meta.tokens * 4, "starts.bin": meta.sequences * 8}

    def _open(self, name: str, size: int):  # type: ignore[no-untyped-def]
        file = (self.folder / name).open("ab")
        file.truncate(size)  # what a killed writer left beyond the last complete batch
        file.seek(size)
        return file

    def append(self, tokens: Sequence[Sequence[int]], states: Mapping[int, Tensor], final: Tensor) -> None:
        """One batch: token ids per sequence; states [sum of lengths, H] per exit layer and final, in the same order."""
        lengths = [len(ids) for ids in tokens]
        total = sum(lengths)
        assert all(lengths), lengths
        assert set(states) == set(self.meta.exit_layers), (sorted(states), self.meta.exit_layers)
        rows = {_state_file(layer): state for layer, state in states.items()} | {"final.bin": final}
        for name, tensor in rows.items():
            assert tuple(tensor.shape) == (total, self.meta.hidden_size), (name, tuple(tensor.shape), total)
            flat = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
            flat.numpy().tofile(self._files[name])
        np.concatenate([np.asarray(ids, dtype="<i4") for ids in tokens]).tofile(self._files["tokens.bin"])
        starts = self.meta.tokens + np.cumsum([0, *lengths[:-1]])
        starts.astype("<i8").tofile(self._files["starts.bin"])
        for file in self._files.values():
            file.flush()
        self.meta = replace(self.meta, tokens=self.meta.tokens + total, sequences=self.meta.sequences + len(lengths))
        _write_meta(self.folder, self.meta)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> StateCacheWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class StateCache:
    """Read side: memory maps, so that a cache larger than memory is fine."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.meta = _read_meta(self.folder)
        self.tokens = self._map("tokens.bin", "<i4", (self.meta.tokens,))
        starts = self._map("starts.bin", "<i8", (self.meta.sequences,))
        self.starts = np.concatenate([starts, [self.meta.tokens]]).astype(np.int64)  # [sequences + 1]
        self.lengths = np.diff(self.starts)
        shape = (self.meta.tokens, self.meta.hidden_size)
        self._rows = {layer: self._map(_state_file(layer), "<i2", shape) for layer in self.meta.exit_layers}
        self._final = self._map("final.bin", "<i2", shape)

    def _map(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        path = self.folder / name
        need = int(np.prod(shape)) * np.dtype(dtype).itemsize
        have = path.stat().st_size if path.exists() else 0
        if have < need:
            raise PrepareError(f"{path}: {have} bytes, {need} expected; delete the folder and cache the states again")
        if need == 0:
            return np.zeros(shape, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)

    def states(self, layer: int, start: int, stop: int) -> Tensor:
        """[stop - start, H] bfloat16: the stream entering target layer `layer`."""
        if layer not in self._rows:
            raise PrepareError(f"{self.folder}: no states for exit layer {layer}, only {list(self._rows)}")
        return _rows(self._rows[layer], start, stop)

    def final(self, start: int, stop: int) -> Tensor:
        """[stop - start, H] bfloat16: the stream after the last layer, before the final norm."""
        return _rows(self._final, start, stop)


def _rows(source: np.ndarray, start: int, stop: int) -> Tensor:
    return torch.from_numpy(np.array(source[start:stop])).view(torch.bfloat16)
