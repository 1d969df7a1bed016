"""Losslessness: whatever is drafted, the ids are those of plain decoding, bit for bit (docs/exactness.md).

Puppets stand in for the exit head, since what is proposed must not matter. Every comparison is `==` on ids: there is
no tolerance here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from eesd_lite import SamplingParams, target
from eesd_lite.engine import Engine
from tests.puppets import all_puppets, at_random, drafting, ids_of, plain_ids, right, right_for
from tests.tiny import Tiny, TinySpec

SPEC = TinySpec(layers=5)
PROMPT = list(b"Tell me more")
NEW = 24
SETTINGS = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 3},
    "another seed": {"temperature": 0.8, "seed": 4},
    "top-k": {"temperature": 1.2, "top_k": 5, "seed": 1},
    "top-p": {"temperature": 1.5, "top_p": 0.7, "seed": 2},
    "penalty": {"repetition_penalty": 1.3},
    "everything": {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 9},
}
PLANS: dict[str, dict[str, Any]] = {
    "no exit layer": {},
    "exit 1": {"head": "random", "exit_layer": 1},
    "exit 2, layers from 2 on disk": {"head": "random", "exit_layer": 2, "resident_layers": 2},
    "exit 1, layers from 3 on disk": {"head": "random", "exit_layer": 1, "resident_layers": 3},
    "exit 4, layer 4 on disk": {"head": "random", "exit_layer": 4, "resident_layers": 4},
    "all layers on disk": {"resident_layers": 0},
}
EngineOf = Callable[..., Engine]


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": NEW, "ignore_eos": True, **settings})


def check_all_puppets(engine: Engine, settings: SamplingParams, lengths: tuple[int, ...]) -> None:
    expected = plain_ids(engine, PROMPT, settings)
    assert len(expected) == settings.max_new_tokens
    text = PROMPT + expected
    for name, proposal in all_puppets(text, engine.config.vocab_size).items():
        for length in lengths:
            engine.set_controller(f"fixed:{length}")
            with drafting(engine, proposal):
                assert ids_of(engine, PROMPT, settings) == expected, f"{name}, {length} drafted"


@pytest.mark.parametrize("plan", PLANS)
def test_every_puppet_gives_the_plain_ids_under_every_plan(engine_of: EngineOf, plan: str) -> None:
    check_all_puppets(engine_of(SPEC, **PLANS[plan]), params(), (1, 2, 4, 8))


@pytest.mark.parametrize("length", range(1, 9))
def test_every_draft_length_gives_the_plain_ids(engine_of: EngineOf, length: int) -> None:
    engine = engine_of(SPEC, **PLANS["exit 2, layers from 2 on disk"])
    check_all_puppets(engine, params(temperature=0.8, seed=length), (length,))


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_sampling_setting_gives_the_plain_ids(engine_of: EngineOf, settings: str) -> None:
    engine = engine_of(SPEC, **PLANS["exit 1, layers from 3 on disk"])
    check_all_puppets(engine, params(**SETTINGS[settings]), (1, 3, 7))


@pytest.mark.parametrize("plan", ["no exit layer", "exit 2, layers from 2 on disk"])
@pytest.mark.parametrize("settings", ["greedy", "everything"])
def test_float32_gives_the_plain_ids_too(engine_of: EngineOf, plan: str, settings: str) -> None:
    engine = engine_of(SPEC, dtype="float32", **PLANS[plan])
    check_all_puppets(engine, params(**SETTINGS[settings], max_new_tokens=12), (1, 4))


def test_two_threads_give_the_ids_of_one(engine_of: EngineOf) -> None:
    options = PLANS["exit 2, layers from 2 on disk"]
    expected = plain_ids(engine_of(SPEC, **options), PROMPT, params(max_new_tokens=6))
    engine = engine_of(SPEC, threads=2, **options)
    assert engine.target.ops.threads == 2  # type: ignore[attr-defined]
    engine.set_controller("fixed:3")
    with drafting(engine, right_for(2, PROMPT + expected, engine.config.vocab_size)):
        assert ids_of(engine, PROMPT, params(max_new_tokens=6)) == expected


@pytest.mark.parametrize(
    "spec",
    [
        TinySpec(seed=1, desc_act=True, sym=False, version=2, kv_heads=1),
        TinySpec(seed=2, group=-1, tied=True, bias="real", kv_heads=4),
        TinySpec(seed=3, hidden=128, group=64, inner=192, quantized_lm_head=True),
        TinySpec(seed=4, inner=72, group=24),
    ],
    ids=["act-order", "one group, tied, biases", "quantized lm_head", "odd sizes"],
)
def test_every_kind_of_checkpoint_gives_the_plain_ids(engine_of: EngineOf, spec: TinySpec) -> None:
    engine = engine_of(spec, head="random", exit_layer=2, resident_layers=2)
    check_all_puppets(engine, params(temperature=0.7), (2, 5))


@pytest.mark.parametrize("controller", ["calibrated", "beta", "fixed:3", "hf"])
@pytest.mark.parametrize("settings", ["greedy", "everything"])
def test_every_controller_and_the_real_head_give_the_plain_ids(
    engine_of: EngineOf, controller: str, settings: str
) -> None:
    engine = engine_of(SPEC, **PLANS["exit 2, layers from 2 on disk"])
    expected = plain_ids(engine, PROMPT, params(**SETTINGS[settings]))
    engine.set_controller(controller)
    assert ids_of(engine, PROMPT, params(**SETTINGS[settings])) == expected
    for confidence in (0.05, 0.5, 0.999):
        text = PROMPT + expected
        with drafting(engine, right_for(2, text, engine.config.vocab_size), confidence=confidence):
            assert ids_of(engine, PROMPT, params(**SETTINGS[settings])) == expected


def test_the_plain_ids_do_not_depend_on_what_is_resident_or_on_the_exit_layer(engine_of: EngineOf) -> None:
    found = {name: plain_ids(engine_of(SPEC, **options), PROMPT, params()) for name, options in PLANS.items()}
    assert len({tuple(ids) for ids in found.values()}) == 1, found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ids_do_not_depend_on_how_the_prefix_was_read(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    engine = engine_of(SPEC, dtype=dtype, context=400, **PLANS["exit 2, layers from 2 on disk"])
    prompt = [(7 * n) % 200 for n in range(150)]
    settings = params(temperature=0.8, max_new_tokens=10)
    expected = plain_ids(engine, prompt, settings)
    proposal = at_random(1, prompt + expected, engine.config.vocab_size)
    engine.set_controller("fixed:4")
    with drafting(engine, proposal):
        for chunk in (1, 7, 64):
            with monkeypatch.context() as patch:
                patch.setattr(target, "PREFILL_CHUNK", chunk)
                engine.reset()
                assert ids_of(engine, prompt, settings) == expected, f"chunks of {chunk}"
        for shared in (1, 50, 149):
            engine.reset()
            ids_of(engine, prompt[:shared], params(max_new_tokens=5))
            before = engine.stats.prefilled_tokens
            assert ids_of(engine, prompt, settings) == expected, f"{shared} tokens from an earlier turn"
            assert engine.stats.prefilled_tokens - before <= len(prompt) - shared


def test_a_second_turn_goes_on_as_if_the_first_had_been_read_as_a_prompt(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **PLANS["exit 2, layers from 2 on disk"])
    first = plain_ids(engine, PROMPT, params())
    prompt = PROMPT + first[:17] + list(b" and then?")
    expected = plain_ids(engine, prompt, params())
    engine.set_controller("fixed:5")
    with drafting(engine, at_random(3, PROMPT + first, engine.config.vocab_size)):
        assert ids_of(engine, PROMPT, params()) == first
        before = engine.stats.prefilled_tokens
        assert ids_of(engine, prompt, params()) == expected
    assert engine.stats.prefilled_tokens - before == len(b" and then?"), "the first turn was read again"


def test_the_seed_decides_and_the_same_seed_gives_the_same_ids(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **PLANS["exit 1"])
    by_seed = {seed: ids_of(engine, PROMPT, params(temperature=1.5, seed=seed)) for seed in range(4)}
    assert len({tuple(ids) for ids in by_seed.values()}) == 4
    assert by_seed == {seed: ids_of(engine, PROMPT, params(temperature=1.5, seed=seed)) for seed in range(4)}


def test_another_process_gives_the_same_ids(engine_of: EngineOf, tiny_of: Callable[[TinySpec], Tiny]) -> None:
    settings = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 1.2, "seed": 5}
    engine = engine_of(SPEC, **PLANS["exit 2, layers from 2 on disk"])
    expected = plain_ids(engine, PROMPT, SamplingParams(**settings))
    tiny = tiny_of(SPEC)
    program = (
        "import sys; from eesd_lite import Engine, SamplingParams\n"
        "engine = Engine.from_pretrained(sys.argv[1], head='random', exit_layer=1, context=128)\n"
        f"events = engine.generate({PROMPT}, SamplingParams(**{settings}))\n"
        "print([event.token_id for event in events if event.token_id is not None])"
    )
    environment = {**os.environ, "EESD_HOME": str(tiny.home), "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny.folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(expected), done.stderr


def test_an_exact_tie_goes_to_the_lowest_id_drafted_or_not(engine_of: EngineOf) -> None:
    engine = engine_of(TinySpec(seed=8), head="random", exit_layer=2)
    expected = plain_ids(engine, PROMPT, params())
    winner, twin = expected[0], expected[0] + 1
    table = engine.target.lm_head.clone()
    try:
        engine.target.lm_head[twin] = engine.target.lm_head[winner]  # its logits are the same bits from now on
        tied = plain_ids(engine, PROMPT, params())
        assert tied[0] == winner and twin not in tied
        engine.set_controller("fixed:3")
        for proposal in all_puppets(PROMPT + tied, engine.config.vocab_size).values():
            with drafting(engine, proposal):
                assert ids_of(engine, PROMPT, params()) == tied
    finally:
        engine.target.lm_head.copy_(table)


def test_a_silent_change_of_one_token_would_be_noticed(engine_of: EngineOf) -> None:
    """A negative control: an engine that keeps whatever is drafted must fail the comparison of this file."""
    engine = engine_of(SPEC, **PLANS["exit 1"])
    expected = plain_ids(engine, PROMPT, params())
    engine.set_controller("fixed:2")
    always = lambda sampler: lambda logits, position, history: 65  # noqa: E731
    engine._choose = always  # type: ignore[method-assign]
    try:
        with drafting(engine, right(PROMPT + expected)):
            assert ids_of(engine, PROMPT, params()) != expected
    finally:
        del engine._choose
