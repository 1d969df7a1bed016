"""A conversation's cache from one run to the next: the same bits, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eesd_lite import SamplingParams
from eesd_lite.engine import Engine
from eesd_lite.errors import PrepareError
from tests.puppets import assert_caches_are_those_of, caches, ids_of, plain_ids
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5)
OFFLOADED: dict[str, Any] = {"head": "random", "exit_layer": 2, "resident_layers": 2}
PROMPT = list(b"Once upon a time")
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
EngineOf = Callable[..., Engine]
TinyOf = Callable[[TinySpec], Tiny]


@pytest.fixture
def saved(engine_of: EngineOf, tmp_path: Path) -> tuple[Path, list[int]]:
    """A file that an engine wrote after one answer, and what it holds."""
    engine = engine_of(SPEC, **OFFLOADED)
    ids_of(engine, PROMPT, PARAMS)
    engine.save_prefix(tmp_path / "talk.cache")
    return tmp_path / "talk.cache", list(engine.cached_ids)


def test_another_engine_goes_on_from_the_file_bit_for_bit(tiny_of: TinyOf, saved: tuple[Path, list[int]]) -> None:
    path, ids = saved
    follow_up = [*ids, *b" and then?"]
    with tiny_of(SPEC).engine(**OFFLOADED) as engine:
        assert engine.load_prefix(path) == len(ids) and list(engine.cached_ids) == ids
        assert_caches_are_those_of(engine, ids, caches(engine, len(ids)))
        assert engine.load_prefix(path) == len(ids)
        answer = ids_of(engine, follow_up, PARAMS)
        assert engine.stats.prefilled_tokens == len(follow_up) - len(ids), "only what is new was read"
        assert answer == plain_ids(engine, follow_up, PARAMS)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (TinySpec(layers=5, seed=3), {}),
        (SPEC, {"dtype": "float32"}),
        (SPEC, {"exit_layer": 1}),
        (SPEC, {"head": "off", "exit_layer": None}),
    ],
    ids=["another model", "another dtype", "another exit layer", "no head"],
)
def test_a_file_of_something_else_is_not_used(
    tiny_of: TinyOf, saved: tuple[Path, list[int]], spec: TinySpec, options: dict[str, Any]
) -> None:
    with tiny_of(spec).engine(**{**OFFLOADED, **options}) as engine:
        assert engine.load_prefix(saved[0]) == 0 and engine.cached_ids == ()
        assert ids_of(engine, PROMPT, PARAMS) == plain_ids(engine, PROMPT, PARAMS)


def _cut(content: bytes) -> bytes:
    return content[:-100]


def _flipped(content: bytes) -> bytes:
    return content[:-200] + bytes([content[-200] ^ 1]) + content[-199:]


def _longer(content: bytes) -> bytes:
    return content + b"x"


def _wrong_id(content: bytes) -> bytes:
    return content.replace(b'"ids": [79, ', b'"ids": [78, ', 1)


def _rubbish(content: bytes) -> bytes:
    return b'{"format": "eesd-prefix-1", "ids": 7}\n'


@pytest.mark.parametrize("damage", [_cut, _flipped, _longer, _wrong_id, _rubbish])
def test_a_damaged_file_is_not_used(
    engine_of: EngineOf, saved: tuple[Path, list[int]], damage: Callable[[bytes], bytes]
) -> None:
    path, _ = saved
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    engine = engine_of(SPEC, **OFFLOADED)
    assert engine.load_prefix(path) == 0
    assert ids_of(engine, PROMPT, PARAMS) == plain_ids(engine, PROMPT, PARAMS)


def test_a_missing_file_is_an_empty_one(engine_of: EngineOf, tmp_path: Path) -> None:
    assert engine_of(SPEC, **OFFLOADED).load_prefix(tmp_path / "none") == 0


def test_a_full_disk_leaves_the_old_file_and_no_other(
    engine_of: EngineOf, saved: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eesd_lite.prefix_file.os.fsync", full)
    with pytest.raises(PrepareError, match="disk full while writing .*talk.cache"):
        engine_of(SPEC, **OFFLOADED).save_prefix(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
