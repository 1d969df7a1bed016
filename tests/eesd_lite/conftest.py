"""Tiny models and engines that many tests share; a test that changes an engine for good opens its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from eesd_lite.engine import Engine
from eesd_lite.stats import Stats
from tests.tiny import Tiny, TinySpec, build


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinySpec], Tiny]:
    """The model of a spec, built once."""
    built: dict[str, Tiny] = {}

    def get(spec: TinySpec) -> Tiny:
        if repr(spec) not in built:
            built[repr(spec)] = build(tmp_path_factory.mktemp("tiny") / "model", spec)
        return built[repr(spec)]

    return get


@pytest.fixture(scope="session")
def engine_of(tiny_of: Callable[[TinySpec], Tiny]) -> Iterator[Callable[..., Engine]]:
    """`engine_of(spec, **options)`: fresh counters and an empty cache, loaded once per set of options."""
    threads = torch.get_num_threads()
    opened: dict[str, Engine] = {}

    def get(spec: TinySpec | None = None, **options: Any) -> Engine:
        spec = spec if spec is not None else TinySpec()
        key = repr((spec, sorted(options.items())))
        if key not in opened:
            opened[key] = tiny_of(spec).engine(**options)
        engine = opened[key]
        torch.set_num_threads(options.get("threads", 1))
        engine.stats = Stats()
        engine.set_controller(options.get("controller", "calibrated"))
        return engine

    yield get
    for engine in opened.values():
        engine.close()
    torch.set_num_threads(threads)
