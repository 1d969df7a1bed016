"""Trials of exit heads on one state cache, each with the same CPU time (docs/heads.md).

states DIR: text of the demo model's own, with the states of all layers that the trials read.
run DIR NAME [NAME ...]: train and judge, one JSON line each; NAME is one of TRIALS, NAME@SEED repeats it with another
seed. Time is CPU time of this process, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eesd_lite.config import ModelConfig
from eesd_lite.distill.generate import Scaffold, batches, chat_scaffold
from eesd_lite.distill.head_module import ExitHead, Packing
from eesd_lite.distill.optimizer import HeadOptimizer, learning_rate
from eesd_lite.distill.report import normalized
from eesd_lite.distill.ridge import TargetParts, batches_of, split
from eesd_lite.distill.run import target_parts
from eesd_lite.distill.settings import TrainSettings
from eesd_lite.distill.state_cache import StateCache
from eesd_lite.distill.teacher import DenseTarget, open_writer
from eesd_lite.distill.train import batch_stream, windows_of
from eesd_lite.head_file import load_head
from eesd_lite.prepare import fetch
from eesd_lite.progress import no_progress
from models import find_recipe

MODEL, LAYERS, LENGTH, BATCH = "smollm2-135m", (5, 6, 10, 15, 20), 256, 128
HELD_OUT = 0.06  # of the sequences
RIDGE_TOKENS = 65_536
CHUNK = 170  # positions whose logits over the whole vocabulary exist at a time
TOKEN = 0  # among the fused inputs: the token's own embedding, which is what enters layer 0
PREVIOUS = -1  # among the fused inputs: the target's final state one position earlier


@dataclass(frozen=True)
class Trial:
    """What differs from the plain recipe."""

    exits: tuple[int, ...] = (10,)  # more than one: the head serves them in turn, starting from the first one's layer
    loss: str = "kl"
    share: float = 0.1  # of the positions whose logits are compared
    fuse: tuple[int, ...] = ()  # states of these layers are added to the head's input and to the affine map's
    two: bool = False  # two decoder layers, N and N + 1
    onward: bool = False  # from the shipped head; what it lacks starts with zeros
    rate: float = 1e-3
    seed: int = 0


TRIALS = {
    "plain": Trial(),
    "log-tv": Trial(loss="log-tv"),
    "argmax": Trial(loss="argmax"),
    "kl+argmax": Trial(loss="kl+argmax"),
    "cover4": Trial(loss="cover4"),
    "share-0.25": Trial(share=0.25),
    "fuse-5": Trial(fuse=(5,)),
    "fuse-0": Trial(fuse=(TOKEN,)),
    "previous": Trial(fuse=(PREVIOUS,)),
    "two-layers": Trial(two=True),
    "exits-10-15": Trial(exits=(10, 15)),
    "onward": Trial(onward=True, rate=3e-4),
    "onward-fuse-0": Trial(onward=True, rate=3e-4, fuse=(TOKEN,)),
    "onward-fuse-5": Trial(onward=True, rate=3e-4, fuse=(5,)),
    "onward-kl+argmax": Trial(onward=True, rate=3e-4, loss="kl+argmax"),
    "plain-15": Trial(exits=(15,)),
}


class TrialHead(ExitHead):
    """An exit head whose input and affine map may also see states of other layers, and which may have two layers."""

    def __init__(self, parts: TargetParts, exit_layer: int, trial: Trial) -> None:
        reach = parts.reaches[exit_layer]
        super().__init__(parts.shape, reach, eps=parts.rms_norm_eps, compute=torch.bfloat16)
        width = parts.shape.hidden_size
        extra = width * len(trial.fuse)
        self.mix = nn.Linear(extra, width, bias=False) if extra else None
        self.skip = nn.Linear(extra, width, bias=False) if extra else None
        self.second = (
            ExitHead(parts.shape, reach, eps=parts.rms_norm_eps, compute=torch.bfloat16) if trial.two else None
        )

    def features(self, states: Tensor, packing: Packing) -> Tensor:
        """[tokens, H (1 + fused)] states -> what the affine map sees: the layer's output, then the fused states."""
        width = self.shape.hidden_size
        own, fused = states[:, :width], states[:, width:]
        if self.mix is not None:
            own = own.float() + self._product(fused, self.mix)
        last = self.run_layer(own, packing)
        if self.second is not None:
            last = self.second.run_layer(last, packing)
        return torch.cat((last, fused.float()), dim=1) if fused.shape[1] else last

    def forward(self, states: Tensor, positions: Tensor, to_grid: Tensor, from_grid: Tensor) -> Tensor:
        features = self.features(states, Packing(positions, to_grid, from_grid))
        width = self.shape.hidden_size
        mapped = self._product(features[:, :width], self.affine).float()
        if self.skip is not None:
            mapped = mapped + self._product(features[:, width:], self.skip).float()
        return self._norm(mapped, self.norm)


@dataclass(frozen=True)
class Data:
    """A state cache, what is trained on and what judges, and which positions a head is asked at when it answers."""

    cache: StateCache
    training: range
    held_out: range
    answers: Tensor  # [tokens] bool: the next token belongs to an answer
    parts: TargetParts

    def rows(self, exit_layer: int, fuse: tuple[int, ...], first: int, last: int) -> Tensor:
        """[rows, H (1 + fused)] of one sequence, or of a window of it."""
        found = [self.cache.states(exit_layer, first, last)]
        for layer in fuse:
            if layer == PREVIOUS:
                final = self.cache.final(first, last).float()
                shifted = torch.cat((torch.zeros(1, final.shape[1]), final[:-1]))
                scale = shifted.pow(2).mean(1, keepdim=True).add(1e-6).rsqrt()
                found.append(shifted * scale)
            elif layer == TOKEN:  # the demo model's lm_head is its embedding
                found.append(self.parts.lm_head[torch.from_numpy(self.cache.tokens[first:last].astype("int64"))])
            else:
                found.append(self.cache.states(layer, first, last))
        return torch.cat([rows.to(torch.bfloat16) for rows in found], dim=1)

    def batch(self, exit_layer: int, fuse: tuple[int, ...], windows: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """(input of the head, the target's normalized states), windows end to end."""
        states = torch.cat([self.rows(exit_layer, fuse, at, at + n) for at, n in windows])
        final = torch.cat([self.cache.final(at, at + n) for at, n in windows])
        return states, normalized(final, self.parts.norm, self.parts.rms_norm_eps)


def open_data(folder: Path, exits: tuple[int, ...]) -> Data:
    cache, model = StateCache(folder), fetch(MODEL)
    config = ModelConfig.from_folder(model)
    layers = tuple(sorted({layer for n in exits for layer in (n, n + 1)}))
    parts = target_parts(model, config, layers, longest=int(cache.lengths.max()))
    training, held_out = split(cache, HELD_OUT)
    scaffold = chat_scaffold(model, config.eos_token_ids)
    return Data(cache, training, held_out, answer_positions(cache, scaffold), parts)


def answer_positions(cache: StateCache, scaffold: Scaffold) -> Tensor:
    """Positions between the bridge to an answer and its end, the last token of the bridge included."""
    inside, found = False, []
    bridge, recent = list(scaffold.to_answer), [0] * len(scaffold.to_answer)
    starts = {int(start) for start in cache.starts}
    for at, token in enumerate(cache.tokens.tolist()):
        recent = [*recent[1:], token]
        inside = (inside and at not in starts and token not in scaffold.eos_token_ids) or recent == bridge
        found.append(inside)
    return torch.tensor(found)


def loss_gradient(draft: Tensor, target_logits: Tensor, kind: str) -> Tensor:
    """Derivative of a loss by the head's logits [rows, V] (bfloat16 in, float32 inside): minus what raises it."""
    draft_probs, target_probs = draft.float().softmax(-1), target_logits.float().softmax(-1)
    if kind == "kl":
        return draft_probs - target_probs
    if kind == "log-tv":  # minus the logarithm of the overlap, whose own derivative vanishes far from the target
        below = (draft_probs < target_probs).float()
        held = (below * draft_probs).sum(-1, keepdim=True)
        return draft_probs * (held - below) / torch.minimum(draft_probs, target_probs).sum(-1, keepdim=True)
    best = target_logits.argmax(-1, keepdim=True)
    if kind == "argmax":
        return draft_probs.scatter_add(1, best, -torch.ones_like(best, dtype=torch.float32))
    if kind == "kl+argmax":
        return (2 * draft_probs - target_probs).scatter_add(1, best, -torch.ones_like(best, dtype=torch.float32)) / 2
    assert kind == "cover4", kind
    # softplus(fourth best logit - logit of the target's choice) beside the KL
    fourth = draft.float().topk(4, dim=-1)
    miss = torch.sigmoid(fourth.values[:, 3:] - draft.float().gather(1, best))
    return (draft_probs - target_probs).scatter_add(1, best, -miss).scatter_add(1, fourth.indices[:, 3:], miss)


@torch.no_grad()
def gradient_at(ours: Tensor, theirs: Tensor, lm_head: Tensor, kind: str) -> Tensor:
    """The loss's derivative by the head's normalized states [rows, H]."""
    pieces = []
    for mine, wanted in zip(ours.split(CHUNK), theirs.split(CHUNK), strict=True):
        logits, target = mine.to(lm_head.dtype) @ lm_head.T, wanted.to(lm_head.dtype) @ lm_head.T
        pieces.append((loss_gradient(logits, target, kind).to(lm_head.dtype) @ lm_head).float())
    return torch.cat(pieces)


@torch.no_grad()
def closed_form(head: TrialHead, data: Data, trial: Trial) -> None:
    """Ridge regression of the target's final state on all that the affine map sees."""
    width = data.parts.shape.hidden_size
    size = width * (1 + len(trial.fuse)) + 1
    gram, cross = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, width, dtype=torch.float64)
    limit = int((data.cache.starts[1:] <= RIDGE_TOKENS).sum())
    exit_layer = trial.exits[0]
    for batch in batches_of(data.cache, range(min(limit, data.training.stop)), 4096):
        windows = [(int(data.cache.starts[s]), int(data.cache.lengths[s])) for s in batch]
        packing = Packing.of([n for _, n in windows])
        states, _ = data.batch(exit_layer, trial.fuse, windows)
        final = torch.cat([data.cache.final(at, at + n) for at, n in windows]).float()
        keep = packing.positions > 0  # the first state is far larger than all others
        x = torch.cat((head.features(states, packing), torch.ones(len(states), 1)), dim=1)[keep]
        gram += (x.T @ x).double()
        cross += (x.T @ final[keep]).double()
    diagonal = gram.diagonal().clone()
    diagonal[-1] = 0.0  # the bias is not penalized; features of unlike size each by their own
    solution = torch.linalg.solve(gram + torch.diag(1e-4 * diagonal), cross).T.float()
    head.affine.weight.copy_(solution[:, :width])
    head.affine.bias.copy_(solution[:, -1])
    if head.skip is not None:
        head.skip.weight.copy_(solution[:, width:-1])


def new_head(data: Data, trial: Trial) -> TrialHead:
    exit_layer, parts = trial.exits[0], data.parts
    head = TrialHead(parts, exit_layer, trial)
    names = parts.shape.layer_shapes()
    for layer, place in [(exit_layer, head.layer), (exit_layer + 1, head.second.layer if head.second else None)]:
        if place is not None:
            place.load_state_dict({name: parts.layers[layer][name].float() for name in names})
    with torch.no_grad():
        head.norm.weight.copy_(parts.norm)
        if head.mix is not None:
            head.mix.weight.zero_()
    if trial.onward:
        path = find_recipe(MODEL).head(exit_layer)
        assert path is not None, exit_layer
        shipped = load_head(path, ModelConfig.from_folder(fetch(MODEL)))
        head.load_state_dict({name: tensor.float() for name, tensor in shipped.tensors.items()}, strict=False)
        if head.skip is not None:
            nn.init.zeros_(head.skip.weight)
    else:
        closed_form(head, data, trial)
    return head


@torch.no_grad()
def judge(head: TrialHead, data: Data, exit_layer: int, trial: Trial) -> dict[str, float]:
    """Held-out agreement, overlap, and the share of the target's choices among the head's first four; in answers."""
    lm_head = data.parts.lm_head.float()
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for sequence in data.held_out:
        first, last = int(data.cache.starts[sequence]), int(data.cache.starts[sequence + 1])
        packing = Packing.of([last - first])
        states, theirs = data.batch(exit_layer, trial.fuse, [(first, last - first)])
        ours = head(states, packing.positions, packing.to_grid, packing.from_grid)
        rows = data.answers[first:last].nonzero().squeeze(1)
        for chunk in rows.split(CHUNK):
            target, draft = theirs[chunk] @ lm_head.T, ours[chunk] @ lm_head.T
            best, four = target.argmax(-1, keepdim=True), draft.topk(4, dim=-1).indices
            shared = torch.minimum(target.softmax(-1), draft.softmax(-1)).sum()
            sums += torch.stack(((four[:, :1] == best).sum(), shared, (four == best).sum())).double()
            count += len(chunk)
    agreement, overlap, cover = (sums / max(count, 1)).tolist()
    return {"agreement": round(agreement, 4), "overlap": round(overlap, 4), "first4": round(cover, 4), "rows": count}


def train(
    head: TrialHead, data: Data, trial: Trial, *, seconds: float, points: int = 0
) -> Iterator[tuple[int, int, float]]:
    """Train for so many seconds of CPU time; yields (steps, positions, seconds) `points` times and at the end."""
    settings = TrainSettings(learning_rate=trial.rate)
    optimizer = HeadOptimizer(head, "adamw", weight_decay=settings.weight_decay)
    lm_head = data.parts.lm_head.to(torch.bfloat16)
    stream = batch_stream(
        windows_of(data.cache, data.training, 512), batch_tokens=settings.batch_tokens, seed=trial.seed
    )
    step, total, tokens, used, mark = 0, 0, 0, 0.0, 0.0
    while not total or step < total:
        begun = time.process_time()
        windows = next(stream)
        packing = Packing.of([n for _, n in windows])
        states, theirs = data.batch(trial.exits[step % len(trial.exits)], trial.fuse, windows)
        ours = head(states, packing.positions, packing.to_grid, packing.from_grid)
        loss = F.smooth_l1_loss(ours, theirs)
        generator = torch.Generator().manual_seed(trial.seed * 1_000_003 + step)
        picked = torch.randperm(len(ours), generator=generator)[: round(trial.share * len(ours))]
        gradient = gradient_at(ours.detach()[picked], theirs[picked], lm_head, trial.loss)
        loss = loss + (ours[picked] * gradient).sum() / len(picked)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), settings.clip)
        optimizer.step(learning_rate(step, total, settings))
        step, tokens, used = step + 1, tokens + len(ours), used + time.process_time() - begun
        if step == 2:
            mark = used
        if step == 12:
            total = max(step + 1, step + int((seconds - used) / ((used - mark) / 10)))
        if points and total and step < total and step % max(1, total // points) == 0:
            yield step, tokens, used
    yield step, tokens, used


def run(folder: Path, names: list[str], seconds: float, points: int) -> None:
    starts: dict[object, dict[str, Tensor]] = {}
    for name in names:
        kind, _, seed = name.partition("@")
        trial = replace(TRIALS[kind], seed=int(seed or 0))
        data = open_data(folder, trial.exits)
        start = (trial.exits[0], trial.fuse, trial.two, trial.onward)
        if start in starts:
            head = TrialHead(data.parts, trial.exits[0], trial)
            head.load_state_dict(starts[start])
        else:
            head = new_head(data, trial)
            starts[start] = {key: tensor.clone() for key, tensor in head.state_dict().items()}
            report(head, data, trial, trial=name, steps=0)
        for steps, positions, used in train(head, data, trial, seconds=seconds, points=points):
            report(head, data, trial, trial=name, steps=steps, positions=positions, seconds=round(used, 1))


def report(head: TrialHead, data: Data, kind: Trial, **line: object) -> None:
    for n in kind.exits:
        print(json.dumps(line | {"exit": n} | judge(head, data, n, kind)), flush=True)


def write_states(folder: Path, tokens: int, seed: int) -> None:
    """Conversations shorter than those of `eesd train`, since beginnings are the hard part; continued when killed."""
    model = fetch(MODEL)
    target = DenseTarget(model, context=LENGTH)
    scaffold = chat_scaffold(model, target.config.eos_token_ids)
    with open_writer(folder, target, LAYERS) as writer:
        for written in batches(
            target, scaffold, tokens=tokens, batch=BATCH, length=LENGTH, seed=seed, exit_layers=LAYERS,
            skip=writer.meta.sequences // BATCH, progress=no_progress,
        ):  # fmt: skip
            states = {n: kept.flatten(0, 1) for n, kept in written.states.items()}
            writer.append(written.tokens.tolist(), states, written.final.flatten(0, 1))
            print(f"{writer.meta.tokens} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("states", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--points", type=int, default=0, help="points of the learning curve before the last")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "states":
        write_states(given.folder, given.tokens, given.seed)
    else:
        run(given.folder, given.names, given.seconds, given.points)


if __name__ == "__main__":
    main()
