"""Measures exit heads and draft vocabularies in fewer bits on the demo model (docs/tau.md).

chains EXIT: how often the head says the target's next token, and tau of fixed:4, by bits of head and lm_head.
trees EXIT: tau of tree:64; ids compared with plain decoding's.
speed EXIT: speed of fixed:4 in memory, over that of 16 bits and over plain decoding.
step EXIT: time of a draft step (one node, and a group of eight), all kinds taking turns; medians and quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from eesd_lite import Engine, SamplingParams
from eesd_lite.bench.prompts import load_prompts
from eesd_lite.cache import Rows
from eesd_lite.draft_vocabulary import DraftVocabulary, most_frequent
from eesd_lite.loader import LoadOptions, choose_kernels
from eesd_lite.sampling import Sampler
from eesd_lite.speculative import HeadDrafter
from models import find_recipe

MODEL, REPEATS = "smollm2-135m", 150
SIZES = (None, 4096, 16384)
Kind = tuple[int, int, int | None]  # bits of the head, bits of lm_head's rows, tokens (None: all)


def open_engine(exit_layer: int, bits: int) -> Engine:
    return Engine.from_pretrained(
        MODEL, exit_layer=exit_layer, head_bits=bits, draft_limit=64, threads=1, context=1024
    )  # fmt: skip


def vocabulary(engine: Engine, bits: int, size: int | None) -> DraftVocabulary | None:
    """As `--draft-vocab SIZE`, or `all` in fewer bits; None: the target's own lm_head."""
    if size is None and bits == 16:
        return None
    ids = None
    if size is not None:
        order, text = find_recipe(MODEL).ids_by_frequency(), engine.text
        ids = most_frequent(size, order=order, always=text.eos_token_ids, vocabulary=text.vocab_size)
    options = LoadOptions("cpu", "bfloat16", None, None, 1024, 64, 1, None)
    return DraftVocabulary.of(engine.target.lm_head, ids, bits=bits, kernels=choose_kernels(options)[1])


def prompts(engine: Engine, count: int) -> list[list[int]]:
    """So many of the shipped ones, evenly spread."""
    texts = load_prompts(None, None)
    chosen = texts[:: len(texts) // count][:count]
    return [engine.text.render_chat([{"role": "user", "content": p.text}]) for p in chosen]


KINDS: list[Kind] = [
    (16, 16, None), (8, 16, None), (8, 8, None), (8, 4, None), (4, 16, None), (4, 8, None), (4, 4, None),
    (16, 16, 16384), (8, 8, 16384), (4, 4, 16384), (16, 16, 4096), (8, 8, 4096), (4, 4, 4096),
]  # fmt: skip


@torch.inference_mode()
def matches(engine: Engine, prompt: list[int], answer: list[int]) -> list[bool]:
    """By place in the answer: whether the head, shown everything up to there, proposes the answer's next token."""
    target, head = engine.target, engine.head
    assert head is not None
    engine.reset()
    head.forget_from(0)
    ids = prompt + answer[:-1]
    states = target.lower(target.embed(ids), Rows.chain(0, len(ids), target.device))
    hidden = head.forward(states, Rows.chain(0, len(ids), target.device))[len(prompt) :]
    table, ours = head.vocabulary, []
    for part in hidden.split(8):
        x = part.contiguous()
        logits = target.ops.logits(x, target.lm_head) if table is None else table.logits(x, target.ops)
        best = logits[:, : engine.text.vocab_size].argmax(1)
        ours += best.tolist() if table is None or table.ids is None else table.ids[best.numpy()].tolist()
    return [mine == right for mine, right in zip(ours, answer[1:], strict=True)]


def rounds_of(found: list[bool], longest: int) -> int:
    """Rounds in which chains of at most `longest` say the answer behind its first token."""
    place, rounds = 0, 0
    while place < len(found):
        limit = min(longest, len(found) - place - 1)
        kept = next((n for n in range(limit) if not found[place + n]), limit)
        place, rounds = place + kept + 1, rounds + 1
    return rounds


def measure_chains(exit_layer: int, count: int) -> None:
    """A chain is kept as far as the head follows the target's own text, so tau of fixed:4 needs no rounds; that it is
    the same is asserted on the first prompt."""
    params = SamplingParams(max_new_tokens=48)
    engines = {bits: open_engine(exit_layer, bits) for bits in (16, 8, 4)}
    tables = {kind: vocabulary(engines[kind[0]], *kind[1:]) for kind in KINDS}
    found: dict[Kind, list[tuple[int, int, int]]] = {kind: [] for kind in KINDS}
    for number, ids in enumerate(prompts(engines[16], count)):
        engines[16].set_controller("off")
        plain = [event.token_id for event in engines[16].generate(ids, params)]
        for kind in KINDS:
            engine = engines[kind[0]]
            assert engine.head is not None
            engine.head.vocabulary = tables[kind]
            hits = matches(engine, ids, plain)
            rounds = rounds_of(hits, 4)
            found[kind].append((sum(hits), len(hits), rounds))
            if number == 0:
                engine.set_controller("fixed:4")
                before = engine.stats.snapshot()
                assert [event.token_id for event in engine.generate(ids, params)] == plain, kind
                assert engine.stats.since(before).rounds == rounds, (kind, engine.stats.since(before).rounds, rounds)
    for kind, rows in found.items():
        right, places, rounds = (sum(row[n] for row in rows) for n in range(3))
        print(f"exit {exit_layer}, {_words(kind)}: agreement {right / places:.4f}, fixed:4 tau {places / rounds:.3f}")


def measure_trees(exit_layer: int, count: int, all_bits: list[int]) -> None:
    """Real rounds of tree:64 with head and lm_head in the same bits."""
    params = SamplingParams(max_new_tokens=48)
    for bits in all_bits:
        engine = open_engine(exit_layer, bits)
        assert engine.head is not None
        kind: Kind = (bits, bits, None)
        engine.head.vocabulary = vocabulary(engine, *kind[1:])
        tokens = rounds = 0
        for ids in prompts(engine, count):
            said = []
            for spec in ("off", "tree:64"):
                engine.set_controller(spec)
                before = engine.stats.snapshot()
                said.append([event.token_id for event in engine.generate(ids, params)])
            assert said[0] == said[1], ids
            done = engine.stats.since(before)
            tokens, rounds = tokens + done.accepted + done.rounds, rounds + done.rounds
        print(f"exit {exit_layer}, {_words(kind)}: tree:64 tau {tokens / rounds:.3f}", flush=True)
        engine.close()


def measure_speed(exit_layer: int, count: int) -> None:
    """fixed:4 with everything in memory on one thread: all kinds and plain decoding take turns on every prompt."""
    params = SamplingParams(max_new_tokens=48)
    engines = {bits: open_engine(exit_layer, bits) for bits in (16, 8, 4)}
    kinds: list[Kind] = [(bits, bits, size) for bits in (16, 8, 4) for size in (None, 16384, 4096)]
    tables = {kind: vocabulary(engines[kind[0]], *kind[1:]) for kind in kinds}
    found: dict[Kind | None, list[float]] = {kind: [] for kind in [None, *kinds]}
    for ids in prompts(engines[16], count):
        for kind, speeds in found.items():
            engine = engines[16 if kind is None else kind[0]]
            assert engine.head is not None
            engine.head.vocabulary = None if kind is None else tables[kind]
            engine.set_controller("off" if kind is None else "fixed:4")
            before = engine.stats.snapshot()
            list(engine.generate(ids, params))
            done = engine.stats.since(before)
            speeds.append((done.accepted + done.rounds) / done.decode_seconds)
    for kind in kinds:
        ratios = (_quartiles([mine / his for mine, his in zip(found[kind], found[other], strict=True)])
                  for other in (kinds[0], None))  # fmt: skip
        print("exit {}, {}: over 16 bits {}, over plain {}".format(exit_layer, _words(kind), *ratios), flush=True)


def _quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def _words(kind: Kind) -> str:
    return f"head {kind[0]}, lm_head {kind[1]}, {kind[2] or 'all'} tokens"


def drafters(exit_layer: int) -> Iterator[tuple[Kind, Engine, HeadDrafter]]:
    for bits in (16, 8, 4):
        engine = open_engine(exit_layer, bits)
        engine.set_controller("fixed:4")
        list(engine.generate(prompts(engine, 8)[0], SamplingParams(max_new_tokens=8)))
        for size in SIZES:
            for table in (16, bits) if size is None and bits != 16 else (bits,):
                assert engine.head is not None
                engine.head.vocabulary = vocabulary(engine, table, size)
                sampler = Sampler(SamplingParams(), engine.config.vocab_size, engine.text.vocab_size)
                yield (bits, table, size), engine, HeadDrafter(engine.head, engine.target, sampler)


@torch.inference_mode()
def measure_step(exit_layer: int) -> None:
    """Layers below the exit (the same for all), head, lm_head and choice of one node or of eight."""
    made = list(drafters(exit_layer))
    for width in (1, 8):
        target = made[0][1].target
        ids = prompts(made[0][1], 8)[0]
        rows = Rows.chain(len(ids), width, target.device)
        history = [ids + ids[-1:] * (n + 1) for n in range(width)]
        position = [len(before) for before in history]
        lower: list[float] = []
        seconds: dict[Kind, list[float]] = {kind: [] for kind, _, _ in made}
        for _ in range(REPEATS):
            begun = time.perf_counter()
            states = target.lower(target.embed(ids[-1:] * width), rows)
            lower.append(time.perf_counter() - begun)
            for kind, _, drafter in made:
                begun = time.perf_counter()
                if width == 1:
                    drafter.propose(states, rows, position=position[0], history=history[0])
                else:
                    drafter.branches(states, rows, position=position, history=history, count=32)
                seconds[kind].append(time.perf_counter() - begun)
        print(f"exit {exit_layer}, {width} nodes: layers below {_spread(lower)}")
        for kind, values in seconds.items():
            total = statistics.median(lower) + statistics.median(values)
            print(f"  {_words(kind)}: behind the exit {_spread(values)}, step {1000 * total:.2f} ms", flush=True)


def _spread(values: list[float]) -> str:
    low, middle, high = (1000 * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["chains", "trees", "step", "speed"])
    parser.add_argument("exit", type=int)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4], help="for trees")
    given = parser.parse_args()
    if given.what == "step":
        measure_step(given.exit)
    elif given.what == "speed":
        measure_speed(given.exit, given.prompts)
    elif given.what == "chains":
        measure_chains(given.exit, given.prompts)
    else:
        measure_trees(given.exit, given.prompts, given.bits)
