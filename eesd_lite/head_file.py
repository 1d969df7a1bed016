"""Exit head files: safetensors with only the head's own tensors in bfloat16, and metadata that says whose head it is.

The fingerprint covers the tensors that quantization leaves alone (embeddings, norms), so that a head stays valid for
anyone's quantization of the same model. A head of other shapes is always refused; one of another target unless forced,
because a wrong head can only cost speed. Written by `distill`, read by the engine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eesd_lite.config import ModelConfig
from eesd_lite.errors import HeadError
from eesd_lite.head_list import FORMAT
from eesd_lite.head_prior import NO_PRIOR, HeadPrior, read_prior
from eesd_lite.layer_shapes import HeadShape
from quant.checkpoint import Checkpoint

ACCEPTANCE = "acceptance"  # metadata that a head may lack: how often it was right
DRAFT_VOCAB = "draft_vocab"  # the one tensor that a head may lack
_SHAPE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@dataclass(frozen=True)
class HeadTensors:
    """A loaded head. `metadata` is the file's own, `summary` its decoded training summary, `prior` its own acceptance
    (of no worth, hence none, with another target)."""

    exit_layer: int
    shape: HeadShape
    tensors: dict[str, Tensor]
    fingerprint: str
    summary: dict[str, object]
    metadata: dict[str, str]
    prior: HeadPrior = NO_PRIOR
    draft_vocab: Tensor | None = None  # int32, token ids by their frequency in the training text, most frequent first


def fingerprint_names(num_hidden_layers: int) -> list[str]:
    """The tensors that quantization leaves alone, in the order in which they are hashed."""
    names = ["model.embed_tokens.weight"]
    for layer in range(num_hidden_layers):
        names.append(f"model.layers.{layer}.input_layernorm.weight")
        names.append(f"model.layers.{layer}.post_attention_layernorm.weight")
    return [*names, "model.norm.weight"]


def target_fingerprint(config: ModelConfig, tensor: Callable[[str], Tensor]) -> str:
    """sha256 over config shape keys and the unquantized tensors as little-endian float16, whatever their dtype.

    `tensor` gives a tensor by its name, one at a time.
    """
    digest = hashlib.sha256(json.dumps({key: getattr(config, key) for key in _SHAPE_KEYS}).encode())
    for name in fingerprint_names(config.num_hidden_layers):
        digest.update(name.encode())
        for rows in tensor(name).detach().split(4096):  # an embedding table is hashed without a second copy of it
            digest.update(rows.to(torch.float32).to(torch.float16).contiguous().cpu().numpy().astype("<f2").tobytes())
    return digest.hexdigest()


def folder_fingerprint(folder: Path, config: ModelConfig, weights: str | None = None) -> str:
    """The fingerprint of a model folder (16-bit or quantized: the same model gives the same value).

    CheckpointError where it lacks a tensor or cannot be read; `weights` as for `quant.checkpoint.Checkpoint`.
    """
    return target_fingerprint(config, Checkpoint(Path(folder), weights).tensor)


def states_fingerprint(
    folder: Path, config: ModelConfig, quantize: str | None = None, weights: str | None = None
) -> str:
    """Names the teacher: states of a model in 16 bit are not those of the same folder in nf4."""
    return folder_fingerprint(folder, config, weights) + (f"-{quantize}" if quantize else "")


def save_head(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    config: ModelConfig,
    exit_layer: int,
    fingerprint: str,
    summary: Mapping[str, object],
    draft_vocab: Tensor | None = None,
) -> None:
    """Write a head atomically. `summary` is free-form JSON: tokens, minutes, agreement; `draft_vocab` as loaded."""
    shape = HeadShape.from_config(config)
    _check_exit(str(path), exit_layer, config)
    _check_shapes(str(path), {name: tuple(t.shape) for name, t in tensors.items()}, shape)
    scaling = config.rope_scaling
    metadata = {
        "format": FORMAT,
        "exit_layer": str(exit_layer),
        "fingerprint": fingerprint,
        "config": json.dumps({key: getattr(config, key) for key in _SHAPE_KEYS}),
        "rms_norm_eps": repr(config.rms_norm_eps),
        "rope": json.dumps({"rope_theta": config.rope_theta, "rope_scaling": _plain(scaling)}),
        "summary": json.dumps(dict(summary)),
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        ready = {name: tensors[name].detach().to("cpu", torch.bfloat16).contiguous() for name in shape.tensor_shapes()}
        if draft_vocab is not None:
            _check_draft_vocab(str(path), draft_vocab, config)
            ready[DRAFT_VOCAB] = draft_vocab.contiguous()
        save_file(ready, str(temporary), metadata=metadata)
        temporary.chmod(0o644)  # safetensors writes for the owner only; a shipped head is read by everyone
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_head(path: Path, config: ModelConfig, fingerprint: str | None = None, force: bool = False) -> HeadTensors:
    """Read and validate a head for the target that `config` describes.

    `fingerprint` None skips that comparison; `force` overrides a mismatch. Shapes are never negotiable.
    """
    path = Path(path)
    if not path.is_file():
        raise HeadError(f"{path}: no such head file; `eesd train` makes one, or use --head off")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata)
            exit_layer = int(metadata["exit_layer"])
            _check_exit(str(path), exit_layer, config)
            _check_vocabulary(path, json.loads(metadata["config"]), config)
            shape = HeadShape.from_config(config)
            names = set(file.keys()) - {DRAFT_VOCAB}
            _check_shapes(str(path), {name: tuple(file.get_slice(name).get_shape()) for name in names}, shape)
            theirs = metadata["fingerprint"]
            if fingerprint is not None and theirs != fingerprint and not force:
                raise HeadError(
                    f"{path}: made for another target (fingerprint {theirs[:12]}, this model is {fingerprint[:12]}); "
                    "train one for this model, or take it all the same with --force-head (it can only cost speed)"
                )
            tensors = {name: file.get_tensor(name).to(torch.bfloat16) for name in shape.tensor_shapes()}
            draft_vocab = file.get_tensor(DRAFT_VOCAB) if DRAFT_VOCAB in file.keys() else None
            if draft_vocab is not None:
                _check_draft_vocab(str(path), draft_vocab, config)
            summary = json.loads(metadata.get("summary", "{}"))
            prior = read_prior(metadata.get(ACCEPTANCE)) if fingerprint in (None, theirs) else NO_PRIOR
    except SafetensorError as error:
        raise HeadError(f"{path}: not a head file, or truncated ({error}); copy or train it again") from None
    except (KeyError, ValueError, RecursionError) as error:
        raise HeadError(f"{path}: damaged head metadata ({error}); copy or train it again") from None
    return HeadTensors(exit_layer, shape, tensors, theirs, summary, dict(metadata), prior, draft_vocab)


def write_acceptance(path: Path, prior: HeadPrior) -> None:
    """Put a head's acceptance into its file, in place of what it said before; its tensors keep their bytes.

    HeadError for what is no safetensors file.
    """
    try:
        stored = path.read_bytes()
        size = int.from_bytes(stored[:8], "little")
        header = json.loads(stored[8 : 8 + size])
        header["__metadata__"][ACCEPTANCE] = json.dumps(prior.as_dict(), separators=(",", ":"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HeadError(f"{path}: not a head file ({error})") from None
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as safetensors aligns its data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(len(text).to_bytes(8, "little") + text + stored[8 + size :])
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if "format" not in metadata or not metadata["format"].startswith("eesd-head-"):
        raise HeadError(f"{path}: not a head file (no eesd-head format in its metadata)")
    if metadata["format"] != FORMAT:
        raise HeadError(f"{path}: head format {metadata['format']}, this version reads {FORMAT}; train it again")


def _check_exit(where: str, exit_layer: int, config: ModelConfig) -> None:
    if not 0 < exit_layer < config.num_hidden_layers:
        raise HeadError(f"{where}: exit layer {exit_layer}, the model allows 1 to {config.num_hidden_layers - 1}")


def _check_vocabulary(path: Path, made_for: object, config: ModelConfig) -> None:
    """A head feeds the target's own lm_head: made for other rows, its guesses would be of other tokens."""
    theirs = made_for.get("vocab_size") if isinstance(made_for, dict) else None
    if theirs != config.vocab_size:
        raise HeadError(
            f"{path}: made for a model with vocab_size {theirs}, this model has {config.vocab_size}; "
            "it is a head for another model"
        )


def _check_shapes(where: str, found: Mapping[str, tuple[int, ...]], shape: HeadShape) -> None:
    wanted = shape.tensor_shapes()
    for name, size in wanted.items():
        if name not in found:
            raise HeadError(f"{where}: tensor {name} is missing; copy or train the head again")
        if tuple(found[name]) != size:
            raise HeadError(
                f"{where}: {name} has shape {list(found[name])}, this model needs {list(size)}; "
                "it is a head for another model"
            )
    extra = sorted(set(found) - set(wanted))
    if extra:
        raise HeadError(f"{where}: unknown tensor {extra[0]} ({len(extra)} in all); not a head of this format")


def _check_draft_vocab(where: str, ids: Tensor, config: ModelConfig) -> None:
    if ids.dtype != torch.int32 or ids.dim() != 1:
        kind = str(ids.dtype).removeprefix("torch.")
        raise HeadError(f"{where}: {DRAFT_VOCAB} is {kind} {list(ids.shape)}, not a list of int32; train it again")
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if len(wrong):
        raise HeadError(
            f"{where}: {DRAFT_VOCAB} names token {int(wrong[0])}, this model has {config.vocab_size}; train it again"
        )
    known, counts = torch.unique(ids, return_counts=True)
    if len(known) < len(ids):
        twice = int(known[counts > 1][0])
        raise HeadError(f"{where}: {DRAFT_VOCAB} names token {twice} more than once; train it again")


def _plain(value: object) -> object:
    """A dataclass (or None) as JSON-ready data."""
    if value is None or isinstance(value, (dict, str, int, float)):
        return value
    return {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
