"""Bytes of everything that is allocated for a model, from its shape or from file headers, before anything is loaded.

The arithmetic of `packing`, `layer_blob` and `exit_head`, without a tensor: a test compares it with packed layers byte
for byte. `plan_request` turns it into what `placement.make_plan` takes. Plain Python; used by the loader and by
`eesd plan`, so that what is printed beforehand is what is allocated later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eesd_lite.config import ModelConfig
from eesd_lite.draft_weights import DraftWeights
from eesd_lite.errors import EesdError
from eesd_lite.placement import PlanRequest
from quant.block_module import block_state
from quant.model_folder import ModelFolder

PREFILL_CHUNK = 128  # rows that pass a layer together: bounds the scratch memory of a long prompt
LOGITS_ROWS = 8  # rows that share one pass over lm_head, and the most whose logits exist at a time
WAITING_ROWS = 64  # states that wait for the exit head: more of them save nothing further per row
RING_SLOTS = 3
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_ALIGNMENT, _PAGE = 64, 4096  # of every tensor in a blob, and of the blob
_INT4_ITEM = 2  # the int4 kernels keep scales and biases in bfloat16
_KERNEL_GROUPS = (256, 128, 64, 32)
_INT8_COLUMNS = 16  # of `quant.kernels_int8`
_BNB_BLOCK = 64  # weights that share a scale where a 16-bit matrix is loaded as nf4
_BLOCKS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "o": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One product as a layer stores it. `groups` are those of a GPTQ matrix, `block` is the length of a block in
    bitsandbytes' form; neither: 16 bit. `ordered`: the input order is stored (act-order)."""

    out_features: int
    in_features: int
    groups: int | None = None
    block: int | None = None
    bits: int = 4
    bias: bool = False
    ordered: bool = False


def kernel_for(device: str, dtype: str) -> str:
    """A name for the kernels that `loader.choose_kernels` would choose: dense, int4-cuda or int4-cpu.

    "+bf16" is added where the CPU multiplies bfloat16 itself, since bitsandbytes then stores its scales in it.
    """
    if dtype == "float32":
        return "dense"
    if device != "cpu":
        return "int4-cuda"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        flags = ""
    return "int4-cpu+bf16" if "avx512_bf16" in flags else "int4-cpu"


def kernel_group(part: Part, kernel: str) -> int | None:
    """The group size with which an int4 kernel takes the part; None: it is stored dequantized."""
    if part.groups is None or part.bits != 4 or kernel == "dense":
        return None
    if kernel == "int4-cuda" and (part.in_features % 128 or part.out_features % 8):
        return None
    if kernel.startswith("int4-cpu") and part.out_features % 16:
        return None
    if part.in_features % part.groups:
        return None  # groups of unequal length
    size = part.in_features // part.groups
    return next((group for group in _KERNEL_GROUPS if size % group == 0), None)


def part_bytes(part: Part, kernel: str, itemsize: int) -> tuple[int, ...]:
    """Bytes of every tensor that is stored for the part, in the order in which they are stored."""
    cells = part.out_features * part.in_features
    bias = [part.out_features] if part.bias else []
    group = kernel_group(part, kernel)
    if group is not None:
        pairs = part.in_features // group * part.out_features * 2
        order = [4 * part.in_features] if part.ordered else []
        return (cells // 2, pairs * _INT4_ITEM, *order, *(size * _INT4_ITEM for size in bias))
    if part.block is not None and kernel != "dense" and part.block <= 1024 and part.in_features % part.block == 0:
        scales = cells // part.block
        if kernel.endswith("+bf16") and part.out_features % 32 == 0:
            return (cells // 2, scales * _INT4_ITEM, 16 * 4, *(size * _INT4_ITEM for size in bias))
        return (cells // 2, scales * 4, *(size * _INT4_ITEM for size in bias))
    return (cells * itemsize, *(size * itemsize for size in bias))


def blob_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a blob that holds tensors of these sizes: each aligned, the whole in pages."""
    offset = 0
    for size in sizes:
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT + size
    return max(-(-offset // _PAGE), 1) * _PAGE


def layer_bytes(parts: Sequence[Part], norms: Sequence[int], *, kernel: str, itemsize: int) -> int:
    """Bytes of one packed layer; `norms` holds the lengths of its norm weights."""
    sizes = [size for part in parts for size in part_bytes(part, kernel, itemsize)]
    return blob_bytes([*sizes, *(length * itemsize for length in norms)])


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of every projection of a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip


def shape_layers(config: ModelConfig, *, group_size: int, bits: int = 4, kernel: str, itemsize: int) -> tuple[int, ...]:
    """Packed bytes of every layer of a quantized model of this shape, as `eesd synth` or `eesd quantize` writes it."""
    shapes = module_shapes(config)
    parts = []
    for _, names in _BLOCKS.values():
        in_features = shapes[names[0]][1]
        size = in_features if group_size == -1 else group_size
        parts.append(
            Part(
                out_features=sum(shapes[name][0] for name in names),
                in_features=in_features,
                groups=-(-in_features // size),
                bits=bits,
                bias=any(name in config.biases for name in names),
            )
        )
    norms = (config.hidden_size, config.hidden_size, *_head_norms(config))
    one = layer_bytes(parts, norms, kernel=kernel, itemsize=itemsize)
    return (one,) * config.num_hidden_layers


def folder_layers(
    folder: ModelFolder, config: ModelConfig, *, kernel: str, itemsize: int, quantize: bool = False
) -> tuple[int, ...]:
    """Packed bytes of every layer of a checkpoint, from its headers. `quantize`: 16-bit matrices are loaded as nf4.

    Headers do not tell whether a stored bias is all zero, and then dropped: it is counted; nor whether an act-order
    that the settings claim is a real one: it is believed. CheckpointError names a tensor that is missing or wrong.
    """
    settings = folder.quant_config
    ordered = settings is not None and settings.desc_act and not settings.static_groups
    sizes = []
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}"
        parts: list[Part] = []
        for block, names in _BLOCKS.values():
            parts += _fused([_part(folder, f"{prefix}.{block}.{name}", ordered, quantize) for name in names])
        norms = [
            folder.info(f"{prefix}.{name}.weight").shape[0]
            for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
            if f"{prefix}.{name}.weight" in folder
        ]
        sizes.append(layer_bytes(parts, norms, kernel=kernel, itemsize=itemsize))
    return tuple(sizes)


def has_own_table(folder: ModelFolder, config: ModelConfig) -> bool:
    """Whether lm_head takes bytes of its own: a quantized one always does, a 16-bit one where it is not tied."""
    return folder.is_quantized("lm_head") or not config.tie_word_embeddings


def _part(folder: ModelFolder, module: str, ordered: bool, quantize: bool) -> Part:
    bias = f"{module}.bias" in folder
    if folder.stored_blocks(module) is not None:
        state = block_state(folder.tensors, module)
        out_features, in_features = state.shape
        return Part(out_features=out_features, in_features=in_features, block=state.blocksize, bias=bias)
    if not folder.is_quantized(module):
        out_features, in_features = folder.info(f"{module}.weight").shape
        block = _BNB_BLOCK if quantize else None
        return Part(out_features=out_features, in_features=in_features, block=block, bias=bias)
    found = folder.module(module)
    return Part(
        out_features=found.out_features, in_features=found.in_features, groups=found.groups, bits=found.bits,
        bias=bias, ordered=ordered and found.groups > 1,
    )  # fmt: skip


def _fused(parts: list[Part]) -> list[Part]:
    """One product where the parts can share it, as `packing` does; orders that differ show in the tensors only."""
    first = parts[0]
    kinds = {(part.groups, part.block, part.bits, part.ordered) for part in parts}
    plain = first.groups is None and first.block is None
    torn = first.block is not None and any(part.out_features * part.in_features % first.block for part in parts)
    if len(parts) == 1 or len(kinds) > 1 or plain or torn:
        return parts
    return [
        Part(
            out_features=sum(part.out_features for part in parts), in_features=first.in_features, groups=first.groups,
            block=first.block, bits=first.bits, bias=any(part.bias for part in parts), ordered=first.ordered,
        )
    ]  # fmt: skip


def _head_norms(config: ModelConfig) -> tuple[int, ...]:
    """Lengths of the norms over heads of queries and of keys."""
    return (config.head_dim, config.head_dim) if config.qk_norm else ()


def draft_part_bytes(part: Part, draft: DraftWeights, kernel: str, itemsize: int) -> tuple[int, ...]:
    """As `part_bytes`, for a matrix in 16 bits that is rounded as `draft` says: `head_packing.pack_rounded`."""
    groups, cells = draft.groups(part.in_features), part.out_features * part.in_features
    if draft.bits == 8 and kernel.startswith("int4-cpu") and part.in_features % _INT8_COLUMNS == 0:
        return (cells, *(part.out_features * _INT4_ITEM for _ in range(2 if part.bias else 1)))
    return part_bytes(replace(part, groups=groups if draft.bits == 4 else None), kernel, itemsize)


def head_bytes(config: ModelConfig, itemsize: int, draft: DraftWeights | None = None, kernel: str = "dense") -> int:
    """Bytes that an exit head of this target takes in memory, without its keys and values."""
    shapes, hidden = module_shapes(config), config.hidden_size
    parts = [
        Part(
            out_features=sum(shapes[name][0] for name in names), in_features=shapes[names[0]][1],
            bias=any(name in config.biases for name in names),
        )
        for _, names in _BLOCKS.values()
    ]  # fmt: skip
    parts.append(Part(out_features=hidden, in_features=hidden, bias=True))  # the affine map
    products = [
        size for part in parts for size in draft_part_bytes(part, draft or DraftWeights(), kernel, itemsize)
    ]  # fmt: skip
    norms = [hidden, hidden, *_head_norms(config), hidden]
    return blob_bytes([*products, *(length * itemsize for length in norms)])


def draft_vocabulary_bytes(config: ModelConfig, itemsize: int, draft: DraftWeights, kernel: str) -> int:
    """Bytes of the copy of lm_head from which the head drafts; 0 where it uses the target's own."""
    rows = Part(out_features=draft.rows(config.vocab_size), in_features=config.hidden_size)
    return sum(draft_part_bytes(rows, draft, kernel, itemsize))


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token in one layer."""
    return 2 * config.num_key_value_heads * config.head_dim * itemsize


def plan_request(
    config: ModelConfig,
    *,
    layers: Sequence[int],
    tied: bool,
    itemsize: int,
    context: int,
    draft_limit: int,
    exit_layer: int | None,
    device_memory: int | None,
    resident_layers: int | None = None,
    head: bool = True,
    draft: DraftWeights | None = None,
    kernel: str = "dense",
) -> PlanRequest:
    """What there is to place for a target with these packed layers; tiers beyond device and disk can be added to it.

    `head`: there is an exit head for `exit_layer`, with weights as `draft` says, for `kernel` where they are rounded.
    """
    draft = draft or DraftWeights()
    table = config.vocab_size * config.hidden_size * itemsize
    widest = max(
        2 * config.intermediate_size, (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    )
    # Activations of one chunk of rows, and logits.
    chunk = PREFILL_CHUNK * (widest + config.intermediate_size + 4 * config.hidden_size) * 4
    return PlanRequest(
        layer_bytes=tuple(layers),
        kv_bytes_per_token=kv_bytes_per_token(config, itemsize),
        # Cosines and sines; once more where some layers have a table that turns nothing.
        rope_bytes_per_token=(4 if config.unrotated_layers else 2) * (config.head_dim // 2) * 4,
        context=context,
        draft_slack=draft_limit,
        embedding_bytes=table,
        lm_head_bytes=0 if tied else table,
        norm_bytes=config.hidden_size * itemsize,
        head_bytes=head_bytes(config, itemsize, draft, kernel) if exit_layer is not None and head else 0,
        head_state_bytes=WAITING_ROWS * config.hidden_size * 4,
        draft_vocabulary_bytes=draft_vocabulary_bytes(config, itemsize, draft, kernel),
        scratch_bytes=chunk + min(draft_limit + 1, LOGITS_ROWS) * config.vocab_size * 4,
        scratch_bytes_per_token=config.hidden_size * 4,  # the states of a whole prompt
        ring_slots=RING_SLOTS,
        exit_layer=exit_layer,
        device_memory=device_memory,
        resident_layers=resident_layers,
    )


def default_context(config: ModelConfig, asked: int | None) -> int:
    """The context to plan for: what was asked, else 2048 or less."""
    longest = config.longest_context
    if asked is None:
        return min(longest, 2048)
    config.check_length(asked)
    if not 8 <= asked <= longest:
        raise EesdError(f"context must be from 8 to {longest} for this model, not {asked}")
    return asked
