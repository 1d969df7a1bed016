"""How often the shipped heads are right, written into their files, and what recorded traces say of heads and times.

    python scripts/head_prior.py heads [EXIT ...]     measure on docs/benchmarks/prior_prompts.txt, rewrite the metadata
    python scripts/head_prior.py traces FILE ...      give traces what the shipped head of their exit layer says
    python scripts/head_prior.py times FILE ...       measure the seconds of a step again (on a quiet machine)

No benchmark uses those prompts. Tensors and recorded drafts keep their bytes; without exits all shipped heads are
measured. Seconds are those of one thread.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from eesd_lite.head_file import ACCEPTANCE, write_acceptance
from eesd_lite.head_prior import read_prior
from eesd_lite.params import SamplingParams
from eesd_lite.replay.judge import measure_prior
from eesd_lite.replay.record import measure_steps, opened
from eesd_lite.replay.record_trees import chain_seconds, measure_rows
from eesd_lite.replay.trace import Trace
from eesd_lite.replay.tree_trace import TreeTrace, has_trees

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m"
HEADS = ROOT / "models" / "data" / MODEL / "heads"
PROMPTS = ROOT / "docs" / "benchmarks" / "prior_prompts.txt"
TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("heads", "traces", "times"))
    parser.add_argument("which", nargs="*")
    given = parser.parse_args()
    if given.what == "heads":
        for exit_layer in map(int, given.which or sorted(path.stem.split("-")[1] for path in HEADS.glob("exit-*"))):
            measure_head(exit_layer)
        return
    for name in given.which:
        path = Path(name)
        trees = TreeTrace.load(path) if has_trees(Trace.load(path)) else None
        chains = trees.chains if trees is not None else Trace.load(path)
        (add_prior if given.what == "traces" else measure_times)(chains.about)
        (trees or chains).save(path)
        print(path, file=sys.stderr)


def head_path(exit_layer: int) -> Path:
    return HEADS / f"exit-{exit_layer:02d}.safetensors"


def measure_head(exit_layer: int) -> None:
    """Write how often a shipped head is right into its file."""
    params = SamplingParams(max_new_tokens=TOKENS, seed=5)
    with opened(MODEL, params=params, prompts=PROMPTS, exit_layer=exit_layer, threads=1) as (engine, prompts):
        prior = measure_prior(engine, prompts, params)
    write_acceptance(head_path(exit_layer), prior)
    for temperature, belief in sorted(prior.beliefs.items()):
        kept, judged = sum(belief.chain.kept), sum(belief.chain.judged)
        print(
            f"exit {exit_layer}, temperature {temperature:g}: {kept / judged:.3f} of chains' tokens kept, "
            f"shift {belief.tree.shift:.2f}, slope {belief.tree.slope:.2f}",
            flush=True,
        )


def add_prior(about: dict[str, Any]) -> None:
    """What the shipped head of a trace's exit layer says."""
    with safe_open(head_path(about["exit_layer"]), framework="pt") as file:
        about["acceptance"] = read_prior(file.metadata()[ACCEPTANCE]).as_dict()


def measure_times(about: dict[str, Any]) -> None:
    """The seconds of a step, anew."""
    params, trees = SamplingParams(max_new_tokens=1), about.get("trees")
    nodes = trees["nodes"] if trees else about["k_max"]
    with opened(
        MODEL, params=params, limit_prompts=1, exit_layer=about["exit_layer"], draft_limit=nodes, threads=1
    ) as (engine, _):
        if trees is None:
            about["seconds"] = measure_steps(engine)
        else:
            trees["seconds"] = measure_rows(engine)
            about["seconds"] = chain_seconds(trees["seconds"], about["k_max"])


if __name__ == "__main__":
    main()
