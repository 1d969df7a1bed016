"""A plan for a model that is not loaded, or that is only a shape: what `eesd plan` prints.

Sizes come from file headers (or from the shape), so that a 70B is planned in a moment and without torch. The plan is
the one that loading would make with the same wishes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from eesd_lite.config import ModelConfig, RopeScaling
from eesd_lite.draft_weights import DraftWeights, usual_bits
from eesd_lite.errors import EesdError, HeadError, ModelError
from eesd_lite.exit_choice import AUTO, ExitTable, ExitWish, settle_exit, split_exits
from eesd_lite.head_list import ON_ANSWERS, expected_shares, heads_at_hand, usual_exit
from eesd_lite.packed_beside import packed_beside
from eesd_lite.placement import Plan, PlanRequest, make_plan
from eesd_lite.plan_cost import Rates, SweepCost, sweep_cost
from eesd_lite.prepare import find_local
from eesd_lite.sizing import (
    DTYPE_BYTES,
    default_context,
    folder_layers,
    has_own_table,
    kernel_for,
    plan_request,
    shape_layers,
)
from eesd_lite.tiers import draft_capable
from models.shapes import Shape, find_shape
from quant.model_folder import ModelFolder

GIB = 1 << 30
PRESETS = {"8gb": (8, 16), "12gb": (12, 32), "16gb": (16, 32), "24gb": (24, 64)}  # GiB: the card, and RAM beside it
DEVICE_RESERVE, HOST_RESERVE = 16, 8  # a preset leaves one part in so many to display and driver, and to the system


@dataclass(frozen=True, kw_only=True)
class PlanWishes:
    """What the user asked for; sizes in bytes, None: no limit, or no such tier."""

    device: str = "cpu"  # which kernels, and whether there is a link at all
    device_memory: int | None = None
    host_memory: int | None = None
    reserve: int = 0
    host_reserve: int = 0
    context: int | None = None
    exit_layer: ExitWish = None  # None: the model's, or a third of the depth; 0: plain decoding; "auto", or several
    head: str | None = None  # a head file, or a folder of them, instead of those that belong to the model
    agreements: tuple[tuple[int, float], ...] = ()  # (exit layer, agreement) of heads that are only supposed
    resident_layers: int | None = None
    draft_limit: int = 16
    dtype: str = "bfloat16"
    host_mode: str = "stream"
    head_bits: int | None = None  # None: as the engine would choose
    draft_vocab: int | str | None = None
    quantize: bool = False  # a 16-bit model is loaded in bitsandbytes' 4-bit form
    rates: Rates = field(default_factory=Rates)

    @classmethod
    def preset(cls, name: str) -> PlanWishes:
        """A card of that size in an ordinary desktop."""
        card, host = (size * GIB for size in PRESETS[name])
        return cls(
            device="cuda", device_memory=card, host_memory=host, reserve=card // DEVICE_RESERVE,
            host_reserve=host // HOST_RESERVE,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The plan and what it was made from."""

    name: str
    config: ModelConfig
    request: PlanRequest
    plan: Plan
    cost: SweepCost
    draft_capable: range  # exit layers at which the budgets allow drafting, given a head
    heads: tuple[int, ...]  # exit layers for which there is a head
    notes: tuple[str, ...]
    exits: ExitTable | None = None  # where the exit layer was chosen by what it promises


def plan_shape(name: str, wishes: PlanWishes, *, group_size: int | None = None) -> PlannedModel:
    """A plan for a named shape in 4 bit. Raises RecipeError for an unknown one, BudgetError if nothing fits."""
    shape = find_shape(name)
    config = shape_config(shape)
    kernel, itemsize = _storage(wishes)
    layers = shape_layers(
        config, group_size=group_size or shape.group_size, kernel=kernel,
        itemsize=itemsize,
    )  # fmt: skip
    return _planned(name, config, layers, shape.tie_word_embeddings, wishes, heads={})


def plan_model(model: str | Path, wishes: PlanWishes, *, weights: str | None = None) -> PlannedModel:
    """A plan for a model on this machine, from its headers; `weights` names the file where a folder holds several.

    Raises ModelError, CheckpointError or BudgetError.
    """
    source = find_local(model)
    config = ModelConfig.from_folder(source.folder)
    opened = ModelFolder(source.folder, weights)
    kernel, itemsize = _storage(wishes)
    packed = packed_beside(source.folder)
    if packed is not None and "model.layers.0.input_layernorm.weight" not in opened:
        layers = packed.layers
    else:
        layers = folder_layers(opened, config, kernel=kernel, itemsize=itemsize, quantize=wishes.quantize)
    heads = expected_shares(heads_at_hand(source, wishes.head))
    tied = not has_own_table(opened, config)
    default = usual_exit(source, heads) if wishes.exit_layer is None and heads else None
    return _planned(source.name, config, layers, tied, wishes, heads=heads, default=default)


def shape_config(shape: Shape) -> ModelConfig:
    """The shape as a loaded config.json would give it."""
    scaling = None
    if shape.rope_scaling is not None:
        scaling = RopeScaling(**shape.rope_scaling)
    return ModelConfig(
        model_type=shape.model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        biases=("q_proj", "k_proj", "v_proj") if shape.attention_bias else (),
    )


def _storage(wishes: PlanWishes) -> tuple[str, int]:
    """The kernel and the bytes of a 16- or 32-bit number, as `loader.choose_kernels` would choose."""
    if wishes.dtype not in DTYPE_BYTES:
        raise EesdError(f"dtype must be bfloat16 or float32, not '{wishes.dtype}'")
    return kernel_for(wishes.device, wishes.dtype), DTYPE_BYTES[wishes.dtype]


def _planned(
    name: str, config: ModelConfig, layers: tuple[int, ...], tied: bool, wishes: PlanWishes, *,
    heads: dict[int, float | None], default: int | None = None,
) -> PlannedModel:  # fmt: skip
    kernel = _storage(wishes)[0]
    draft = DraftWeights(usual_bits(kernel) if wishes.head_bits is None else wishes.head_bits, wishes.draft_vocab)
    draft.check(config.vocab_size)
    supposed = {exit_layer: ON_ANSWERS * share for exit_layer, share in wishes.agreements}
    deepest, others = split_exits(wishes.exit_layer)
    named = [layer for layer in (deepest, *supposed) if isinstance(layer, int)]
    if named and max(named) >= (layer_count := config.num_hidden_layers):
        words = f"this model has {layer_count} layers, exits are 1 to {layer_count - 1}"
        raise ModelError(f"exit layer {max(named)}: {words}")
    if wishes.exit_layer == AUTO and not heads | supposed:
        raise HeadError(f"{name}: {AUTO} chooses among exit heads, and there are none; see eesd train or --agreement")
    notes: list[str] = []
    third = max(1, config.num_hidden_layers // 3)
    asked = deepest if isinstance(deepest, int) else default
    exit_layer = third if asked is None else asked
    request = replace(
        plan_request(
            config, layers=layers, tied=tied, itemsize=DTYPE_BYTES[wishes.dtype],
            context=default_context(config, wishes.context), draft_limit=wishes.draft_limit,
            exit_layer=exit_layer or None, device_memory=wishes.device_memory, resident_layers=wishes.resident_layers,
            draft=draft, kernel=kernel,
        ),
        host_memory=wishes.host_memory, reserve_bytes=wishes.reserve, host_reserve_bytes=wishes.host_reserve,
        host_mode=wishes.host_mode, other_exits=others,
        staging=wishes.device != "cpu", link_rate=wishes.rates.link or 1, host_rate=wishes.rates.host,
    )  # fmt: skip
    capable = draft_capable(request) if exit_layer else range(0)
    exits = None
    if wishes.exit_layer == AUTO or default is not None:
        settled = settle_exit(request, heads | supposed, wishes.rates, default=default)
        exit_layer, exits = settled.exit_layer or 0, settled.table
        notes += settled.notes
        request = replace(request, exit_layer=exit_layer or None)
    elif asked is None:
        if capable and capable[-1] < exit_layer:
            exit_layer = capable[-1]
            request = replace(request, exit_layer=exit_layer)
        words = "a third of the depth, or the deepest that fits"
        notes.append(f"exit layer {exit_layer} is assumed, {words}; --exit-layer chooses another")
    missing = [layer for layer in (*others, exit_layer) if layer and layer not in heads]
    notes += [f"there is no exit head for layer {layer} yet: the plan keeps room for one" for layer in missing]
    plan = make_plan(request)
    return PlannedModel(
        name=name,
        config=config,
        request=request,
        plan=plan,
        cost=sweep_cost(plan, wishes.rates),
        draft_capable=capable,
        heads=tuple(sorted(heads)),
        notes=(*notes, *plan.notes),
        exits=exits,
    )
