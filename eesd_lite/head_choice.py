"""Which exit head an engine uses: given by file, shipped with a recipe, beside the model, made on the spot, or none.

The fingerprint of the target is compared unless forced. No head is no error: plain decoding with a notice that says how
to get one. Used by `Engine.from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from eesd_lite.config import ModelConfig
from eesd_lite.errors import HeadError
from eesd_lite.head_file import HeadTensors, folder_fingerprint, load_head
from eesd_lite.head_list import heads_at_hand, usual_exit
from eesd_lite.layer_shapes import HeadShape
from eesd_lite.prepare import ModelSource
from eesd_lite.progress import Progress


@dataclass(frozen=True)
class ChosenHead:
    """`head` None: plain decoding."""

    exit_layer: int | None
    head: HeadTensors | None
    notices: tuple[str, ...] = ()


def choose_head(
    source: ModelSource,
    config: ModelConfig,
    head: str | Path | None,
    exit_layer: int | None,
    *,
    force: bool,
    progress: Progress,
) -> ChosenHead:
    """The head for these wishes. Raises HeadError for a wish that cannot be met."""
    if head == "off":
        return ChosenHead(None, None)
    if head == "random":
        layer = exit_layer if exit_layer is not None else default_exit_layer(source, config)
        return ChosenHead(layer, random_head(config, layer))
    if head == "instant":
        if source.weights is not None:
            raise HeadError(
                "--head instant reads a folder with one checkpoint; keep one weight file instead of --weights"
            )
        from eesd_lite.distill.instant import make_instant_head  # pulls in the trainer

        layer = exit_layer if exit_layer is not None else default_exit_layer(source, config)
        head = make_instant_head(source, layer, progress)
    if head is not None and not Path(head).is_dir():
        path = Path(head)
        if not path.exists():
            raise HeadError(f"{path}: no such head file; --head takes a file, a folder of them, off, instant or random")
        loaded = load_head(path, config, _fingerprint(source, config), force=force)
        if exit_layer is not None and exit_layer != loaded.exit_layer:
            raise HeadError(f"{path}: made for exit layer {loaded.exit_layer}, but {exit_layer} was asked for")
        return ChosenHead(loaded.exit_layer, loaded)
    return _one_of(heads_at_hand(source, head), source, config, exit_layer, force)


def _one_of(
    heads: Mapping[int, Path], source: ModelSource, config: ModelConfig, exit_layer: int | None, force: bool
) -> ChosenHead:
    if not heads:
        notice = (
            "no exit head for this model, so no drafts from one: --head instant makes one in about a minute, "
            "eesd train makes a better one, --drafter ngram needs none"
        )
        if exit_layer is not None:
            raise HeadError(f"{source.name}: no exit head at all, so none for layer {exit_layer}; see eesd train")
        return ChosenHead(None, None, (notice,))
    if exit_layer is None:
        exit_layer = usual_exit(source, heads)
    if exit_layer not in heads:
        known = ", ".join(str(layer) for layer in sorted(heads))
        raise HeadError(f"{source.name}: no head for exit layer {exit_layer}; there are heads for {known}")
    return ChosenHead(exit_layer, load_head(heads[exit_layer], config, _fingerprint(source, config), force=force))


def ids_by_frequency(source: ModelSource, head: HeadTensors) -> tuple[int, ...]:
    """Token ids, the most frequent first: the head's own list, else the recipe's; empty where neither has one."""
    if head.draft_vocab is not None:
        return tuple(head.draft_vocab.tolist())
    return tuple(source.recipe.ids_by_frequency()) if source.recipe is not None else ()


def _fingerprint(source: ModelSource, config: ModelConfig) -> str:
    return folder_fingerprint(source.folder, config, source.weights)


def default_exit_layer(source: ModelSource, config: ModelConfig) -> int:
    """A third of the depth where no recipe says better."""
    if source.recipe is not None:
        return source.recipe.default_exit_layer
    return max(1, config.num_hidden_layers // 3)


def random_head(config: ModelConfig, exit_layer: int) -> HeadTensors:
    """A head that knows nothing: what the controller must survive (tests and `eesd bench --head random`)."""
    if not 0 < exit_layer < config.num_hidden_layers:
        raise HeadError(f"exit layer {exit_layer}: the model allows 1 to {config.num_hidden_layers - 1}")
    generator = torch.Generator().manual_seed(0)
    shape = HeadShape.from_config(config)
    tensors = {
        name: torch.ones(size) if name.endswith("norm.weight") else torch.randn(size, generator=generator) * 0.02
        for name, size in shape.tensor_shapes().items()
    }
    return HeadTensors(exit_layer, shape, tensors, "", {}, {})
