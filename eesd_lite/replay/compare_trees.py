"""Controllers of trees and of chains on one trace of trees, over cost curves: the figures of `eesd replay`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eesd_lite.acceptance import GENERIC_BELIEF, Belief
from eesd_lite.controller import any_controller, make_controller
from eesd_lite.controllers_tree import FixedTree, TreeController
from eesd_lite.progress import Progress, no_progress
from eesd_lite.replay.compare import overall
from eesd_lite.replay.player import Played, play
from eesd_lite.replay.tree_curves import TREE_CURVES, Group, TreeCurve, make_tree_curve
from eesd_lite.replay.tree_player import play_trees, tree_oracle
from eesd_lite.replay.tree_trace import TreeTrace

SIZES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_CONTROLLERS = ("tree", "calibrated")


@dataclass(frozen=True, kw_only=True)
class TreeReplaySettings:
    """What to compare. Chains of 0 (off) to 16 tokens, trees of SIZES nodes and the oracle always take part."""

    controllers: tuple[str, ...] = DEFAULT_CONTROLLERS
    curves: tuple[str, ...] = TREE_CURVES
    mode: str = "conversations"
    noise: float = 0.03
    seeds: int = 3

    def __post_init__(self) -> None:
        for spec in self.controllers:
            any_controller(spec)


class FixedShapes:
    """Every chain length and tree size on a trace. What a fixed tree does follows from no costs: it is grown once."""

    def __init__(self, trace: TreeTrace) -> None:
        self._trace = trace
        self.chains = tuple("off" if k == 0 else f"fixed:{k}" for k in range(trace.chains.k_max + 1))
        self.trees = tuple(f"tree:{nodes}" for nodes in SIZES if nodes <= trace.nodes)
        self._grown: dict[str, tuple[Played, list[tuple[Group, ...]]]] = {}

    def under(self, curve: TreeCurve) -> dict[str, Played]:
        """All of them under a curve."""
        chains = curve.of_chains(self._trace.chains.k_max)
        found = {spec: play(self._trace.chains, chains, _chain(spec)) for spec in self.chains}
        return {**found, **{spec: self._tree(spec, curve) for spec in self.trees}}

    def _tree(self, spec: str, curve: TreeCurve) -> Played:
        if spec not in self._grown:
            log: list[tuple[Group, ...]] = []
            nodes = int(spec.partition(":")[2])
            played = play_trees(self._trace, curve, lambda seed, costs: FixedTree(nodes), log=log)
            self._grown[spec] = played, log
        played, log = self._grown[spec]
        return Played(**{**vars(played), "seconds": sum(map(curve.seconds, log))})


def compare_trees(trace: TreeTrace, settings: TreeReplaySettings, progress: Progress = no_progress) -> dict[str, Any]:
    """The JSON object: per curve tokens per second and shares of the best fixed shapes and of the oracle; over all."""
    measured = trace.chains.about["trees"]["seconds"]
    curves = [make_tree_curve(name, measured) for name in settings.curves]
    fixed, points = FixedShapes(trace), []
    for number, curve in enumerate(curves):
        progress(f"replaying {curve.name}", number, len(curves))
        points.append(tree_point(trace, curve, fixed, settings))
    positions = sum(len(answer.positions) for answer in trace.chains.answers)
    return {
        "benchmark": "eesd replay",
        "trace": {**trace.chains.about, "answers": len(trace.trees), "positions": positions},
        "settings": {**vars(settings)},
        "points": points,
        "overall": overall(points),
    }


def tree_point(trace: TreeTrace, curve: TreeCurve, shapes: FixedShapes, settings: TreeReplaySettings) -> dict[str, Any]:
    """One curve."""
    fixed = shapes.under(curve)
    best_chain = max(shapes.chains, key=lambda spec: fixed[spec].tokens_per_second)
    best_tree = max(shapes.trees, key=lambda spec: fixed[spec].tokens_per_second)
    chain, tree = fixed[best_chain].tokens_per_second, fixed[best_tree].tokens_per_second
    limit = tree_oracle(trace, curve).tokens_per_second
    learning = {spec: _seeds(trace, curve, spec, settings) for spec in settings.controllers if spec not in fixed}
    return {
        "curve": curve.name,
        "best_chain": best_chain,
        "best_tree": best_tree,
        "oracle_tokens_per_second": round(limit, 4),
        "controllers": {
            spec: {
                "tokens_per_second": round(played.tokens_per_second, 4),
                "of_best_fixed": round(played.tokens_per_second / max(chain, tree), 4),
                "of_best_chain": round(played.tokens_per_second / chain, 4),
                "of_best_tree": round(played.tokens_per_second / tree, 4),
                "of_oracle": round(played.tokens_per_second / limit, 4),
                "tau": round(played.tokens / played.rounds, 4) if played.rounds else 0.0,
                "drafted_per_round": round(played.drafted / played.rounds, 3) if played.rounds else 0.0,
            }
            for spec, played in {**fixed, **learning}.items()
        },
    }


def _chain(spec: str, belief: Belief = GENERIC_BELIEF) -> Callable[..., Any]:
    return lambda seed, costs: make_controller(spec, seed, costs=costs, prior=belief.chain)


def _seeds(trace: TreeTrace, curve: TreeCurve, spec: str, settings: TreeReplaySettings) -> Played:
    """A controller that learns, of either kind; all seeds added up."""
    total, is_tree = Played(), isinstance(any_controller(spec), TreeController)
    belief = trace.chains.belief

    def make_tree(seed: int, costs: Any) -> TreeController:
        made = any_controller(spec, seed, tree_costs=costs, belief=belief)
        assert isinstance(made, TreeController)
        return made

    for seed in range(0, 1000 * settings.seeds, 1000):
        if is_tree:
            one = play_trees(trace, curve, make_tree, mode=settings.mode, noise=settings.noise, seed=seed)
        else:
            chains = curve.of_chains(trace.chains.k_max)
            one = play(trace.chains, chains, _chain(spec, belief), mode=settings.mode, noise=settings.noise, seed=seed)
        for name, value in vars(one).items():
            setattr(total, name, getattr(total, name) + value)
    return total
