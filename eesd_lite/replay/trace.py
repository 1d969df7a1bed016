"""A trace: for every position of plainly decoded answers, what the exit head would draft there and how far it is right.

One .npz file without pickles: ids of prompts and answers, and per position the drafted chain, its confidences and how
many of its tokens are the target's own. What an n-gram look-up would draft follows from the ids, so it is not stored.
Written by `record`, read by `player`; needs numpy, not torch.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from eesd_lite.acceptance import Belief
from eesd_lite.errors import TraceError
from eesd_lite.head_prior import NO_PRIOR, read_prior

FORMAT = "eesd-trace-1"
CONFIDENCE_STEPS = 65535  # confidences are stored in steps of 1 / 65535
Array: TypeAlias = np.ndarray


@dataclass(frozen=True)
class Position:
    """The current token is answer[index]; `tokens` would follow it, the first `accepted` of them rightly."""

    index: int
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    accepted: int


@dataclass(frozen=True)
class Answer:
    """One plainly decoded answer; positions 0 .. len(answer) - 2, since its last token needs no round."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    positions: tuple[Position, ...]

    def __post_init__(self) -> None:
        assert len(self.positions) == max(0, len(self.answer) - 1), (len(self.positions), len(self.answer))


@dataclass(frozen=True)
class Trace:
    """`about`: model, exit_layer, sampling, k_max, the seconds of a step as measured while recording, and `acceptance`,
    what the head's file says of it, if it does."""

    about: dict[str, Any]
    answers: tuple[Answer, ...]

    @property
    def k_max(self) -> int:
        return int(self.about["k_max"])

    @property
    def belief(self) -> Belief:
        """What an engine would believe of the head at first."""
        stored = self.about.get("acceptance")
        prior = NO_PRIOR if stored is None else read_prior(json.dumps(stored))
        return prior.at(float(self.about["params"]["temperature"]))

    def save(self, path: Path) -> None:
        """Write the file."""
        write_arrays(path, self.arrays())

    def arrays(self) -> dict[str, Array]:
        """What the file holds; drafted chains are padded to k_max."""
        positions = [position for answer in self.answers for position in answer.positions]
        tokens = np.zeros((len(positions), self.k_max), dtype=np.int32)
        stated = np.zeros((len(positions), self.k_max), dtype=np.uint16)
        for row, position in enumerate(positions):
            tokens[row, : len(position.tokens)] = position.tokens
            stated[row, : len(position.tokens)] = np.rint(np.array(position.confidences) * CONFIDENCE_STEPS)
        return {
            "about": np.frombuffer(json.dumps({"format": FORMAT, **self.about}).encode(), dtype=np.uint8),
            "prompt_lengths": np.array([len(answer.prompt) for answer in self.answers], dtype=np.int32),
            "answer_lengths": np.array([len(answer.answer) for answer in self.answers], dtype=np.int32),
            "prompts": np.array([t for answer in self.answers for t in answer.prompt], dtype=np.int32),
            "answers": np.array([t for answer in self.answers for t in answer.answer], dtype=np.int32),
            "drafted": np.array([len(position.tokens) for position in positions], dtype=np.uint8),
            "accepted": np.array([position.accepted for position in positions], dtype=np.uint8),
            "tokens": tokens,
            "confidences": stated,
        }

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a file; TraceError for anything that is not a whole trace."""
        return read_arrays(path, cls.of_arrays)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Array]) -> Trace:
        """What `arrays` made; ValueError and the like for anything else."""
        about = json.loads(arrays["about"].tobytes())
        if about.pop("format", None) != FORMAT:
            raise TraceError(f"not a trace of this version ({FORMAT}); record it again with `eesd trace`")
        trace = cls(about, _answers(arrays))
        _ = trace.belief  # refuses what is damaged
        return trace


Made = TypeVar("Made")


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """One compressed .npz file."""
    with path.open("wb") as file:  # a path would get ".npz" appended where it lacks it
        np.savez_compressed(file, **dict(arrays))  # type: ignore[arg-type]


def read_arrays(path: Path, make: Callable[[Mapping[str, Array]], Made]) -> Made:
    """What `make` makes of a file's arrays; TraceError in one line for anything that it cannot use."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return make({name: file[name] for name in file.files})
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or 'not a trace file'}; `eesd trace` records one") from None
    except (
        KeyError, ValueError, TypeError, IndexError, AssertionError, AttributeError, RecursionError,
        zipfile.BadZipFile, EOFError,
    ):  # fmt: skip
        raise TraceError(f"{path}: not a trace, or damaged; `eesd trace` records one") from None


def _answers(arrays: Mapping[str, Array]) -> tuple[Answer, ...]:
    prompts = _split(arrays["prompts"], arrays["prompt_lengths"])
    texts = _split(arrays["answers"], arrays["answer_lengths"])
    rows = iter(zip(arrays["drafted"].tolist(), arrays["accepted"].tolist(), strict=True))
    tokens, stated = arrays["tokens"].tolist(), (arrays["confidences"] / CONFIDENCE_STEPS).tolist()
    found, row = [], 0
    for prompt, text in zip(prompts, texts, strict=True):
        positions = []
        for index in range(max(0, len(text) - 1)):
            drafted, accepted = next(rows)
            if not 0 <= accepted <= drafted <= len(tokens[row]):
                raise ValueError(f"row {row}: {accepted} of {drafted} accepted")
            positions.append(Position(index, tuple(tokens[row][:drafted]), tuple(stated[row][:drafted]), accepted))
            row += 1
        found.append(Answer(prompt, text, tuple(positions)))
    if row != len(tokens):
        raise ValueError(f"{len(tokens)} positions, {row} expected")
    return tuple(found)


def _split(flat: Array, lengths: Array) -> list[tuple[int, ...]]:
    ends = np.cumsum(lengths)
    if len(ends) and ends[-1] != len(flat):
        raise ValueError(f"{len(flat)} ids, {ends[-1]} expected")
    return [tuple(part.tolist()) for part in np.split(flat, ends[:-1])] if len(ends) else []
