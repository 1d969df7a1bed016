"""What an engine really holds: bytes of distinct storages, under the names that its plan uses.

Walks the engine's objects for tensors and counts every storage once, so that tied or shared tensors are not counted
twice and a view counts as what it keeps alive. Scratch and reserve are used for moments or by others, and have no
counterpart here. Called by `eesd-chat --plan` and by tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from eesd_lite.engine import Engine

PASSING = ("scratch", "reserve")  # items of a plan that no allocation lasts for


def allocated_bytes(engine: Engine) -> dict[str, dict[str, int]]:
    """{"device": {item: bytes}, "host": {item: bytes}}; "host" is empty where no layer lives in host memory."""
    target, heads = engine.target, engine.heads
    bank, streamer = target.bank, target.bank.streamer
    roots: list[tuple[str, str, Any]] = [
        ("device", "embedding", target.embedding),
        ("device", "lm_head", target.lm_head),
        ("device", "norms", target.norm),
        ("device", "rope tables", target.reaches),
        ("host", "KV cache", target.kv.host_data),
        ("device", "KV cache", target.kv),
        ("device", "exit head KV cache", [head.kv for head in heads]),
        ("device", "exit head states", [head.waiting for head in heads]),
        ("device", "resident layers", bank.resident),
        ("host", "layers to compute", bank.computed_on_host),
        ("host", "layers to stream", getattr(streamer, "host", None)),
        ("device", "stream ring", getattr(streamer, "_slots", None)),
        ("device", "draft vocabulary", [head.vocabulary for head in heads]),
        ("device", "exit head", heads),
    ]
    seen: set[tuple[str, int]] = set()
    found: dict[str, dict[str, int]] = {"device": {}, "host": {}}
    for place, name, root in roots:
        for tensor in _tensors(root, set()):
            storage = tensor.untyped_storage()
            key = (str(storage.device), storage.data_ptr())
            if key in seen or storage.nbytes() == 0:
                continue
            seen.add(key)
            where = found[place if tensor.device.type == target.device.type else "host"]
            where[name] = where.get(name, 0) + storage.nbytes()
    return found


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Every tensor that `value` holds, through containers and the attributes of this project's own objects."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in visited or value is None or isinstance(value, (str, bytes, int, float, torch.dtype)):
        return
    visited.add(id(value))
    if isinstance(value, Mapping):
        members = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        members = list(value)
    elif type(value).__module__.split(".")[0] in ("eesd_lite", "quant"):
        names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        members = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
    else:
        return
    for member in members:
        yield from _tensors(member, visited)
