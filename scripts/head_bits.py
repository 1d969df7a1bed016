"""Measures exit heads and draft vocabularies in fewer bits on the demo model (docs/tau.md).

tau EXIT: tau for bits of the head and of its copy of lm_head, in memory; ids compared with plain decoding's.
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

MODEL, CONTROLLERS, REPEATS = "smollm2-135m", ("fixed:4", "tree:64"), 150
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


def measure_tau(exit_layer: int, count: int) -> None:
    """The target's ids come from plain decoding once; every kind has to repeat them."""
    params = SamplingParams(max_new_tokens=48)
    engines = {bits: open_engine(exit_layer, bits) for bits in (16, 8, 4)}
    kinds: list[Kind] = [(16, 16, None), (8, 16, None), (8, 8, None), (8, 4, None), (4, 16, None), (4, 4, None)]
    kinds += [(bits, bits, 16384) for bits in (16, 8, 4)]
    tables = {kind: vocabulary(engines[kind[0]], *kind[1:]) for kind in kinds}
    found: dict[tuple[str, Kind], list[tuple[int, int]]] = {}
    for number, ids in enumerate(prompts(engines[16], count)):
        engines[16].set_controller("off")
        plain = [event.token_id for event in engines[16].generate(ids, params)]
        for spec in CONTROLLERS:
            for kind in kinds:
                engine = engines[kind[0]]
                assert engine.head is not None
                engine.head.vocabulary = tables[kind]
                engine.set_controller(spec)
                before = engine.stats.snapshot()
                assert [event.token_id for event in engine.generate(ids, params)] == plain, (spec, kind)
                done = engine.stats.since(before)
                found.setdefault((spec, kind), []).append((done.accepted + done.rounds, done.rounds))
        for (spec, (bits, table, size)), rows in found.items():
            tau = sum(row[0] for row in rows) / sum(row[1] for row in rows)
            words = f"head {bits}, lm_head {table}, {size or 'all'} tokens"
            print(f"{number + 1} prompts, exit {exit_layer}, {spec}, {words}: tau {tau:.3f}", flush=True)


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
        for (bits, table, size), values in seconds.items():
            total = statistics.median(lower) + statistics.median(values)
            words = f"head {bits}, lm_head {table}, {size or 'all'} tokens"
            print(f"  {words}: behind the exit {_spread(values)}, step {1000 * total:.2f} ms", flush=True)


def _spread(values: list[float]) -> str:
    low, middle, high = (1000 * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tau", "step"])
    parser.add_argument("exit", type=int)
    parser.add_argument("--prompts", type=int, default=8, help="for tau")
    given = parser.parse_args()
    if given.what == "step":
        measure_step(given.exit)
    else:
        measure_tau(given.exit, given.prompts)
