"""Two-stage drafts, tried on recorded luck (docs/tau.md): a shallow exit grows a tree, a deeper one prunes it.

record FILE: at every position of plain answers the best-first trees of every exit, and what deeper heads think of them.
costs FILE: seconds of layers, head and lm_head by rows, everything in memory; the fastest of some runs.
simulate RECORD COSTS: tokens per time of one-stage and of two-stage drafts, each with its best sizes in hindsight.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from eesd_lite import Engine, SamplingParams
from eesd_lite.bench.prompts import load_prompts
from eesd_lite.cache import KVCache, Rows
from eesd_lite.controllers_tree import FixedTree
from eesd_lite.draft_tree import Draft
from eesd_lite.exit_head import ExitHead
from eesd_lite.head_file import load_head
from eesd_lite.loader import LoadOptions, choose_kernels
from eesd_lite.replay.record import fastest, plain_answer
from eesd_lite.replay.tree_curves import ByRows, Group, by_rows
from eesd_lite.replay.tree_player import regrow
from eesd_lite.replay.tree_trace import RecordedTree
from eesd_lite.sampling import Sampler
from eesd_lite.speculative import VERIFY_ROWS, HeadDrafter, keep_prefix
from eesd_lite.target import LOGITS_ROWS, Target
from eesd_lite.transformer import run_layers
from eesd_lite.tree_growth import grow
from models import find_recipe

MODEL, EXITS, NODES, TOKENS = "smollm2-135m", (6, 10, 15, 20), 64, 64
PAIRS = ((6, 15), (6, 20), (10, 20), (15, 20))
LAYERS, RESIDENT = 30, 20
HEAD_LAYERS = 4  # layers that the bytes of a second head would hold
SIZES, SWEEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), (5, 10, 20, 40, 200)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 65)


@dataclass(frozen=True)
class Stage:
    """An exit of the one engine: its view of the target, its head, its drafter."""

    target: Target
    head: ExitHead
    drafter: HeadDrafter


def open_stages(threads: int = 1) -> tuple[Engine, dict[int, Stage]]:
    engine = Engine.from_pretrained(
        MODEL, exit_layer=EXITS[-1], draft_limit=NODES, context=1024, controller="tree", threads=threads
    )
    target, recipe = engine.target, find_recipe(MODEL)
    options = LoadOptions("cpu", "bfloat16", None, None, 1024, NODES, 1, None)
    _, kernels = choose_kernels(options)
    sampler = Sampler(SamplingParams(), engine.config.vocab_size, engine.text.vocab_size)
    stages = {}
    for exit_layer in EXITS:
        path = recipe.head(exit_layer)
        assert path is not None
        head = load_head(path, engine.config, "", force=True)
        kv = KVCache(
            1, target.kv.capacity, num_key_value_heads=engine.config.num_key_value_heads,
            head_dim=engine.config.head_dim, dtype=target.ops.dtype,
        )  # fmt: skip
        made = ExitHead(engine.config, head, ops=target.ops, kernels=kernels, reach=target.reaches[exit_layer], kv=kv)
        view = Target(**{**vars(target), "exit_layer": exit_layer})
        stages[exit_layer] = Stage(view, made, HeadDrafter(made, view, sampler))
    return engine, stages


def pass_layers(target: Target, layers: range, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
    run_layers(target.bank, layers, hidden, rows, kv=target.kv, reaches=target.reaches, chunk=128)
    return hidden


def judge(drafted: Draft, shallow: Stage, deep: Stage) -> list[float]:
    """By node behind the first: the probability that the deeper head gives it, once the node above was kept."""
    tree = drafted.tree
    if len(tree) == 1:
        return []
    rows = tree.rows(deep.target.device)
    layers = range(shallow.target.exit_layer, deep.target.exit_layer)
    states = deep.head.forward(pass_layers(deep.target, layers, drafted.states.clone(), rows), rows)
    inner = sorted(set(tree.parents[1:]))
    found = [0.0] * len(tree)
    for part in torch.tensor(inner).split(LOGITS_ROWS):
        logits = deep.target.ops.logits(states[part].contiguous(), deep.target.lm_head).softmax(-1)
        for row, parent in zip(logits, part.tolist(), strict=True):
            for node in range(1, len(tree)):
                if tree.parents[node] == parent:
                    found[node] = float(row[tree.tokens[node]])
    return found[1:]


class Watched(FixedTree):
    """Remembers the groups: nodes asked, nodes that joined."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.joined: list[int] = []

    def take(self, reaches: object) -> int:
        count = super().take(reaches)  # type: ignore[arg-type]
        self.joined += [count] if count else []
        return count


@torch.inference_mode()
def record(path: Path, prompts: int) -> None:
    """Positions from the last to the first: what earlier ones need stays in place."""
    engine, stages = open_stages()
    texts = load_prompts(None, None)
    chosen = [texts[7 * n % len(texts)] for n in range(prompts)]
    params = SamplingParams(max_new_tokens=TOKENS)
    rows: list[dict[str, object]] = []
    for number, prompt in enumerate(chosen):
        began = time.perf_counter()
        ids = engine.text.render_chat([{"role": "user", "content": prompt.text}])
        answer = plain_answer(engine, ids, params)
        text = [*ids, *answer]
        known = Rows.chain(0, len(text) - 1)
        states, last = engine.target.embed(text[:-1]), 0
        for exit_layer, stage in stages.items():
            states, last = pass_layers(stage.target, range(last, exit_layer), states, known), exit_layer
            keep_prefix(stage.drafter, states, known)
        for index in range(len(answer) - 2, -1, -1):
            visible, truth = text[: len(ids) + index + 1], answer[index + 1 :]
            for exit_layer, stage in stages.items():
                watched = Watched(NODES)
                drafted = grow(
                    stage.target, stage.drafter, watched, visible=visible, limit=NODES,
                    depth=max(0, TOKENS - index - 2), stop_ids=engine.text.eos_token_ids,
                )  # fmt: skip
                rows.append(entry(drafted, watched.joined, truth, number, index, exit_layer, stages))
        engine.reset()
        print(f"prompt {number + 1} of {prompts}: {time.perf_counter() - began:.0f} s", flush=True)
        save(path, rows)


def entry(
    drafted: Draft, joined: list[int], truth: list[int], number: int, index: int, exit_layer: int,
    stages: dict[int, Stage],
) -> dict[str, object]:  # fmt: skip
    tree, ends = drafted.tree, list(accumulate(joined))
    stated = [
        next(c.confidence or 0.0 for c in drafted.proposals[parent] if c.token_id == token)
        for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True)
    ]
    kept, last, depth = [], 0, 0
    for node in range(1, len(tree)):
        right = tree.parents[node] == last and depth < len(truth) and tree.tokens[node] == truth[depth]
        kept.append(right)
        if right:
            last, depth = node, depth + 1
    deep = {str(d): judge(drafted, stages[exit_layer], stages[d]) for s, d in PAIRS if s == exit_layer}
    return {
        "prompt": number, "index": index, "exit": exit_layer, "parents": list(tree.parents[1:]), "stated": stated,
        "step": [next(s for s, end in enumerate(ends, 1) if node < end) for node in range(len(tree) - 1)],
        "kept": kept, "deep": deep,
    }  # fmt: skip


def save(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@torch.inference_mode()
def measure_costs(path: Path) -> None:
    """Seconds by rows of one layer, of a head's layer, and of lm_head."""
    engine, stages = open_stages(threads=2)
    target, head, place = engine.target, stages[10].head, 128
    found: dict[str, list[float]] = {"rows": list(ROWS), "layer": [], "head": [], "logits": []}

    def logits(states: torch.Tensor) -> None:
        for part in states.split(LOGITS_ROWS):
            target.ops.logits(part.contiguous(), target.lm_head)

    for count in ROWS:
        rows, states = Rows.chain(place, count), target.embed([0] * count)
        mapped = head.forward(states, rows)
        layers = partial(pass_layers, target, range(10), states.clone(), rows)
        found["layer"].append(fastest(layers, time.perf_counter) / 10)
        found["head"].append(fastest(partial(head.forward, states, rows), time.perf_counter))
        found["logits"].append(fastest(partial(logits, mapped), time.perf_counter))
    path.write_text(json.dumps(found))


@dataclass(frozen=True)
class Costs:
    """Seconds by rows, from a file; `free`: more rows cost nothing, as where layers are streamed to a card."""

    layer: ByRows
    head: ByRows
    logits: ByRows
    resident: int

    @classmethod
    def read(cls, path: Path, *, free: bool, resident: int) -> Costs:
        raw = json.loads(path.read_text())
        parts = [by_rows(raw["rows"], raw[name]) for name in ("layer", "head", "logits")]
        one = [(lambda rows, part=part: part(1)) for part in parts]
        return cls(*(one if free else parts), resident=resident)  # type: ignore[arg-type]

    @property
    def step(self) -> float:
        """A draft step at exit 10: the unit of sweeps."""
        return 10 * self.layer(1) + self.head(1) + self.logits(1)

    def drafting(self, exit_layer: int, groups: Sequence[Group]) -> float:
        asked = sum(self.head(n) + self.logits(n) for n, _ in groups if n)
        return exit_layer * (self.layer(1) + sum(self.layer(n) for _, n in groups if n)) + asked

    def verifying(self, exit_layer: int, rows: int, sweep: float) -> float:
        streamed = (LAYERS - self.resident) * self.layer(rows)
        middle = (self.resident - exit_layer) * self.layer(rows)
        return middle + max(sweep, streamed) + self.logits(min(rows, VERIFY_ROWS))

    def judging(self, shallow: int, deep: int, rows: int, inner: int) -> float:
        return (deep - shallow) * self.layer(rows) + self.head(rows) + (self.logits(inner) if inner else 0.0)


@dataclass(frozen=True)
class Drawn:
    """A tree of some size at one position: its groups, the nodes kept, and by deeper exit what pruning leaves."""

    groups: tuple[Group, ...]
    accepted: int
    inner: int
    pruned: dict[int, list[int]]  # by deeper exit: how many nodes are kept of the best 0, 1, 2, ... of them


class Recorded:
    """All positions of a record, and the trees of every size there."""

    def __init__(self, path: Path) -> None:
        self.lengths: dict[int, int] = {}
        self._rows: dict[tuple[int, int, int], dict[str, Any]] = {}
        for line in path.open():
            row = json.loads(line)
            self._rows[row["prompt"], row["index"], row["exit"]] = row
            self.lengths[row["prompt"]] = max(self.lengths.get(row["prompt"], 0), row["index"] + 1)
        self._drawn: dict[tuple[int, int, int, int], Drawn] = {}

    def drawn(self, prompt: int, index: int, exit_layer: int, nodes: int) -> Drawn:
        key = prompt, index, exit_layer, nodes
        if key not in self._drawn:
            row = self._rows[prompt, index, exit_layer]
            tree = RecordedTree(*(tuple(row[name]) for name in ("parents", "stated", "step", "kept")))
            grown = regrow(tree, FixedTree(nodes), limit=nodes, depth=TOKENS - index - 2)
            inner = len({tree.parents[node - 1] for node in grown.nodes})
            pruned = {int(deep): prune(tree, grown.nodes, stated) for deep, stated in row["deep"].items()}
            self._drawn[key] = Drawn(grown.groups, grown.accepted, inner, pruned)
        return self._drawn[key]


def prune(tree: RecordedTree, nodes: Sequence[int], stated: Sequence[float]) -> list[int]:
    """How many nodes of the target's path are among the best 0, 1, 2, ... by the deeper head's reach."""
    reach = {0: 1.0}
    for node in nodes:
        reach[node] = reach[tree.parents[node - 1]] * stated[node - 1]
    best = sorted(nodes, key=lambda node: (-reach[node], node))
    return [0, *accumulate(int(tree.kept[node - 1]) for node in best)]


def play(
    record: Recorded, draw: Callable[[int, int], Drawn], seconds: Callable[[Drawn], float], kept: Callable[[Drawn], int]
) -> tuple[float, float]:
    """Tokens per second and tau over all answers."""
    tokens = rounds = 0
    spent = 0.0
    for prompt, length in record.lengths.items():
        index = 0
        while index < length:
            drawn = draw(prompt, index)
            emitted = kept(drawn) + 1
            tokens += min(emitted, length - index)
            spent, rounds, index = spent + seconds(drawn), rounds + 1, index + emitted
    return tokens / spent, tokens / rounds


def best_of_one(record: Recorded, exit_layer: int, costs: Costs, sweep: float) -> tuple[float, float, int]:
    """Tokens per second, tau and nodes of the best size."""
    found = []
    for size in (0, *SIZES):

        def seconds(drawn: Drawn, size: int = size) -> float:
            rows = 1 + sum(joined for _, joined in drawn.groups)
            return costs.drafting(exit_layer, drawn.groups) + costs.verifying(exit_layer, rows, sweep)

        def draw(prompt: int, index: int, size: int = size) -> Drawn:
            return record.drawn(prompt, index, exit_layer, size) if size else Drawn((), 0, 0, {})

        found.append((*play(record, draw, seconds, lambda drawn: drawn.accepted), size))
    return max(found)


def best_of_two(
    record: Recorded, shallow: int, deep: int, costs: Costs, sweep: float
) -> tuple[float, float, tuple[int, int]]:
    """The same for drafting at `shallow` and pruning at `deep`: nodes drafted, nodes left."""
    found = []
    for size in SIZES:
        for left in (0, *SIZES):
            if left >= size:
                break

            def seconds(drawn: Drawn, left: int = left) -> float:
                nodes = sum(joined for _, joined in drawn.groups)
                drafted = costs.drafting(shallow, drawn.groups) + costs.judging(shallow, deep, 1 + nodes, drawn.inner)
                return drafted + costs.verifying(deep, 1 + min(left, nodes), sweep)

            def draw(prompt: int, index: int, size: int = size) -> Drawn:
                return record.drawn(prompt, index, shallow, size)

            def kept(drawn: Drawn, left: int = left) -> int:
                below = drawn.pruned[deep]
                return below[min(left, len(below) - 1)]

            found.append((*play(record, draw, seconds, kept), (size, left)))
    return max(found)


def simulate(record_path: Path, costs_path: Path) -> None:
    """One row per cost: every one-stage exit, every pair, and the gain of the best pair."""
    record = Recorded(record_path)
    answers = sum(record.lengths.values())
    print(f"{len(record.lengths)} answers, {answers} positions, {RESIDENT} of {LAYERS} layers resident")
    for free in (False, True):
        costs = Costs.read(costs_path, free=free, resident=RESIDENT)
        for steps in SWEEPS:
            sweep = steps * costs.step
            one = {exit_layer: best_of_one(record, exit_layer, costs, sweep) for exit_layer in EXITS}
            two = {pair: best_of_two(record, *pair, costs, sweep) for pair in PAIRS}
            # With the same memory the second head's bytes hold layers of a one-stage draft.
            roomy = Costs.read(costs_path, free=free, resident=RESIDENT + HEAD_LAYERS)
            less = sweep * (LAYERS - roomy.resident) / (LAYERS - RESIDENT)
            fair = max(best_of_one(record, exit_layer, roomy, less)[0] for exit_layer in EXITS)
            gain = max(two.values())[0] / max(one.values())[0]
            print(
                f"{'gpu' if free else 'sweep'}:{steps}",
                " ".join(f"[{n}: {s:.2f} tau {t:.2f} x{m}]" for n, (s, t, m) in one.items()), "two:",
                " ".join(f"[{a}-{b}: {s:.2f} tau {t:.2f} {m}]" for (a, b), (s, t, m) in two.items()),
                f"gain {gain:.3f}, same memory {max(two.values())[0] / fair:.3f}", flush=True,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "costs", "simulate"])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=12, help="with record: every seventh, round and round")
    asked = parser.parse_args()
    if asked.what == "record":
        record(asked.files[0], asked.prompts)
    elif asked.what == "costs":
        measure_costs(asked.files[0])
    else:
        simulate(*asked.files)


if __name__ == "__main__":
    main()
