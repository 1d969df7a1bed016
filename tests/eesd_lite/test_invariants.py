"""One test, or a few, for every invariant of the design, named after it. Losslessness itself is in test_exactness.py.

docs/exactness.md lists them. Counters sit on layers, lm_head and reader, so that "never" and "exactly once" are counted
and not timed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eesd_lite import SamplingParams
from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from tests.puppets import (
    all_puppets,
    assert_caches_are_those_of,
    at_random,
    caches,
    drafting,
    fresh_caches,
    ids_of,
    plain_ids,
    right,
    right_for,
    watched_rounds,
)
from tests.readers import WatchedReader
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=7)
EXIT = 2
OFFLOADED: dict[str, Any] = {"head": "random", "exit_layer": EXIT, "resident_layers": EXIT}
PROMPT = list(b"Once upon a time")
EngineOf = Callable[..., Engine]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 16, "ignore_eos": True, **settings})


# 1. Drafting never touches an offloaded weight.


def test_drafting_never_touches_an_offloaded_weight_with_the_reader_blocked_it_completes(
    tiny_of: Callable[[TinySpec], Tiny], engine_of: EngineOf
) -> None:
    expected = plain_ids(engine_of(SPEC, **OFFLOADED), PROMPT, params(max_new_tokens=6))
    offloaded = SPEC.layers - EXIT
    reader = WatchedReader(permits=offloaded)  # enough for the prompt's sweep and nothing after it
    with tiny_of(SPEC).engine(**OFFLOADED, controller="fixed:4", reader=reader) as engine:
        drafted = threading.Event()
        bank, below = engine.target.bank, EXIT - 1

        def proposal(position: int, number: int) -> int:
            return right(PROMPT + expected)(position, number)

        original = bank.done

        def done(index: int) -> None:
            original(index)
            if index == below and bank.forwards[below] == 1 + 5:  # the prompt, the current token and four drafts
                drafted.set()

        bank.done = done  # type: ignore[method-assign]
        out: list[int] = []
        with drafting(engine, proposal):
            thread = threading.Thread(target=lambda: out.extend(ids_of(engine, PROMPT, params(max_new_tokens=6))))
            thread.start()
            completed = drafted.wait(60)
            forwards, read = list(bank.forwards), list(reader.names)
            reader.release()
            thread.join()
        assert completed, "drafting waited for the reader"
        assert forwards[:EXIT] == [6] * EXIT, forwards
        # The verification may already ask for its first layer, but no layer was had since the prompt.
        assert forwards[EXIT] in (1, 2) and forwards[EXIT + 1 :] == [1] * (offloaded - 1), forwards
        assert len(read) == offloaded, read
        assert out == expected


@pytest.mark.parametrize("length", [0, 1, 4])
def test_every_verify_consumes_each_offloaded_layer_exactly_once_and_the_draft_none(
    engine_of: EngineOf, length: int
) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller(f"fixed:{length}")
    bank, before, rounds_before = engine.target.bank, list(engine.target.bank.forwards), engine.stats.snapshot()
    with drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
        ids_of(engine, PROMPT, params())
    stats = engine.stats.since(rounds_before)
    passes = [now - then for now, then in zip(bank.forwards, before, strict=True)]
    assert passes[EXIT:] == [1 + stats.rounds] * (SPEC.layers - EXIT)
    assert passes[:EXIT] == [1 + stats.rounds + stats.drafted] * EXIT
    assert stats.draft_offloaded_bytes == 0
    assert stats.verify_offloaded_bytes == stats.rounds * engine.plan.sweep_bytes
    assert stats.prefill_offloaded_bytes == engine.plan.sweep_bytes
    assert stats.sweeps == 1 + stats.rounds
    assert stats.draft_forwards == (0 if length == 0 else stats.drafted)
    assert stats.target_rows == stats.rounds + stats.drafted


def test_layers_are_read_in_sweep_order_without_end(tiny_of: Callable[[TinySpec], Tiny]) -> None:
    reader = WatchedReader()
    with tiny_of(SPEC).engine(**OFFLOADED, controller="fixed:2", reader=reader) as engine:
        ids_of(engine, PROMPT, params(max_new_tokens=5))
        order = [f"layer-{index:03d}.bin" for index in range(EXIT, SPEC.layers)]
        sweeps, names = engine.stats.sweeps, list(reader.names)
        assert sweeps * len(order) <= len(names) <= sweeps * len(order) + engine.plan.ring_slots
        assert names == (order * (sweeps + 1))[: len(names)]


# 2. Layers below the exit run once per token.


def test_layers_below_the_exit_run_once_per_token(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    rows: dict[int, int] = {}
    layers = engine.target.bank.resident
    originals = [layer.forward for layer in layers]

    def counting(index: int) -> Callable[..., None]:
        def forward(hidden: Any, new_rows: Any, cache: Any, rope: Any) -> None:
            rows[index] = rows.get(index, 0) + len(new_rows)
            originals[index](hidden, new_rows, cache, rope)

        return forward

    for index, layer in enumerate(layers):
        layer.forward = counting(index)  # type: ignore[method-assign]
    try:
        engine.set_controller("fixed:3")
        before = engine.stats.snapshot()
        with drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
            ids_of(engine, PROMPT, params())
    finally:
        for layer in layers:
            del layer.forward
    stats = engine.stats.since(before)
    # Every prompt token, every current token, every drafted token: once each, the verification adds none.
    assert rows == dict.fromkeys(range(EXIT), len(PROMPT) + stats.rounds + stats.drafted)


def test_the_head_drafts_from_verified_states(engine_of: EngineOf) -> None:
    """The state from which a round proposes first is that of a fresh forward of the visible tokens."""
    engine = engine_of(SPEC, **OFFLOADED)
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:3")
    seen: list[tuple[int, torch.Tensor]] = []
    with drafting(engine, at_random(2, PROMPT + expected, engine.config.vocab_size)) as puppets:
        generation = engine.generate(PROMPT, params())
        next(generation)
        propose = puppets[0].propose

        def watched(state: Any, rows: Any, *, position: int, history: Any) -> Any:
            if list(history) == (PROMPT + expected)[:position]:
                seen.append((position - 1, state.clone()))
            return propose(state, rows, position=position, history=history)

        puppets[0].propose = watched  # type: ignore[method-assign]
        list(generation)
    visible = PROMPT + expected
    target = engine.target
    with torch.inference_mode():
        states = target.lower(target.embed(visible), Rows.chain(0, len(visible)))
    assert len(seen) > 10
    for place, state in seen:
        assert torch.equal(state[0], states[place]), f"state of token {place}"


# 4. After every round the cache is what a fresh prefill of the visible tokens would give.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("resident", [EXIT, SPEC.layers])
def test_after_every_round_the_cache_is_what_a_fresh_prefill_would_give(
    engine_of: EngineOf, resident: int, dtype: str
) -> None:
    engine = engine_of(SPEC, dtype=dtype, **{**OFFLOADED, "resident_layers": resident})
    expected = plain_ids(engine, PROMPT, params())
    visible = PROMPT + expected
    reference = fresh_caches(engine, visible[:-1])
    assert_caches_are_those_of(engine, visible[:20], [tensor[:, :20] for tensor in reference])
    for name, proposal in all_puppets(visible, engine.config.vocab_size).items():
        engine.set_controller("fixed:4")
        with drafting(engine, proposal), watched_rounds(engine) as seen:
            assert ids_of(engine, PROMPT, params()) == expected
        for held, found in seen:
            assert held == visible[: len(held)]
            for number, (a, b) in enumerate(zip(found, reference, strict=True)):
                assert torch.equal(a, b[:, : len(held)]), f"{name}: tensor {number} after {len(held)} tokens"


def test_the_head_cache_is_filled_by_rounds_that_did_not_draft(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    engine.set_controller("fixed:0")
    ids = ids_of(engine, PROMPT, params())
    held = list(engine.cached_ids)
    assert held == (PROMPT + ids)[: len(held)] and len(held) == len(PROMPT + ids) - 1
    assert_caches_are_those_of(engine, held, caches(engine, len(held)))


def test_switching_drafting_off_and_on_leaves_no_gap_in_the_head_cache(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OFFLOADED)
    engine.set_controller("off")
    first = ids_of(engine, PROMPT, params())
    engine.set_controller("fixed:3")
    ids_of(engine, PROMPT + first[:-1] + [65], params())
    held = list(engine.cached_ids)
    assert_caches_are_those_of(engine, held, caches(engine, len(held)))


# 5. What is allocated is what was planned.


def allocated(engine: Engine) -> dict[str, int]:
    """Bytes that the engine really holds, under the plan's names."""
    target, bank = engine.target, engine.target.bank
    found = {
        "embedding": target.embedding.nbytes,
        "lm_head": 0 if target.lm_head is target.embedding else target.lm_head.nbytes,
        "norms": target.norm.nbytes,
        "rope tables": sum(table.nbytes for table in target.reaches[0].rope),
        "KV cache": target.kv.nbytes,
        "stream ring": sum(slot.buffer.nbytes for slot in bank.streamer._slots) if bank.streamer else 0,
        "resident layers": sum(layer.input_norm.untyped_storage().nbytes() for layer in bank.resident),
    }
    if engine.head is not None:
        found["exit head"] = engine.head._norm.untyped_storage().nbytes()
        found["exit head KV cache"] = engine.head.kv.nbytes
        found["exit head states"] = engine.head.waiting._states.nbytes
    return {name: size for name, size in found.items() if size}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "options",
    [{}, {"resident_layers": 0}, OFFLOADED, {**OFFLOADED, "resident_layers": 5}, {"head": "random", "exit_layer": 1}],
    ids=["resident", "all on disk", "exit 2 and no more", "five resident", "exit 1 resident"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_allocated_is_what_was_planned(
    engine_of: EngineOf, options: dict[str, Any], dtype: str, tied: bool
) -> None:
    engine = engine_of(TinySpec(layers=7, tied=tied, hidden=128, inner=256), dtype=dtype, **options)
    planned = {name: size for name, size in engine.plan.items if name != "scratch"}
    found = allocated(engine)
    assert found.keys() == planned.keys()
    assert sum(found.values()) == pytest.approx(sum(planned.values()), rel=0.01)
    for name, size in planned.items():
        assert found[name] == size, name
    assert engine.plan.total_bytes == sum(size for _, size in engine.plan.items)
    assert engine.plan.sweep_bytes == sum(engine.target.bank.layer_bytes[engine.plan.resident_layers :])


def test_a_memory_budget_is_kept_and_decides_how_many_layers_stay(tiny_of: Callable[[TinySpec], Tiny]) -> None:
    spec = TinySpec(layers=7, hidden=128, inner=256)
    with tiny_of(spec).engine(head="random", exit_layer=2) as engine:
        everything, layer = engine.plan.total_bytes, max(engine.target.bank.layer_bytes)
        expected = plain_ids(engine, PROMPT, params())
    budget = everything - layer  # the ring takes two slots, so three layers have to go
    with tiny_of(spec).engine(head="random", exit_layer=2, device_memory=budget) as engine:
        assert engine.plan.total_bytes <= budget
        assert 2 <= engine.plan.resident_layers < 7
        assert sum(allocated(engine).values()) <= budget
        assert ids_of(engine, PROMPT, params()) == expected


# 7. Prefill is layer-major.


def test_prefill_is_layer_major_one_sweep_and_one_row_of_lm_head(
    tiny_of: Callable[[TinySpec], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(5 * n) % 200 for n in range(400)]
    reader = WatchedReader()
    with tiny_of(SPEC).engine(**OFFLOADED, context=420, controller="fixed:3", reader=reader) as engine:
        rows: list[int] = []
        original = engine.target.logits
        monkeypatch.setattr(engine.target, "logits", lambda hidden: rows.append(len(hidden)) or original(hidden))
        generation = engine.generate(prompt, params(max_new_tokens=9))
        next(generation)
        assert rows == [1]
        assert engine.target.bank.forwards == [1] * SPEC.layers
        assert engine.stats.prefill_offloaded_bytes == engine.plan.sweep_bytes
        list(generation)
        drafted = [count - 1 for count in rows[1:]]
        assert sum(drafted) == engine.stats.drafted and max(drafted) <= 3, "lm_head saw more rows than were drafted"
        assert engine.stats.balanced()
