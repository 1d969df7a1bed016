from pathlib import Path

import pytest
import torch

from eesd_lite.distill.head_module import ExitHead, Packing
from eesd_lite.distill.report import measure
from eesd_lite.distill.ridge import VARIANTS, batches_of, instant_head, split
from eesd_lite.distill.state_cache import StateCache, StateCacheWriter
from eesd_lite.errors import PrepareError


def test_the_closed_form_finds_an_affine_map_that_exists(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Final states that are exactly an affine map of the layer's output: all choices agree with the target's."""
    parts = tiny.parts()
    head = ExitHead(tiny.shape, parts.reaches[1], eps=1e-5).load(tiny.head())
    generator = torch.Generator().manual_seed(2)
    matrix, bias = torch.randn(64, 64, generator=generator) / 8, torch.randn(64, generator=generator)
    with StateCacheWriter(tmp_path, hidden_size=64, exit_layers=[1], fingerprint="x", rope={}) as writer:
        for _ in range(40):
            states = torch.randn(60, 64, generator=generator).bfloat16()
            with torch.no_grad():
                output = head.run_layer(states, Packing.of(tiny.lengths))
            tokens = [list(range(n)) for n in tiny.lengths]
            writer.append(tokens, {1: states}, output @ matrix.T + bias)
    start = instant_head(StateCache(tmp_path), 1, parts, compute=torch.float32)
    assert start.variant in VARIANTS
    assert start.quality.agreement > 0.97  # the cached final states are rounded to bfloat16, so a few near ties differ
    assert start.quality.overlap > 0.98
    unsolved = tiny.head() | {"affine.weight": torch.eye(64)}
    _, held_out = split(StateCache(tmp_path))
    control = measure(head.load(unsolved), StateCache(tmp_path), 1, parts, sequences=held_out)
    assert control.agreement < 0.5


def test_the_layer_is_the_targets_and_the_norm_is_the_final_norm(tiny, small_cache) -> None:  # type: ignore[no-untyped-def]
    parts = tiny.parts()
    start = instant_head(small_cache, 1, parts, compute=torch.float32)
    for name, tensor in parts.layers[1].items():
        assert torch.equal(start.tensors[f"layer.{name}"], tensor)
    assert torch.equal(start.tensors["norm.weight"], parts.norm)


def test_held_out_sequences_are_the_last_three_percent(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    cache = tiny.write_cache(tmp_path, batches=100)
    assert split(cache) == (range(0, 291), range(291, 300))
    with StateCacheWriter(tmp_path / "one", hidden_size=4, exit_layers=[1], fingerprint="x", rope={}) as writer:
        writer.append([[1, 2]], {1: torch.zeros(2, 4)}, torch.zeros(2, 4))
    with pytest.raises(PrepareError, match="1 sequences are too few"):
        split(StateCache(tmp_path / "one"))


def test_batches_hold_consecutive_whole_sequences(small_cache) -> None:  # type: ignore[no-untyped-def]
    batches = batches_of(small_cache, range(2, 9), 50)
    assert [s for batch in batches for s in batch] == list(range(2, 9))
    for batch in batches:
        assert len(batch) == 1 or sum(int(small_cache.lengths[s]) for s in batch) <= 50
    assert batches_of(small_cache, range(0, 2), 5) == [[0], [1]]  # longer than the batch: alone in it
