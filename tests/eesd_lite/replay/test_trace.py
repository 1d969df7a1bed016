"""Trace files: what is saved is loaded, anything else is refused in one line. Recording, against the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eesd_lite import SamplingParams
from eesd_lite.cache import Rows
from eesd_lite.controller import make_controller
from eesd_lite.engine import Engine
from eesd_lite.errors import EesdError, TraceError
from eesd_lite.replay.curves import make_curve
from eesd_lite.replay.player import play
from eesd_lite.replay.record import record
from eesd_lite.replay.trace import Trace
from eesd_lite.sampling import Sampler
from eesd_lite.speculative import draft, keep_prefix
from tests.eesd_lite.replay.made_traces import drawn, made
from tests.puppets import at_random, drafting, ids_of, plain_ids
from tests.tiny import TinySpec

EngineOf = Callable[..., Engine]
SPEC = TinySpec(layers=5)
OPTIONS: dict[str, Any] = {"head": "random", "exit_layer": 2, "draft_limit": 6}
PROMPTS = [list(b"Tell me more"), list(b"A b c")]


def test_a_saved_trace_is_loaded_as_it_was(tmp_path: Path) -> None:
    trace = drawn(3, answers=3)
    trace.save(tmp_path / "t.npz")
    loaded = Trace.load(tmp_path / "t.npz")
    assert loaded.about == trace.about
    for ours, theirs in zip(trace.answers, loaded.answers, strict=True):
        assert (ours.prompt, ours.answer) == (theirs.prompt, theirs.answer)
        for a, b in zip(ours.positions, theirs.positions, strict=True):
            assert (a.tokens, a.accepted) == (b.tokens, b.accepted)
            assert a.confidences == pytest.approx(b.confidences, abs=1e-5)  # stored in steps of 1 / 65535


def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = tmp_path / "t.npz"
    drawn(1).save(whole)
    bytes_ = whole.read_bytes()
    (tmp_path / "short.npz").write_bytes(bytes_[: len(bytes_) // 2])
    (tmp_path / "text.npz").write_text("not a trace")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with np.load(whole) as file:
        arrays = dict(file)
    np.savez(tmp_path / "lengths.npz", **{**arrays, "answer_lengths": arrays["answer_lengths"] + 1})
    np.savez(tmp_path / "accepted.npz", **{**arrays, "accepted": arrays["accepted"] + 9})
    for name in ("missing", "short", "text", "other", "lengths", "accepted"):
        with pytest.raises(TraceError, match=f"{name}.npz") as caught:
            Trace.load(tmp_path / f"{name}.npz")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4}])
def test_a_recorded_draft_is_accepted_as_far_as_the_engine_accepts_it(
    engine_of: EngineOf, sampling: dict[str, Any]
) -> None:
    """The engine itself, drafting any fixed length, does in every round what the trace says."""
    engine = engine_of(SPEC, **OPTIONS)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, **sampling)
    text = PROMPTS[0] + plain_ids(engine, PROMPTS[0], params)
    proposal = lambda position, _: at_random(position, text, 200)(position, 0)  # noqa: E731  by position alone
    with drafting(engine, proposal, confidence=0.75):
        trace = record(engine, PROMPTS[:1], params)
        assert len({position.accepted for position in trace.answers[0].positions}) > 2, "the test has no teeth"
        assert trace.answers[0].answer == tuple(text[len(PROMPTS[0]) :])
        for length in (1, 3, 6):
            engine.set_controller(f"fixed:{length}")
            before = engine.stats.snapshot()
            ids_of(engine, PROMPTS[0], params)
            done = engine.stats.since(before)
            played = play(
                trace,
                make_curve("memory", trace.about["seconds"]),
                lambda _, costs: make_controller(engine.controller_spec),
            )
            assert (played.rounds, played.accepted) == (done.rounds, done.accepted)
            assert played.drafted == done.drafted


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2}])
def test_drafts_side_by_side_are_those_of_one_chain_after_another(
    engine_of: EngineOf, sampling: dict[str, Any]
) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, **sampling)
    trace = record(engine, PROMPTS[:1], params)
    answer = trace.answers[0]
    text = [*answer.prompt, *answer.answer]
    sampler = Sampler(params, engine.config.vocab_size, engine.text.vocab_size)
    assert engine.drafter_factory is not None
    drafter, target = engine.drafter_factory(engine.target, sampler), engine.target
    rows = Rows.chain(0, len(answer.prompt))
    with torch.inference_mode():
        keep_prefix(drafter, target.lower(target.embed(list(answer.prompt)), rows), rows)
        for position in answer.positions[:20]:
            visible = text[: len(answer.prompt) + position.index + 1]
            tree = draft(
                target, drafter, make_controller("fixed:6"), visible=visible, limit=6, stop_ids=frozenset()
            ).tree
            assert tuple(tree.tokens[1:]) == position.tokens
    engine.reset()


def test_a_trace_knows_what_it_was_recorded_with_and_leaves_the_engine_as_it_was(engine_of: EngineOf) -> None:
    engine = engine_of(SPEC, **OPTIONS)
    params = SamplingParams(max_new_tokens=5)
    expected = plain_ids(engine, PROMPTS[1], params)
    ticks = iter(range(10**6))
    trace = record(engine, PROMPTS, params, clock=lambda: float(next(ticks)))
    assert trace.about["seconds"] == {"lower": 1.0, "head": 1.0, "verify": [1.0] * 7}
    assert (trace.about["exit_layer"], trace.k_max, trace.about["params"]["max_new_tokens"]) == (2, 6, 5)
    assert [answer.prompt for answer in trace.answers] == [tuple(prompt) for prompt in PROMPTS]
    assert ids_of(engine, PROMPTS[1], params) == expected == list(trace.answers[1].answer)
    assert engine.controller_spec == "calibrated"


def test_without_a_head_there_is_nothing_to_record(engine_of: EngineOf) -> None:
    with pytest.raises(EesdError, match="needs an exit head"):
        record(engine_of(SPEC), PROMPTS, SamplingParams(max_new_tokens=3))


def test_a_made_trace_is_consistent() -> None:
    with pytest.raises(AssertionError):
        made([[1, 2]]).answers[0].__class__((1,), (1, 2, 3), ())
