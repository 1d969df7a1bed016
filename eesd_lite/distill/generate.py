"""Training text that the target writes itself, with its hidden states kept on the way.

The chat template up to the start of a user turn is all that is given: the model samples a question, closes the turn,
answers, asks again. Many conversations run in lock-step, one token each per pass, so the states that a head learns
from (entering each exit layer, and after the last) cost nothing beyond storing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from eesd_lite.distill.teacher import DenseTarget, open_writer
from eesd_lite.errors import PromptError
from eesd_lite.progress import Progress, no_progress

TOP_K = 50
TEMPERATURE = 0.8
MAX_QUESTION_TOKENS = 96
LARGEST_BATCH = 256  # conversations in lock-step; more would not make matrix products any faster


@dataclass(frozen=True)
class Scaffold:
    """Ids of the chat template around the contents: `opening` user `to_answer` assistant `to_question` user ..."""

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_question: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


def chat_scaffold(folder: Path, eos_token_ids: Sequence[int]) -> Scaffold:
    """Read the scaffold off the model's own template by rendering three marked messages."""
    from transformers import AutoTokenizer  # heavy, and only needed here

    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = ["QUESTIONMARKERONE", "ANSWERMARKERONE", "QUESTIONMARKERTWO"]
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    if tokenizer.chat_template is None:
        raise PromptError(f"{folder}: no chat template, so the model cannot write its own text; give --data FILE.jsonl")
    rest = str(tokenizer.apply_chat_template(messages, tokenize=False))
    parts = []
    for mark in marks:
        if mark not in rest:
            raise PromptError(f"{folder}: the chat template does not show message contents as they are; give --data")
        before, rest = rest.split(mark, 1)
        parts.append(tuple(tokenizer.encode(before, add_special_tokens=False)))
    return Scaffold(parts[0], parts[1], parts[2], tuple(eos_token_ids))


@dataclass
class _Conversation:
    """One sequence of the batch: whose turn it is, what the template forces next, how long the turn is."""

    scaffold: Scaffold
    asking: bool = True
    turn_tokens: int = 0
    forced: list[int] = field(default_factory=list)

    def next(self, sampled: int) -> int:
        """The token that really comes next, given what the model would like to say."""
        if self.forced:
            return self.forced.pop(0)
        self.turn_tokens += 1
        ended = sampled in self.scaffold.eos_token_ids
        if not ended and not (self.asking and self.turn_tokens >= MAX_QUESTION_TOKENS):
            return sampled
        bridge = self.scaffold.to_answer if self.asking else self.scaffold.to_question
        self.asking, self.turn_tokens = not self.asking, 0
        if ended and bridge and bridge[0] in self.scaffold.eos_token_ids:
            sampled = bridge[0]  # the end that the template itself writes
            self.forced = list(bridge[1:])
            return sampled
        self.forced = list(bridge[1:])
        return bridge[0] if bridge else sampled


def _sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> list[int]:
    """Top-k sampling per row; temperature 0 takes the best. logits [batch, vocab], temperatures [batch]."""
    values, ids = torch.topk(logits.to(torch.float32), TOP_K, dim=-1)
    probs = torch.softmax(values / temperatures.clamp(min=1e-4)[:, None], dim=-1)
    picks = torch.multinomial(probs, 1, generator=generator)
    return ids.gather(1, picks)[:, 0].tolist()


@dataclass(frozen=True)
class Batch:
    """Tokens [batch, seq] with the states of every position."""

    tokens: Tensor
    states: dict[int, Tensor]
    final: Tensor


def write_conversations(
    target: DenseTarget,
    scaffold: Scaffold,
    *,
    batch: int,
    length: int,
    seed: int,
    answer_temperature: float = TEMPERATURE,
    exit_layers: Sequence[int] = (),
    keep_states: bool = True,
    progress: Progress = no_progress,
) -> Batch:
    """`batch` conversations of exactly `length` tokens, sampled in lock-step with `seed`."""
    generator = torch.Generator().manual_seed(seed)
    conversations = [_Conversation(scaffold) for _ in range(batch)]
    tokens = torch.empty(batch, length, dtype=torch.int64)
    opening = torch.tensor(scaffold.opening)
    tokens[:, : len(opening)] = opening
    hidden_size = target.config.hidden_size
    store = {n: torch.empty(batch, length, hidden_size, dtype=target.dtype) for n in exit_layers if keep_states}
    finals = torch.empty(batch, length if keep_states else 0, hidden_size, dtype=target.dtype)
    kv = target.new_kv(batch, length)
    start, width = 0, len(opening)
    while True:
        states, final = target.forward(tokens[:, start : start + width], kv=kv, start=start, exit_layers=exit_layers)
        if keep_states:
            finals[:, start : start + width] = final
            for n, kept in store.items():
                kept[:, start : start + width] = states[n]
        start, width = start + width, 1
        progress("the target writes its training text, token", start, length)
        if start == length:
            return Batch(tokens, store, finals)
        # Questions stay at the sampling temperature: greedy questions would all be the same.
        temperatures = torch.tensor([TEMPERATURE if c.asking else answer_temperature for c in conversations])
        sampled = _sample(target.logits(final[:, -1]), temperatures, generator)
        tokens[:, start] = torch.tensor([c.next(token) for c, token in zip(conversations, sampled, strict=True)])


def batches(
    target: DenseTarget, scaffold: Scaffold, *, tokens: int, batch: int, length: int, seed: int,
    exit_layers: Sequence[int], skip: int, progress: Progress,
) -> Iterator[Batch]:  # fmt: skip
    """Batches until `tokens` are reached, the first `skip` left out; every fourth answers greedily."""
    count = -(-tokens // (batch * length))

    def report(number: int) -> Progress:
        return lambda stage, done, total: progress(stage, number * total + done, count * total)

    for number in range(skip, count):
        greedy = number % 4 == 2 and number != count - 1  # the last batch is held out: sampled text only
        yield write_conversations(
            target, scaffold, batch=batch, length=length, seed=seed * 1_000_003 + number,
            answer_temperature=0.0 if greedy else TEMPERATURE, exit_layers=exit_layers,
            progress=report(number),
        )  # fmt: skip


def generate_cache(
    folder: Path,
    out_dir: Path,
    *,
    exit_layers: Sequence[int],
    tokens: int,
    seed: int,
    length: int = 384,
    quantize: str | None = None,
    weights: str | None = None,
    progress: Progress = no_progress,
) -> None:
    """Write a state cache of about `tokens` positions; a cache that a kill left behind is continued, batch by batch."""
    batch = min(LARGEST_BATCH, max(1, -(-tokens // length)))
    target = DenseTarget(folder, context=length, quantize=quantize, weights=weights)
    scaffold = chat_scaffold(folder, target.config.eos_token_ids)
    with open_writer(out_dir, target, exit_layers, weights) as writer:
        skip = writer.meta.sequences // batch
        for written in batches(
            target, scaffold, tokens=tokens, batch=batch, length=length, seed=seed, exit_layers=exit_layers,
            skip=skip, progress=progress,
        ):  # fmt: skip
            states = {n: kept.flatten(0, 1) for n, kept in written.states.items()}
            writer.append(written.tokens.tolist(), states, written.final.flatten(0, 1))
