"""Sampled tokens have the target's own distribution, whatever was drafted: chi-square through the whole engine.

The expected probabilities are computed here, from the model's logits, in a few lines of numpy. A rule that keeps
whatever is drafted is the negative control: the same test must reject it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from eesd_lite import SamplingParams
from eesd_lite import engine as engine_module
from eesd_lite.cache import Rows
from eesd_lite.engine import Engine
from eesd_lite.speculative import Accepted
from tests.puppets import drafting
from tests.tiny import TinySpec

EngineOf = Callable[..., Engine]
PROMPT = list(b"Throw the dice")
TEMPERATURE, TOP_K, SEEDS = 4.0, 4, 600  # hot enough that all of the few tokens are drawn often


@torch.inference_mode()
def kept(engine: Engine, ids: list[int]) -> dict[int, float]:
    """The filtered distribution of the token after `ids`, from a prefill of its own."""
    target, rows = engine.target, Rows.chain(0, len(ids))
    hidden = target.upper(target.lower(target.embed(ids), rows), rows)
    logits = target.logits(hidden[-1:].contiguous())[0].numpy().astype(np.float64)[: engine.text.vocab_size]
    best = np.argsort(-logits, kind="stable")[:TOP_K]
    weights = np.exp((logits[best] - logits[best].max()) / TEMPERATURE)
    return dict(zip(best.tolist(), weights / weights.sum(), strict=True))


def expected_pairs(engine: Engine) -> dict[tuple[int, int], float]:
    """Probability of every pair of first two tokens."""
    first = kept(engine, PROMPT)
    pairs = {(a, b): p * q for a, p in first.items() for b, q in kept(engine, [*PROMPT, a]).items()}
    engine.reset()
    return pairs


def draw_pairs(engine: Engine, drafted: Callable[[int, int], int | None]) -> Counter[tuple[int, ...]]:
    """The first two tokens for many seeds; the second comes from a round that had a draft to judge."""
    counts: Counter[tuple[int, ...]] = Counter()
    with drafting(engine, drafted):
        for seed in range(SEEDS):
            # Three tokens, so that the round may draft one.
            params = SamplingParams(max_new_tokens=3, ignore_eos=True, temperature=TEMPERATURE, top_k=TOP_K, seed=seed)
            ids = [event.token_id for event in engine.generate(PROMPT, params) if event.token_id is not None]
            counts[tuple(ids[:2])] += 1
    assert engine.stats.balanced()
    return counts


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, int], float]) -> float:
    """Of the hypothesis that `counts` were drawn from `expected`; 0 if something impossible was drawn."""
    if set(counts) - set(expected):
        return 0.0
    total = sum(counts.values())
    assert min(expected.values()) * total >= 5, "cells too rare for a chi-square test"
    observed = [counts[pair] for pair in expected]
    return float(chisquare(observed, [p * total for p in expected.values()]).pvalue)


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    # A seed whose four best tokens are near enough to one another at both positions.
    engine = engine_of(TinySpec(seed=2), head="random", exit_layer=2)
    engine.set_controller("fixed:1")
    return engine


def test_sampled_tokens_have_the_targets_distribution_whatever_is_drafted(engine: Engine) -> None:
    expected = expected_pairs(engine)
    favourite = max(expected, key=lambda pair: expected[pair])[1]
    rare = min(expected, key=lambda pair: expected[pair])[1]
    for name, token in (("favourite", favourite), ("rare", rare)):
        # Seeds are fixed, so this is no game of chance; 1e-3 is where a fair rule would fail once in a thousand.
        value = p_value(draw_pairs(engine, lambda position, number, token=token: token), expected)
        assert value > 1e-3, f"{name}: {value:g}"


def test_keeping_whatever_is_drafted_is_rejected_by_the_same_test(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_pairs(engine)
    favourite = max(expected, key=lambda pair: expected[pair])[1]

    def always_accept(tree: object, logits: object, choose: Callable[..., int], visible: list[int]) -> Accepted:
        tokens = tree.tokens[1:]  # type: ignore[attr-defined]
        last = choose(logits[len(tokens)], len(visible) + len(tokens), [*visible, *tokens])  # type: ignore[index]
        return Accepted(tuple(range(1, len(tokens) + 1)), (*tokens, last))

    monkeypatch.setattr(engine_module, "accept", always_accept)
    assert p_value(draw_pairs(engine, lambda position, number: favourite), expected) < 1e-9
