"""The token at a position: one pure function of (logits, settings, seed, position).

Both the draft head and the target choose their tokens here, with the same noise at the same position. A drafted token
is kept if and only if it equals the target's choice, so nothing here knows about drafting, and what is emitted cannot
depend on it. The target's rule is the Gumbel-max trick: argmax(log p + noise) is distributed as p. "Same noise" instead
of the classic rejection rule is ours: it costs a few percent of matches and gives ids that equal plain decoding's.

Order of the filters: repetition penalty, temperature, top-k, top-p. Ties go to the lowest id everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from eesd_lite.errors import NotFiniteError
from eesd_lite.params import SamplingParams

Array: TypeAlias = np.ndarray  # float32 [V], int64 or float64 [kept]
_COLUMNS = 1024  # see _largest
_NOISE_POSITIONS = 32  # a draft and its verify use the same positions; 0.2 MB each at 50,000 ids
_TOP_P_STEPS = (64, 1024)  # how many tokens are looked at before a nucleus costs a full sort


class Choice(NamedTuple):
    """A chosen token and, if asked for, its probability among the tokens that the filters left."""

    token_id: int
    confidence: float | None


class Sampler:
    """Chooses tokens under one set of SamplingParams; holds nothing but a cache of noise."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, vocab_limit: int | None = None, noise: Noise | None = None
    ) -> None:
        """`vocab_limit`: rows from there on are padding that the tokenizer does not know; never chosen."""
        limit = vocab_size if vocab_limit is None else min(vocab_limit, vocab_size)
        assert limit > 0, (vocab_size, vocab_limit)
        self.params = params
        self.vocab_size = vocab_size
        self.vocab_limit = limit
        self.noise: Noise = NoiseSource(params.seed, limit) if noise is None else noise

    @property
    def needs_history(self) -> bool:
        """True when choose() must be given the ids before the position."""
        return self.params.repetition_penalty != 1.0

    def choose(
        self,
        logits: torch.Tensor | Array,  # [vocab]
        position: int,
        history: torch.Tensor | Array | Sequence[int] | None = None,
        *,
        with_confidence: bool = False,
    ) -> Choice:
        """The token at `position`; `history` holds the ids before it on its own path, in any order."""
        scores = self._scores(logits, position, history)
        if self.params.greedy:
            best = int(scores.argmax())
            return Choice(best, float(1.0 / _mass(scores, 1.0)) if with_confidence else None)
        ids = self._kept(scores)
        log_weights = _log_weights(scores, ids, self.params.temperature)
        winner = int((log_weights + self.noise.gumbel(position, ids)).argmax())
        token_id = winner if ids is None else int(ids[winner])
        if not with_confidence:
            return Choice(token_id, None)
        return Choice(token_id, float(np.exp(log_weights[winner]) / np.exp(log_weights).sum()))

    def ranked(
        self,
        logits: torch.Tensor | Array,  # [vocab]
        position: int,
        history: torch.Tensor | Array | Sequence[int] | None,
        count: int,
    ) -> list[Choice]:
        """The `count` likeliest to be chosen at `position`, by these logits; the first is what `choose` chooses.

        The confidence is the softmax of log p plus the position's noise: the probability of being the target's choice
        if its logits differ from these by independent Gumbel errors. Without noise that is p.
        """
        scores = self._scores(logits, position, history)
        if self.params.greedy:
            ids = _largest(scores, min(count, len(scores)))
            weights = np.exp(scores[ids].astype(np.float64) - float(scores[ids[0]])) / _mass(scores, 1.0)
            return [Choice(int(token), float(weight)) for token, weight in zip(ids, weights, strict=True)]
        kept = self._kept(scores)
        noisy = _log_weights(scores, kept, self.params.temperature) + self.noise.gumbel(position, kept)
        places = _largest(noisy, min(count, len(noisy)))
        weights = np.exp(noisy - noisy[places[0]])
        weights = weights[places] / weights.sum()
        tokens = places if kept is None else kept[places]
        return [Choice(int(token), float(weight)) for token, weight in zip(tokens, weights, strict=True)]

    def distribution(
        self,
        logits: torch.Tensor | Array,
        position: int = 0,
        history: torch.Tensor | Array | Sequence[int] | None = None,
    ) -> tuple[Array, Array]:
        """The ids that the filters leave, ascending, and their probabilities: what choose() draws from."""
        scores = self._scores(logits, position, history)
        if self.params.greedy:
            return np.array([scores.argmax()]), np.ones(1)
        ids = self._kept(scores)
        weights = np.exp(_log_weights(scores, ids, self.params.temperature))
        return np.arange(len(scores)) if ids is None else ids, weights / weights.sum()

    def _scores(
        self, logits: torch.Tensor | Array, position: int, history: torch.Tensor | Array | Sequence[int] | None
    ) -> Array:
        """Checked logits of the tokens that may be chosen, after the repetition penalty."""
        assert logits.shape == (self.vocab_size,), (logits.shape, self.vocab_size)
        if isinstance(logits, torch.Tensor):
            logits = logits.detach().to(device="cpu", dtype=torch.float32).numpy()
        scores = np.asarray(logits, dtype=np.float32)[: self.vocab_limit]
        if not (scores.min() > -math.inf and scores.max() < math.inf):  # written so that NaN fails too
            wrong = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise NotFiniteError(
                f"the model computed {scores[wrong]} as the logit of token {wrong} at position {position}"
            )
        return self._penalized(scores, history) if self.needs_history else scores

    def _penalized(self, scores: Array, history: torch.Tensor | Array | Sequence[int] | None) -> Array:
        """Makes ids of the history less likely, once however often they occur (the CTRL paper's rule)."""
        assert history is not None, "a repetition penalty needs the ids before the position"
        if isinstance(history, torch.Tensor):
            history = history.cpu().numpy()
        ids = np.asarray(history, dtype=np.int64)
        ids = ids[ids < self.vocab_limit]
        penalty = np.float32(self.params.repetition_penalty)
        old = scores[ids]
        scores = scores.copy()  # the caller's logits stay as they are
        scores[ids] = np.where(old < 0, old * penalty, old / penalty)
        return scores

    def _kept(self, scores: Array) -> Array | None:
        """Ids that top-k and top-p leave, ascending; None for all."""
        top_k, top_p, temperature = self.params.top_k, self.params.top_p, self.params.temperature
        all_kept = top_k == 0 or top_k >= len(scores)
        if all_kept and top_p == 1.0:
            return None
        if not all_kept:
            ids = _largest(scores, top_k)
            if top_p < 1.0:
                weights = np.exp(_log_weights(scores, ids, temperature))
                ids = ids[: _nucleus(weights, top_p * weights.sum())]
            return np.sort(ids)
        needed = top_p * _mass(scores, temperature)
        for count in (*_TOP_P_STEPS, len(scores)):
            ids = _largest(scores, min(count, len(scores)))
            kept = _nucleus(np.exp(_log_weights(scores, ids, temperature)), needed)
            if kept < len(ids):
                break
        return np.sort(ids[:kept])


class SubsetSampler:
    """Chooses among some ids, as if there were no others, each under the noise that it has among all of them.

    Logits come for these ids only, in their order. Confidences are probabilities among these ids.
    """

    def __init__(self, sampler: Sampler, ids: Array) -> None:
        """`ids` int64 [N], ascending."""
        assert len(ids) and ids[-1] < sampler.vocab_limit, (len(ids), sampler.vocab_limit)
        self._ids = ids
        self._sampler = Sampler(sampler.params, len(ids), noise=_NoiseOf(sampler.noise, ids))

    def choose(
        self,
        logits: torch.Tensor | Array,  # [N]
        position: int,
        history: Sequence[int],
        *,
        with_confidence: bool = False,
    ) -> Choice:
        """As `Sampler.choose`; token and history are ids of the whole vocabulary."""
        return self._named(
            self._sampler.choose(logits, position, self._places(history), with_confidence=with_confidence)
        )

    def ranked(self, logits: torch.Tensor | Array, position: int, history: Sequence[int], count: int) -> list[Choice]:
        """As `Sampler.ranked`."""
        return [self._named(choice) for choice in self._sampler.ranked(logits, position, self._places(history), count)]

    def _named(self, choice: Choice) -> Choice:
        return Choice(int(self._ids[choice.token_id]), choice.confidence)

    def _places(self, history: Sequence[int]) -> Array | None:
        """Where the ids before a position stand among ours; the others cannot be made less likely."""
        if not self._sampler.needs_history:
            return None
        return np.flatnonzero(np.isin(self._ids, np.asarray(history, dtype=np.int64)))


class Noise(Protocol):
    """Noise by position and id."""

    def gumbel(self, position: int, ids: Array | None) -> Array:
        """Noise of the given ids, or of all, in float64."""
        ...


class _NoiseOf:
    """The noise of some ids, by their places."""

    def __init__(self, noise: Noise, ids: Array) -> None:
        self._noise, self._ids = noise, ids

    def gumbel(self, position: int, ids: Array | None) -> Array:
        return self._noise.gumbel(position, self._ids if ids is None else self._ids[ids])


class NoiseSource:
    """Gumbel noise keyed by (seed, position, id): the same key always gives the same noise."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        self._size = size
        self._bits: dict[int, Array] = {}

    def gumbel(self, position: int, ids: Array | None) -> Array:
        """Noise of the given ids, or of all, in float64."""
        bits = self._bits_at(position)
        # The middle of each of 2**32 cells: neither 0 nor 1, whose logarithms would not do.
        uniform = ((bits if ids is None else bits[ids]) + 0.5) * 2.0**-32
        return -np.log(-np.log(uniform))

    def _bits_at(self, position: int) -> Array:
        bits = self._bits.get(position)
        if bits is None:
            if len(self._bits) >= _NOISE_POSITIONS:
                del self._bits[next(iter(self._bits))]  # the oldest: positions come in rising order
            # Raw Philox output, because numpy promises a bit generator's stream, but not a distribution's, for ever.
            generator = np.random.Philox(key=np.array([self._seed, position], dtype=np.uint64))
            bits = generator.random_raw((self._size + 1) // 2).view(np.uint32)
            self._bits[position] = bits
        return bits[: self._size]


def _mass(scores: Array, temperature: float) -> float:
    """Sum of exp((score - largest) / temperature) over all tokens; in float32, good to about 1e-6 of itself."""
    shifted = scores - scores.max()
    if temperature != 1.0:
        shifted /= np.float32(temperature)
    return float(np.exp(shifted, out=shifted).sum(dtype=np.float64))


def _log_weights(scores: Array, ids: Array | None, temperature: float) -> Array:
    """log p up to a constant, in float64: dividing by a small temperature in float32 would make ties."""
    chosen = scores if ids is None else scores[ids]
    return (chosen.astype(np.float64) - float(chosen.max())) / temperature


def _nucleus(weights: Array, needed: float) -> int:
    """How many of the descending weights it takes to reach the needed mass: at least one."""
    return min(int(np.searchsorted(np.cumsum(weights), needed)) + 1, len(weights))


def _largest(scores: Array, count: int) -> Array:
    """Ids of the `count` largest scores, descending, ties by id; without sorting the vocabulary.

    The count-th largest of the column maxima is at most the count-th largest score, so few scores are above it and only
    those are sorted. That takes a third of the time of a top-k over the vocabulary.
    """
    candidates = np.arange(len(scores))
    rows = len(scores) // _COLUMNS
    if count <= _COLUMNS // 4 and rows >= 4:
        maxima = scores[: rows * _COLUMNS].reshape(rows, _COLUMNS).max(axis=0)
        candidates = np.flatnonzero(scores >= np.partition(maxima, -count)[-count])
    elif count < len(scores):
        candidates = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    order = np.argsort(-scores[candidates], kind="stable")  # stable: among equals the lowest id comes first
    return candidates[order[:count]]
