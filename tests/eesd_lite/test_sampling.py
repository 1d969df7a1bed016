"""The chosen token follows the filtered distribution, depends on (logits, seed, position) only, and ties go low."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eesd_lite.errors import ModelError
from eesd_lite.params import SamplingParams
from eesd_lite.sampling import NoiseSource, Sampler

DRAWS = 20_000


def random_logits(size: int, spread: float = 3.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def by_sorting(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """The filtered distribution written the slow and obvious way: sort everything, then walk."""
    probs = softmax(logits.astype(np.float64) / params.temperature)
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    needed = params.top_p * probs[order].sum()
    kept, mass = [], 0.0
    for token_id in order:
        kept.append(token_id)
        mass += probs[token_id]
        if params.top_p < 1 and mass >= needed:
            break
    return {token_id: probs[token_id] / mass for token_id in sorted(kept)}


def draw(logits: np.ndarray, draws: int = DRAWS, **settings: Any) -> np.ndarray:
    sampler = Sampler(SamplingParams(**settings), len(logits))
    return np.array([sampler.choose(logits, position).token_id for position in range(draws)])


def chi_square_p(tokens: np.ndarray, expected: dict[int, float]) -> float:
    """p-value of the draws under the expected distribution; cells below 5 expected draws are pooled."""
    assert set(tokens.tolist()) <= set(expected), "a token that the filters removed was drawn"
    counts = np.array([np.count_nonzero(tokens == token_id) for token_id in expected], dtype=np.float64)
    means = np.array(list(expected.values())) * len(tokens)
    small = means < 5
    observed = np.append(counts[~small], counts[small].sum())
    mean = np.append(means[~small], means[small].sum())
    keep = mean > 0
    return float(stats.chisquare(observed[keep], mean[keep] * (observed.sum() / mean.sum())).pvalue)


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_drawn_tokens_follow_the_filtered_distribution(filters: dict[str, Any]) -> None:
    logits = random_logits(60, spread=1.5)
    params = SamplingParams(seed=11, **filters)
    # Seeds are fixed, so this cannot fail by chance; 1e-3 says that the seed at hand is not an unlucky one.
    assert chi_square_p(draw(logits, seed=11, **filters), by_sorting(logits, params)) > 1e-3


@pytest.mark.parametrize("filters", FILTERS[2:])
def test_the_chi_square_test_notices_a_slightly_wrong_distribution(filters: dict[str, Any]) -> None:
    """Negative control: draws at a temperature 15 % off must fail the test above."""
    logits = random_logits(60, spread=1.5)
    wrong = filters | {"temperature": filters["temperature"] * 1.15}
    expected = by_sorting(logits, SamplingParams(**filters))
    tokens = draw(logits, seed=11, **wrong)
    tokens = tokens[np.isin(tokens, list(expected))]  # a wider nucleus would give itself away; that is not the point
    assert chi_square_p(tokens, expected) < 1e-5


def test_noise_at_neighbouring_positions_and_ids_is_independent() -> None:
    noise = NoiseSource(seed=3, size=4000)
    rows = np.stack([noise.gumbel(position, None) for position in range(20)])
    assert stats.kstest(rows.ravel(), "gumbel_r").pvalue > 1e-3
    correlations = np.corrcoef(rows)[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(4000)  # 190 pairs: 4.5 sigma is beyond chance
    assert abs(np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1]) < 4.5 / np.sqrt(80_000)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 50},
        {"top_k": 1},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.99},
        {"top_k": 40, "top_p": 0.7},
        {"top_k": 10_000},
        {},
    ],
)
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_filters_on_a_large_vocabulary_equal_a_full_sort(filters: dict[str, Any], spread: float) -> None:
    logits = random_logits(9001, spread)
    logits[::3] = logits[5]  # many ties
    params = SamplingParams(temperature=0.9, **filters)
    ids, probs = Sampler(params, len(logits)).distribution(logits)
    expected = by_sorting(logits, params)
    assert ids.tolist() == list(expected)
    # The nucleus is cut at the same token; weights differ in the last bits of float64.
    np.testing.assert_allclose(probs, list(expected.values()), rtol=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-4, 4), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.1, 3.0),
)
def test_filters_keep_at_least_one_token_and_probabilities_sum_to_one(
    logits: list[int], top_k: int, top_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    sampler = Sampler(params, len(logits))
    values = np.array(logits, dtype=np.float32)
    ids, probs = sampler.distribution(values)
    assert len(ids) >= 1
    assert probs.sum() == pytest.approx(1.0)
    choice = sampler.choose(values, 7, with_confidence=True)
    assert choice.confidence == pytest.approx(probs[ids.tolist().index(choice.token_id)])


def test_a_tiny_top_p_is_greedy_and_top_p_one_keeps_all() -> None:
    logits = random_logits(5000)
    tiny = Sampler(SamplingParams(temperature=1.0, top_p=1e-9), 5000)
    assert tiny.distribution(logits)[0].tolist() == [int(logits.argmax())]
    assert len(Sampler(SamplingParams(temperature=1.0, top_p=1.0), 5000).distribution(logits)[0]) == 5000


def test_a_nucleus_reached_exactly_takes_no_further_token() -> None:
    logits = np.zeros(4, dtype=np.float32)
    ids, probs = Sampler(SamplingParams(temperature=1.0, top_p=0.5), 4).distribution(logits)
    assert ids.tolist() == [0, 1]
    assert probs.tolist() == [0.5, 0.5]


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.array([1.0, 5.0, 5.0, 0.0, 5.0], dtype=np.float32)
    assert Sampler(SamplingParams(), 5).choose(logits, 0).token_id == 1
    assert Sampler(SamplingParams(temperature=1.0, top_k=1), 5).choose(logits, 0).token_id == 1
    assert Sampler(SamplingParams(temperature=1.0, top_k=2), 5).distribution(logits)[0].tolist() == [1, 2]


def test_a_tiny_temperature_with_huge_logits_is_greedy_and_does_not_overflow() -> None:
    logits = np.full(4000, -300.0, dtype=np.float32)
    logits[[17, 30]] = 300.0
    for temperature in (0.0, 1e-6, 2e-5):
        for filters in ({}, {"top_k": 50}, {"top_p": 0.9}):
            sampler = Sampler(SamplingParams(temperature=temperature, **filters), 4000)  # type: ignore[arg-type]
            with np.errstate(over="raise", invalid="raise", divide="raise"):
                choice = sampler.choose(logits, 3, with_confidence=True)
            assert choice.token_id in ((17,) if temperature <= 1e-5 else (17, 30))
            assert choice.confidence == pytest.approx(0.5) or choice.confidence == 1.0


def test_the_same_seed_and_position_give_the_same_token_whatever_came_before() -> None:
    logits = [random_logits(3000, 1.0, seed) for seed in range(80)]
    params = SamplingParams(temperature=1.0, top_k=50, seed=5)
    forward = Sampler(params, 3000)
    tokens = [forward.choose(row, position).token_id for position, row in enumerate(logits)]
    backward = Sampler(params, 3000)
    again = [backward.choose(logits[p], p).token_id for p in reversed(range(80))]
    assert tokens == again[::-1]
    other_seed = Sampler(SamplingParams(temperature=1.0, top_k=50, seed=6), 3000)
    assert tokens != [other_seed.choose(row, position).token_id for position, row in enumerate(logits)]


def test_a_torch_tensor_and_a_numpy_array_give_the_same_choice() -> None:
    logits = random_logits(5000)
    for params in (SamplingParams(), SamplingParams(temperature=0.8, top_k=50), SamplingParams(temperature=0.8)):
        sampler = Sampler(params, 5000)
        assert sampler.choose(torch.from_numpy(logits), 9) == sampler.choose(logits, 9)


def test_shared_noise_makes_two_similar_distributions_choose_alike() -> None:
    target = random_logits(500, 2.0, seed=1)
    draft = target + random_logits(500, 1.0, seed=2)
    params = SamplingParams(temperature=1.0, seed=1)
    shared = np.mean(draw(target, 4000, temperature=1.0, seed=1) == draw(draft, 4000, temperature=1.0, seed=1))
    apart = np.mean(draw(target, 4000, temperature=1.0, seed=1) == draw(draft, 4000, temperature=1.0, seed=2))
    overlap = np.minimum(softmax(target), softmax(draft)).sum()
    assert params.seed == 1
    assert shared > apart + 0.2
    # No coupling beats the overlap; sharing Gumbel noise is known to reach at least overlap / (2 - overlap).
    assert overlap / (2 - overlap) - 0.03 < shared < overlap + 0.03


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    logits = np.array([2.0, -1.0, 1.5, 0.5], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, repetition_penalty=2.0), 4)
    for history in ([0, 1, 1, 0, 0], np.array([0, 1]), torch.tensor([1, 0])):
        _, probs = sampler.distribution(logits, 0, history)
        np.testing.assert_allclose(probs, softmax(np.array([1.0, -2.0, 1.5, 0.5])), rtol=1e-9)
    assert logits.tolist() == [2.0, -1.0, 1.5, 0.5], "the caller's logits must stay as they are"
    greedy = Sampler(SamplingParams(repetition_penalty=2.0), 4)
    assert greedy.choose(logits, 0, [0]).token_id == 2
    assert greedy.choose(logits, 0, []).token_id == 0


def test_a_penalty_without_a_history_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Sampler(SamplingParams(repetition_penalty=1.1), 4).choose(np.zeros(4, dtype=np.float32), 0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 5.0, "top_k": 90}])
def test_padding_beyond_the_tokenizer_is_never_chosen(settings: dict[str, Any]) -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[90:] = 50.0
    logits[95] = np.nan  # nobody looks there
    sampler = Sampler(SamplingParams(repetition_penalty=1.5, **settings), 100, vocab_limit=90)
    assert all(sampler.choose(logits, position, [1, 93]).token_id < 90 for position in range(200))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_is_reported_with_token_and_position(value: float, temperature: float) -> None:
    logits = random_logits(50)
    logits[17] = value
    with pytest.raises(ModelError, match=r"token 17 at position 4"):
        Sampler(SamplingParams(temperature=temperature), 50).choose(logits, 4)


def test_greedy_confidence_is_the_softmax_probability_of_the_choice() -> None:
    logits = random_logits(5000)
    choice = Sampler(SamplingParams(), 5000).choose(logits, 0, with_confidence=True)
    # Relative 1e-5: the sum of 5000 exponentials is taken in float32 exponentials.
    assert choice.confidence == pytest.approx(softmax(logits).max(), rel=1e-5)
    assert Sampler(SamplingParams(), 5000).choose(logits, 0).confidence is None


def test_the_noise_cache_stays_small() -> None:
    noise = NoiseSource(seed=0, size=100)
    first = noise.gumbel(0, None)
    for position in range(500):
        noise.gumbel(position, None)
    assert len(noise._bits) <= 32
    assert np.array_equal(noise.gumbel(0, None), first)


def test_noise_does_not_depend_on_the_numpy_version() -> None:
    """A pinned value: a changed stream would change every sampled text of a seed."""
    bits = NoiseSource(seed=1, size=4)._bits_at(2)
    assert bits.tolist() == [3042142985, 1328497427, 564130602, 1533115363]


@pytest.mark.parametrize("filters", [{}, *FILTERS])
def test_the_first_of_the_ranked_is_the_chosen_and_confidence_falls(filters: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(**filters, seed=3), 4096)
    for position in range(40):
        logits = random_logits(4096, seed=position)
        history = list(range(position + 1))
        ranked = sampler.ranked(logits, position, history, 12)
        assert ranked[0].token_id == sampler.choose(logits, position, history).token_id
        confidences = [choice.confidence or 0.0 for choice in ranked]
        assert confidences == sorted(confidences, reverse=True) and sum(confidences) <= 1 + 1e-9
        assert len({choice.token_id for choice in ranked}) == len(ranked)


def test_ranked_confidence_without_noise_is_the_probability_and_ties_go_low() -> None:
    logits = random_logits(300)
    logits[[250, 7, 90]] = logits.max() + 1
    ranked = Sampler(SamplingParams(), 300).ranked(logits, 0, None, 5)
    assert [choice.token_id for choice in ranked[:3]] == [7, 90, 250]
    assert [c.confidence for c in ranked] == pytest.approx([softmax(logits)[c.token_id] for c in ranked], rel=1e-5)


def test_ranked_confidence_under_noise_is_how_often_a_target_with_gumbel_errors_agrees() -> None:
    logits = random_logits(50, spread=1.5)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), 50)
    rng, hits, stated = np.random.default_rng(0), 0.0, 0.0
    for position in range(4000):
        second = sampler.ranked(logits, position, None, 3)[1]
        target = (logits + rng.gumbel(size=50)).astype(np.float32)
        hits += sampler.choose(target, position).token_id == second.token_id
        stated += second.confidence or 0.0
    assert abs(hits - stated) < 4 * np.sqrt(4000 * 0.25)  # four standard deviations at most
    assert stated > 200
