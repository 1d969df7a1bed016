"""Attention of both kinds of ops: near float64 arithmetic; a tree's path, a chain and a prompt give the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eesd_lite.cache import KVCache, Rows
from eesd_lite.cpu_ops import FusedCpuOps
from eesd_lite.ops import Ops, QKNorm, Reach, Rope, TorchOps, attended_slots

BF16, F64 = torch.bfloat16, torch.float64
SHAPES = [(9, 3, 64), (4, 1, 8), (4, 2, 96), (2, 2, 128), (3, 1, 20)]  # heads, key-value heads, head_dim
CAPACITY = 400


def both() -> list[Ops]:
    return [TorchOps(BF16), FusedCpuOps(threads=2)]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def tables(head_dim: int) -> Rope:
    angles = torch.arange(CAPACITY)[:, None] * (0.5 ** torch.arange(head_dim // 2))
    return angles.cos(), angles.sin()


class Head:
    """One layer's cache with random keys in `filled` slots, and a stream of query rows by position."""

    def __init__(
        self, shape: tuple[int, int, int], filled: int = 0, window: int | None = None, norm: bool = False
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = shape
        self.window = window
        weights = (1 + draw(seed, self.head_dim) / 4 for seed in (5, 6))
        self.qk_norm = QKNorm(*weights, 1e-5) if norm else None
        self.rope = tables(self.head_dim)
        cache = KVCache(1, CAPACITY, num_key_value_heads=self.kv_heads, head_dim=self.head_dim, dtype=BF16)
        self.k, self.v = cache.layer(0)
        self.k[:, :filled] = draw(1, self.kv_heads, filled, self.head_dim)
        self.v[:, :filled] = draw(2, self.kv_heads, filled, self.head_dim)
        self.inputs = draw(3, CAPACITY, (self.heads + 2 * self.kv_heads) * self.head_dim)

    def run(self, ops: Ops, rows: Rows, inputs: torch.Tensor | None = None) -> torch.Tensor:
        qkv = self.inputs[rows.positions] if inputs is None else inputs
        return ops.attention(
            qkv.contiguous(), self.k, self.v, rows, Reach(self.rope, self.window), self.heads, self.qk_norm
        )


def rotated(heads: torch.Tensor, position: int, rope: Rope) -> torch.Tensor:  # float64
    half = heads.shape[-1] // 2
    cos, sin = (table[position].to(F64) for table in rope)
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
    return heads * torch.cat([cos, cos]) + turned * torch.cat([sin, sin])


def normed(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm over a head, float64."""
    return heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.to(F64)


def exact_attention(head: Head, rows: Rows) -> torch.Tensor:
    """Over the keys and values as they stand in the cache, in float64."""
    results = []
    for row in range(len(rows)):
        position = int(rows.positions[row])
        query = head.inputs[position].to(F64).view(-1, head.head_dim)[: head.heads]
        if head.qk_norm is not None:
            query = normed(query, head.qk_norm.query)
        query = rotated(query, position, head.rope).view(head.kv_heads, -1, head.head_dim)
        slots = attended_slots(rows, row)
        slots = slots if head.window is None else slots[max(0, len(slots) - head.window) :]
        scores = query @ head.k[:, slots].to(F64).transpose(1, 2) * head.head_dim**-0.5
        results.append((torch.softmax(scores, dim=-1) @ head.v[:, slots].to(F64)).flatten())
    return torch.stack(results)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_attention_is_near_float64(ops: Ops, shape: tuple[int, int, int]) -> None:
    head, rows = Head(shape, filled=100), Rows.chain(100, 7)
    found = head.run(ops, rows).to(F64)
    exact = exact_attention(head, rows)
    # One rounding to bfloat16 (2^-8 of the value); scores of size 10 carry float32 errors of some 1e-6.
    assert bool(((found - exact).abs() <= 2.0**-8 * exact.abs() + 2e-5).all())


@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_keys_are_rotated_and_values_stored_in_the_rows_slots(ops: Ops) -> None:
    head = Head((4, 2, 8))
    chain = Rows.chain(30, 2)
    slots = torch.tensor([70, 60])
    rows = Rows(positions=chain.positions, slots=slots, prefix=torch.zeros_like(slots), paths=slots[:, None].clone())
    before = head.k.clone()
    head.run(ops, rows)
    keys = head.inputs[30:32].view(2, -1, 8)[:, 4:6].to(F64)
    for row, slot in enumerate((70, 60)):
        expected = rotated(keys[row], 30 + row, head.rope)
        torch.testing.assert_close(head.k[:, slot].to(F64), expected, rtol=2.0**-8, atol=1e-6)
        assert torch.equal(head.v[:, slot], head.inputs[30 + row].view(-1, 8)[6:8])
    untouched = [slot for slot in range(CAPACITY) if slot not in (60, 70)]
    assert torch.equal(head.k[:, untouched], before[:, untouched])


def test_both_kinds_of_ops_store_the_same_keys() -> None:
    stored = []
    for ops in both():
        head = Head((9, 3, 64))
        head.run(ops, Rows.chain(0, 50))
        stored.append(torch.stack([head.k, head.v]))
    assert torch.equal(stored[0], stored[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["torch", "fused-cpu"])
def test_rows_at_once_equal_rows_one_by_one(kind: str, shape: tuple[int, int, int]) -> None:
    kinds: list[Ops] = [TorchOps(BF16)] if kind == "torch" else [FusedCpuOps(threads=n) for n in (1, 2, 3)]
    alone = Head(shape, filled=150)
    single = torch.cat([alone.run(kinds[0], Rows.chain(150 + row, 1)) for row in range(17)])
    for ops in kinds:
        for count in range(1, 18):
            together = Head(shape, filled=150)
            assert torch.equal(together.run(ops, Rows.chain(150, count)), single[:count]), f"{count} rows"
            assert torch.equal(together.k[:, : 150 + count], alone.k[:, : 150 + count])


@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 1, 8)], ids=str)
@pytest.mark.parametrize("kind", ["torch", "fused-cpu"])
def test_a_prompt_of_300_rows_equals_300_steps_and_chunks(kind: str, shape: tuple[int, int, int]) -> None:
    ops: Ops = TorchOps(BF16) if kind == "torch" else FusedCpuOps(threads=2)
    whole, steps, chunks = Head(shape), Head(shape), Head(shape)
    rows = Rows.chain(0, 300)
    expected = whole.run(ops, rows)
    assert torch.equal(torch.cat([steps.run(ops, Rows.chain(i, 1)) for i in range(300)]), expected)
    pieces = [rows.slice(start, min(start + 37, 300)) for start in range(0, 300, 37)]
    assert torch.equal(torch.cat([chunks.run(ops, piece) for piece in pieces]), expected)
    assert torch.equal(whole.k, steps.k) and torch.equal(whole.v, chunks.v)


def chain_of_path(ops: Ops, shape: tuple[int, int, int], start: int, path: torch.Tensor) -> torch.Tensor:
    """The last of the path's tokens, as a plain chain sees it."""
    head = Head(shape, filled=start)
    return head.run(ops, Rows.chain(start, len(path)), path)[-1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("start", [0, 5, 16, 130])
@pytest.mark.parametrize("kind", ["torch", "fused-cpu"])
def test_every_path_of_a_tree_equals_the_chain_bit_for_bit(kind: str, start: int, shape: tuple[int, int, int]) -> None:
    ops: Ops = TorchOps(BF16) if kind == "torch" else FusedCpuOps(threads=2)
    parents = [-1, -1, 0, 1, 2, 2, 4, 3, 6]
    head = Head(shape, filled=start)
    inputs = draw(9, len(parents), head.inputs.shape[1])
    rows = Rows.tree(start, parents)
    found = head.run(ops, rows, inputs)
    for node in range(len(parents)):
        path = rows.paths[node][rows.paths[node] >= 0] - start
        assert torch.equal(found[node], chain_of_path(ops, shape, start, inputs[path])), f"node {node}"


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 70), picks=st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_any_tree_equals_its_chains(start: int, picks: list[int]) -> None:
    parents = [pick % (node + 1) - 1 for node, pick in enumerate(picks)]
    ops, shape = FusedCpuOps(threads=2), (4, 2, 16)
    head = Head(shape, filled=start)
    inputs = draw(9, len(parents), head.inputs.shape[1])
    rows = Rows.tree(start, parents)
    found = head.run(ops, rows, inputs)
    for node in range(len(parents)):
        path = rows.paths[node][rows.paths[node] >= 0] - start
        assert torch.equal(found[node], chain_of_path(ops, shape, start, inputs[path]))


def test_what_lies_beyond_the_attended_slots_is_never_read() -> None:
    for ops in both():
        clean, dirty = Head((9, 3, 64), filled=50), Head((9, 3, 64), filled=50)
        dirty.k[:, 51:], dirty.v[:, 51:] = float("nan"), float("nan")
        assert torch.equal(clean.run(ops, Rows.chain(50, 1)), dirty.run(ops, Rows.chain(50, 1)))


def test_a_broken_key_is_not_hidden() -> None:
    for ops in both():
        head = Head((9, 3, 64), filled=50)
        head.k[1, 20, 3] = float("nan")
        broken = head.run(ops, Rows.chain(50, 1)).view(3, -1).isnan()
        assert broken[1].all() and not broken[0].any() and not broken[2].any()


@pytest.mark.parametrize("wrong", ["slot", "position", "prefix", "path"])
def test_a_row_outside_the_cache_is_refused_and_nothing_is_stored(wrong: str) -> None:
    head = Head((4, 2, 8), filled=10)
    values = {name: torch.tensor([10]) for name in ("slot", "position", "prefix")}
    path = torch.tensor([[CAPACITY if wrong == "path" else 10]])
    if wrong != "path":
        values[wrong] = torch.tensor([CAPACITY + 1])
    rows = Rows(positions=values["position"], slots=values["slot"], prefix=values["prefix"], paths=path)
    before = head.k.clone()
    with pytest.raises(AssertionError, match="goes beyond"):
        head.run(FusedCpuOps(threads=1), rows, head.inputs[:1])
    assert torch.equal(head.k, before)


# Windows, and norms of queries and keys.

WINDOWS = [1, 7, 16, 40, 64, 100, 1000]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_a_window_is_near_float64(ops: Ops, window: int) -> None:
    head, rows = Head((4, 2, 96), filled=150, window=window), Rows.chain(150, 7)
    found = head.run(ops, rows).to(F64)
    exact = exact_attention(head, rows)
    assert bool(((found - exact).abs() <= 2.0**-8 * exact.abs() + 2e-5).all())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["torch", "fused-cpu"])
def test_rows_within_a_window_equal_single_rows_chunks_and_paths_of_a_tree(kind: str, window: int) -> None:
    ops: Ops = TorchOps(BF16) if kind == "torch" else FusedCpuOps(threads=2)
    shape = (9, 3, 64)
    whole, steps, chunks = (Head(shape, window=window) for _ in range(3))
    rows = Rows.chain(0, 200)
    expected = whole.run(ops, rows)
    assert torch.equal(torch.cat([steps.run(ops, Rows.chain(i, 1)) for i in range(200)]), expected)
    pieces = [rows.slice(start, min(start + 37, 200)) for start in range(0, 200, 37)]
    assert torch.equal(torch.cat([chunks.run(ops, piece) for piece in pieces]), expected)
    parents = [-1, -1, 0, 1, 2, 2, 4, 3, 6]
    tree, inputs = Head(shape, filled=130, window=window), draw(9, len(parents), whole.inputs.shape[1])
    rows = Rows.tree(130, parents)
    found = tree.run(ops, rows, inputs)
    for node in range(len(parents)):
        path = rows.paths[node][rows.paths[node] >= 0] - 130
        chain = Head(shape, filled=130, window=window)
        assert torch.equal(found[node], chain.run(ops, Rows.chain(130, len(path)), inputs[path])[-1]), f"node {node}"


def test_what_the_window_has_left_behind_is_never_read() -> None:
    for ops in both():
        clean, dirty = Head((9, 3, 64), filled=100, window=20), Head((9, 3, 64), filled=100, window=20)
        dirty.k[:, :81], dirty.v[:, :81] = float("nan"), float("nan")
        assert torch.equal(clean.run(ops, Rows.chain(100, 1)), dirty.run(ops, Rows.chain(100, 1)))
        dirty.k[:, 81] = float("nan")
        assert dirty.run(ops, Rows.chain(100, 1)).isnan().all()


def test_a_window_that_reaches_everything_changes_no_bit() -> None:
    for ops in both():
        without, wide = Head((4, 2, 16), filled=90), Head((4, 2, 16), filled=90, window=95)
        assert torch.equal(without.run(ops, Rows.chain(90, 5)), wide.run(ops, Rows.chain(90, 5)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ops", both(), ids=lambda ops: ops.name)
def test_normalized_queries_and_keys_are_near_float64(ops: Ops, shape: tuple[int, int, int]) -> None:
    head, rows = Head(shape, filled=100, norm=True), Rows.chain(100, 7)
    found = head.run(ops, rows).to(F64)
    heads, kv_heads, head_dim = shape
    keys = head.inputs[100:107].to(F64).view(7, -1, head_dim)[:, heads : heads + kv_heads]
    assert head.qk_norm is not None
    for row in range(7):
        wanted = rotated(normed(keys[row], head.qk_norm.key), 100 + row, head.rope)
        torch.testing.assert_close(head.k[:, 100 + row].to(F64), wanted, rtol=2.0**-8, atol=1e-6)
    exact = exact_attention(head, rows)
    assert bool(((found - exact).abs() <= 2.0**-8 * exact.abs() + 2e-5).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["torch", "fused-cpu"])
def test_normalized_rows_at_once_equal_rows_one_by_one(kind: str, shape: tuple[int, int, int]) -> None:
    kinds: list[Ops] = [TorchOps(BF16)] if kind == "torch" else [FusedCpuOps(threads=n) for n in (1, 2)]
    alone = Head(shape, filled=50, norm=True)
    single = torch.cat([alone.run(kinds[0], Rows.chain(50 + row, 1)) for row in range(9)])
    for ops in kinds:
        for count in (2, 5, 9):
            together = Head(shape, filled=50, norm=True)
            assert torch.equal(together.run(ops, Rows.chain(50, count)), single[:count]), f"{count} rows"
            assert torch.equal(together.k[:, : 50 + count], alone.k[:, : 50 + count])
