"""Rows describe chains and trees alike; the cache keeps layers apart, counts its bytes and compacts in one move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_lite.cache import KVCache, Rows
from eesd_lite.ops import attended_slots


def filled_cache(layers: int = 3, capacity: int = 12) -> KVCache:
    cache = KVCache(layers, capacity, num_key_value_heads=2, head_dim=4, dtype=torch.float32)
    for layer in range(layers):
        for part, tensor in enumerate(cache.layer(layer)):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * layer + 500 * part)
    return cache


def snapshot(cache: KVCache) -> torch.Tensor:  # [layers, 2, heads, capacity, head_dim]
    return torch.stack([torch.stack(cache.layer(layer)) for layer in range(cache.num_layers)])


def test_a_chain_attends_everything_before_it_and_itself() -> None:
    rows = Rows.chain(5, 3)
    assert rows.positions.tolist() == rows.slots.tolist() == [5, 6, 7]
    assert [attended_slots(rows, row).tolist() for row in range(3)] == [list(range(n)) for n in (6, 7, 8)]


def test_a_tree_node_attends_the_prefix_and_its_own_path_only() -> None:
    rows = Rows.tree(10, [-1, -1, 1, 0, 2])
    assert rows.positions.tolist() == [10, 10, 11, 11, 12]
    assert rows.slots.tolist() == [10, 11, 12, 13, 14]
    seen = [attended_slots(rows, row).tolist()[10:] for row in range(5)]
    assert seen == [[10], [11], [11, 12], [10, 13], [11, 12, 14]]


@given(start=st.integers(0, 50), count=st.integers(1, 20))
def test_a_tree_without_branches_is_a_chain(start: int, count: int) -> None:
    tree, chain = Rows.tree(start, list(range(-1, count - 1))), Rows.chain(start, count)
    assert torch.equal(tree.positions, chain.positions) and torch.equal(tree.slots, chain.slots)
    for row in range(count):
        assert torch.equal(attended_slots(tree, row), attended_slots(chain, row))


def test_a_slice_of_rows_keeps_their_paths() -> None:
    rows = Rows.tree(4, [-1, 0, 1, 1]).slice(2, 4)
    assert len(rows) == 2
    assert [attended_slots(rows, row).tolist()[4:] for row in range(2)] == [[4, 5, 6], [4, 5, 7]]


def test_a_parent_that_comes_later_is_refused() -> None:
    with pytest.raises(AssertionError, match="node 1 has parent 1"):
        Rows.tree(0, [-1, 1])


def test_rows_of_unequal_lengths_are_refused() -> None:
    chain = Rows.chain(0, 2)
    with pytest.raises(AssertionError, match="slots has shape"):
        Rows(positions=chain.positions, slots=chain.slots[:1], prefix=chain.prefix, paths=chain.paths)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_bytes_are_counted_as_they_are_allocated(dtype: torch.dtype, size: int) -> None:
    cache = KVCache(30, 100, num_key_value_heads=3, head_dim=64, dtype=dtype)
    assert cache.nbytes == 30 * 100 * 2 * 3 * 64 * size
    assert cache.bytes_per_token == 2 * 3 * 64 * size
    assert cache.nbytes == sum(tensor.nbytes for layer in range(30) for tensor in cache.layer(layer))


def test_every_layer_has_a_cache_of_its_own() -> None:
    cache = KVCache(4, 8, num_key_value_heads=1, head_dim=2, dtype=torch.float32)
    addresses = {tensor.data_ptr() for layer in range(4) for tensor in cache.layer(layer)}
    assert len(addresses) == 8
    assert all(tensor.is_contiguous() for layer in range(4) for tensor in cache.layer(layer))
    for wrong in (-1, 4):
        with pytest.raises(AssertionError, match=f"layer {wrong} of 4"):
            cache.layer(wrong)


@settings(max_examples=50)
@given(data=st.data())
def test_a_move_reads_all_sources_before_it_writes(data: st.DataObject) -> None:
    cache = filled_cache()
    slots = st.integers(0, cache.capacity - 1)
    targets = data.draw(st.lists(slots, unique=True, max_size=6))
    sources = data.draw(st.lists(slots, min_size=len(targets), max_size=len(targets)))
    expected = snapshot(cache)
    if targets:
        expected[:, :, :, targets] = expected[:, :, :, sources].clone()
    cache.move(sources, targets)
    assert torch.equal(snapshot(cache), expected)


def test_a_move_out_of_the_cache_is_refused() -> None:
    with pytest.raises(AssertionError, match="slot 12 of 12"):
        filled_cache().move([12], [3])
