"""The KV cache of a conversation's beginning as a file, so that a chat goes on tomorrow without reading it all again.

One line of JSON (fingerprint, token ids, bytes), the entries of every layer, SHA-256 of all that. Reading checks the
fingerprint before anything else and the checksum after it, and the caches count as empty until both are right: a file
of another model, plan or machine costs a recomputation, never a wrong token. Called by `Engine.save_prefix`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from eesd_lite.cache import KVCache
from eesd_lite.home import disk_errors, require_free
from eesd_lite.tiers import HOST_COMPUTE

if TYPE_CHECKING:
    from eesd_lite.engine import Engine
    from eesd_lite.exit_head import ExitHead

FORMAT = "eesd-prefix-1"
_LONGEST_HEADER = 1 << 25  # bytes; a million ids take less


def write_prefix(engine: Engine, path: Path) -> None:
    """Write what the engine's caches hold, whole or not at all. PrepareError when the disk is full."""
    caches, ids = _caches(engine), engine.cached_ids
    for head in _heads(engine):
        head.forget_from(len(ids))
        head.fill()
    size = sum(cache.bytes_per_token * cache.num_layers for cache in caches) * len(ids)
    require_free(path.parent, size, "the saved cache")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with disk_errors(path), open(partial, "wb", opener=_private) as file:
            digest = hashlib.sha256()
            header = {"format": FORMAT, "fingerprint": _fingerprint(engine), "ids": list(ids), "bytes": size}
            for chunk in (json.dumps(header).encode() + b"\n", *_entries(caches, len(ids))):
                digest.update(chunk)
                file.write(chunk)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # what was said can be read from it


def read_prefix(engine: Engine, path: Path) -> list[int]:
    """Fill the caches; the ids they hold now. An empty list: the file is missing, damaged, or of something else."""
    caches, fingerprint = _caches(engine), _fingerprint(engine)
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_HEADER)
            header = json.loads(line)
            ids = header["ids"]
            if header["format"] != FORMAT or header["fingerprint"] != fingerprint or not _fits(ids, caches):
                return []
            digest = hashlib.sha256(line)
            for cache in caches:
                for layer in range(cache.num_layers):
                    cache.write(layer, _read_entries(file, cache, layer, len(ids), digest))
            return list(ids) if file.read() == digest.digest() else []
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return []


def _heads(engine: Engine) -> tuple[ExitHead, ...]:
    """Those whose caches are kept."""
    return engine.heads if engine.controller_spec != "off" else ()


def _caches(engine: Engine) -> list[KVCache]:
    """The layers' cache, and those of exit heads."""
    return [engine.target.kv, *(head.kv for head in _heads(engine))]


def _fingerprint(engine: Engine) -> str:
    """Everything that the bits of cache entries depend on."""
    plan, scaling = engine.plan, engine.config.rope_scaling
    stretched = plan.context if scaling is not None and scaling.rope_type == "dynamic" else 0
    head = " ".join(head.digest() for head in _heads(engine))
    exits = " ".join(map(str, engine.target.exits)) or "0"
    elsewhere = [layer for layer, tier in enumerate(plan.tiers) if tier == HOST_COMPUTE]
    return f"{engine.identity} host {elsewhere} exit {exits} head {head} context {stretched}"


def _fits(ids: Any, caches: Sequence[KVCache]) -> bool:
    whole = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
    return whole and all(len(ids) <= cache.capacity for cache in caches)


def _entries(caches: Sequence[KVCache], tokens: int) -> Any:
    for cache in caches:
        for layer in range(cache.num_layers):
            yield cache.read(layer, tokens).view(torch.uint8).numpy().tobytes()


def _read_entries(file: BinaryIO, cache: KVCache, layer: int, tokens: int, digest: Any) -> Tensor:
    like = cache.read(layer, 0)
    entries = torch.empty((*like.shape[:2], tokens, like.shape[3]), dtype=like.dtype)
    buffer = entries.view(torch.uint8).numpy().data
    if file.readinto(buffer) != entries.nbytes:  # type: ignore[attr-defined]
        raise EOFError(file.name)
    digest.update(buffer)
    return entries
