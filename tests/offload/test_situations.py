"""Situations that users of offloading programs run into: odd settings, placeholders, mappings, pinning, borders.

docs/placement.md has the whole list with the tests of each; what is here has no better place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eesd_lite import SamplingParams, cuda_slot
from eesd_lite.allocated import _tensors
from eesd_lite.cache import KVCache, Rows
from eesd_lite.errors import PrepareError
from eesd_lite.layer_bank import HostLayer
from eesd_lite.layer_blob import page_buffer
from eesd_lite.tiers import DEVICE, DISK, HOST_COMPUTE, HOST_STREAM
from tests.offload.test_placements import MIXED, open_with
from tests.puppets import ids_of
from tests.tiny import Tiny, TinySpec, build

SPEC = TinySpec(layers=6)
PROMPT = list(b"Where does it lie?")
TinyOf = Callable[[TinySpec], Tiny]


def greedy(tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True)


def test_options_for_gpu_kernels_in_config_json_do_not_concern_a_cpu_with_three_tiers(tmp_path: Path) -> None:
    tiny = build(tmp_path / "model", SPEC)
    expected = None
    for options in ({}, {"use_exllama": True, "exllama_config": {"version": 2}, "disable_exllama": False}):
        raw = json.loads((tiny.folder / "config.json").read_text())
        raw["quantization_config"] |= options
        (tiny.folder / "config.json").write_text(json.dumps(raw))
        folder = tmp_path / f"plans-{len(options)}"
        folder.mkdir()
        with open_with(tiny, folder, (DEVICE, DEVICE, HOST_STREAM, HOST_COMPUTE, DISK, DISK)) as engine:
            found = ids_of(engine, PROMPT, greedy())
        assert expected in (None, found)
        expected = found


def test_nothing_is_a_placeholder_after_loading_and_a_second_load_is_like_the_first(
    tiny_of: TinyOf, tmp_path: Path
) -> None:
    answers = []
    for _ in range(2):
        with open_with(tiny_of(SPEC), tmp_path, MIXED) as engine:
            tensors = list(_tensors([engine.target, engine.head, engine.target.bank.fixed], set()))
            assert len(tensors) > 50 and not any(tensor.is_meta for tensor in tensors)
            answers.append(ids_of(engine, PROMPT, greedy()))
    assert answers[0] == answers[1]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts mappings where the system lists them")
def test_few_files_are_mapped_at_once_while_loading_and_none_afterwards(tmp_path: Path) -> None:
    tiny = build(tmp_path / "model", SPEC)
    most, stop = [0], threading.Event()

    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[-1] for line in lines if str(tiny.folder) in line})

    def watch() -> None:
        while not stop.is_set():
            most[0] = max(most[0], mapped())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with tiny.engine() as engine:
            assert mapped() == 0, "the engine holds copies, not mapped files"
            assert ids_of(engine, PROMPT, greedy())
    finally:
        stop.set()
        watcher.join()
    assert most[0] <= 2


def test_page_locked_memory_that_runs_out_is_one_warning_and_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        calls.append(nbytes)
        return 0 if len(calls) <= 3 else 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        buffers = [cuda_slot.pin(page_buffer(4096)) for _ in range(8)]
    assert len(calls) == 8 and len(caught) == 1 and "page-locked memory ran out" in str(caught[0].message)
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [int(buffer[-1]) for buffer in buffers] == list(range(8))


class Elsewhere(torch.Tensor):
    """A tensor of a pretended device: mixing it with an ordinary one is an error, as between CUDA and CPU."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.to and args[1] == "cpu":
            return args[0].as_subclass(torch.Tensor).clone()
        crossing = function is torch.Tensor.copy_ and isinstance(args[0], cls)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not crossing and len({isinstance(tensor, cls) for tensor in tensors}) > 1:
            raise RuntimeError(f"{function} mixes devices")
        return super().__torch_function__(function, types, args, kwargs)


def test_a_layer_that_the_cpu_computes_brings_states_home_and_back_by_itself() -> None:
    here = torch.randn(3, 8)
    elsewhere = here.clone().as_subclass(Elsewhere)
    with pytest.raises(RuntimeError, match="mixes devices"):
        torch.add(here, elsewhere)

    class Doubles:
        def forward(self, hidden: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], reach: Any) -> None:
            assert not isinstance(hidden, Elsewhere) and reach == "tables in host memory"
            hidden += here

    layer = HostLayer(Doubles(), "tables in host memory")  # type: ignore[arg-type]
    cache = KVCache(1, 8, num_key_value_heads=1, head_dim=4, dtype=torch.float32).layer(0)
    layer.forward(elsewhere, Rows.chain(0, 3), cache, "tables on the device")  # type: ignore[arg-type]
    assert isinstance(elsewhere, Elsewhere) and torch.equal(elsewhere.as_subclass(torch.Tensor), 2 * here)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "sealed"
    folder.mkdir()
    folder.chmod(0o500)
    yield folder
    folder.chmod(0o700)


def test_without_a_place_to_write_the_packed_layers_the_message_says_what_to_set(
    tiny_of: TinyOf, read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.access(read_only, os.W_OK):  # root writes anywhere: a file in the place of the folder stops it too
        read_only.chmod(0o700)
        (read_only / "home").write_text("not a folder")
    tiny = tiny_of(SPEC)
    monkeypatch.setattr(Tiny, "home", property(lambda self: read_only / "home"))
    with pytest.raises(PrepareError, match="EESD_HOME"):
        tiny.engine()


def test_importing_changes_no_environment_and_needs_neither_triton_nor_cuda() -> None:
    program = """
import os, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('triton', 'pycuda', 'cupy'):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch, transformers  # whatever these do is theirs
before = dict(os.environ)
import eesd_lite.engine, eesd_lite.cuda_slot, quant.kernels, cli.main
from eesd_lite import Engine
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
print('fine')
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "fine\n", found.stderr
