"""Makes and measures draft vocabularies of the demo model (docs/tau.md).

list FILE: ids by frequency in the shipped calibration ids and in text that the model writes itself.
step EXIT: time of a draft step (one node, and a group of eight), all sizes taking turns; ratios of medians.
tau EXIT: tau, and speed over that of the whole vocabulary (median over prompts, sizes taking turns), in memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from eesd_lite import Engine, SamplingParams
from eesd_lite.bench.prompts import load_prompts
from eesd_lite.cache import Rows
from eesd_lite.distill.generate import chat_scaffold, write_conversations
from eesd_lite.distill.teacher import DenseTarget
from eesd_lite.draft_vocabulary import DraftVocabulary, frequency_order, most_frequent
from eesd_lite.prepare import fetch
from eesd_lite.sampling import Sampler
from eesd_lite.speculative import HeadDrafter
from models import find_recipe

MODEL, SIZES, CONTROLLERS = "smollm2-135m", (4096, 8192, 16384), ("fixed:4", "tree:64")
REPEATS = 150


def write_list(path: Path) -> None:
    folder = fetch(MODEL)
    target = DenseTarget(folder, context=384)
    scaffold = chat_scaffold(folder, target.config.eos_token_ids)
    own = write_conversations(target, scaffold, batch=96, length=384, seed=7_000_003, keep_states=False).tokens
    tokens = np.concatenate([np.ravel(find_recipe(MODEL).calibration_rows()), own.numpy().ravel()])
    order = frequency_order(tokens)
    order.astype("<u2").tofile(path)
    print(f"{len(tokens)} tokens, {len(order)} different ones")


def open_engine(exit_layer: int) -> tuple[Engine, dict[int | None, DraftVocabulary | None]]:
    engine = Engine.from_pretrained(
        MODEL, exit_layer=exit_layer, head_bits=16, draft_limit=64, threads=1, context=1024
    )  # fmt: skip
    order, text = find_recipe(MODEL).ids_by_frequency(), engine.text
    found: dict[int | None, DraftVocabulary | None] = {None: None}
    for size in SIZES:
        ids = most_frequent(size, order=order, always=text.eos_token_ids, vocabulary=text.vocab_size)
        found[size] = DraftVocabulary.of(engine.target.lm_head, ids)
    return engine, found


def prompts(engine: Engine) -> list[list[int]]:
    """Every fifth of the shipped ones: eight."""
    return [engine.text.render_chat([{"role": "user", "content": p.text}]) for p in load_prompts(None, None)[::5]]


@torch.inference_mode()
def measure_step(exit_layer: int) -> None:
    engine, vocabularies = open_engine(exit_layer)
    target, head, ids = engine.target, engine.head, prompts(engine)[0]
    assert head is not None
    engine.set_controller("fixed:4")
    list(engine.generate(ids, SamplingParams(max_new_tokens=8)))
    drafters = {}
    for size, vocabulary in vocabularies.items():
        head.vocabulary = vocabulary
        sampler = Sampler(SamplingParams(), engine.config.vocab_size, engine.text.vocab_size)
        drafters[size] = HeadDrafter(head, target, sampler)
    for width in (1, 8):
        rows = Rows.chain(len(ids), width, target.device)
        history = [ids + ids[-1:] * (n + 1) for n in range(width)]
        position = [len(before) for before in history]
        seconds: dict[int | None, list[float]] = {size: [] for size in drafters}
        for _ in range(REPEATS):
            for size, drafter in drafters.items():
                begun = time.perf_counter()
                states = target.lower(target.embed(ids[-1:] * width), rows)
                if width == 1:
                    drafter.propose(states, rows, position=position[0], history=history[0])
                else:
                    drafter.branches(states, rows, position=position, history=history, count=32)
                seconds[size].append(time.perf_counter() - begun)
        whole = statistics.median(seconds[None])
        ratios = {size: round(statistics.median(values) / whole, 3) for size, values in seconds.items()}
        print(f"exit {exit_layer}, {width} nodes: {1000 * whole:.2f} ms with all tokens; of that {ratios}")


def measure_tau(exit_layer: int) -> None:
    engine, vocabularies = open_engine(exit_layer)
    params = SamplingParams(max_new_tokens=48)
    found: dict[tuple[str, int | None], list[tuple[int, int, float]]] = {}
    assert engine.head is not None
    for number, ids in enumerate(prompts(engine)):
        engine.set_controller("off")
        plain = [event.token_id for event in engine.generate(ids, params)]
        for spec in CONTROLLERS:
            for size, engine.head.vocabulary in vocabularies.items():
                engine.set_controller(spec)
                before = engine.stats.snapshot()
                assert [event.token_id for event in engine.generate(ids, params)] == plain, (spec, size)
                done = engine.stats.since(before)
                row = (done.accepted + done.rounds, done.rounds, done.decode_seconds)
                found.setdefault((spec, size), []).append(row)
        for (spec, size), rows in found.items():
            tau = sum(row[0] for row in rows) / sum(row[1] for row in rows)
            pairs = zip(rows, found[spec, None], strict=True)
            speed = statistics.median((all_[2] / all_[0]) / (row[2] / row[0]) for row, all_ in pairs)
            print(f"{number + 1} prompts, exit {exit_layer}, {spec}, {size or 'all'}: tau {tau:.3f}, speed {speed:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "step", "tau"])
    parser.add_argument("argument", metavar="FILE|EXIT")
    given = parser.parse_args()
    if given.what == "list":
        write_list(Path(given.argument))
    else:
        (measure_step if given.what == "step" else measure_tau)(int(given.argument))
