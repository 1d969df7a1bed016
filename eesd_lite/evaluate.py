"""`eesd eval`: perplexity of a model, and its Kullback-Leibler divergence from a reference, on the same token ids.

Figures for quantized models come in pairs: perplexity says how well text is predicted, KLD(reference || model) how
far the distribution has moved, which is the finer instrument. Log-softmax is float32 throughout. A folder is run by
transformers on its (dequantized) weights, an oracle independent of our forward, or by our own Engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from eesd_lite.config import ModelConfig
from eesd_lite.errors import ModelError, PromptError
from eesd_lite.progress import Progress, no_progress
from quant.checkpoint import Checkpoint

WINDOW = 512  # tokens that predict each other; windows do not overlap
BLOCK_ROWS = 128  # positions whose logits are in memory at once, for each of the two models
_QUANTIZED_PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Scorer(Protocol):
    """Anything that gives the logits of every position of a sequence."""

    def blocks(self, ids: Sequence[int], rows: int) -> Iterator[Tensor]:
        """Float32 logits [at most `rows`, vocab] for positions 0, 1, ... in order; all blocks but the last are full."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """Averages over `tokens` predicted positions; what needs a reference is None without one."""

    tokens: int
    sequences: int
    nll: float  # mean negative log-likelihood, in nats
    reference_nll: float | None = None
    kld: float | None = None  # mean KLD(reference || model), in nats
    kld_median: float | None = None
    kld_99: float | None = None  # 99th percentile: the worst positions, where text goes astray
    kld_max: float | None = None
    agreement: float | None = None  # share of positions where both have the same most likely token

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll, 700.0))

    @property
    def reference_perplexity(self) -> float | None:
        return None if self.reference_nll is None else math.exp(min(self.reference_nll, 700.0))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"perplexity": self.perplexity, "reference_perplexity": self.reference_perplexity, **vars(self)}


def evaluate(
    model: Scorer,
    sequences: Sequence[Sequence[int]],
    *,
    reference: Scorer | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """Runs all sequences through the model, and the reference if there is one.

    PromptError where there is nothing to predict, ModelError where a perplexity is not finite.
    """
    usable = [list(ids) for ids in sequences if len(ids) > 1]
    if not usable:
        raise PromptError("nothing to evaluate: no sequence has two tokens or more")
    total = sum(len(ids) - 1 for ids in usable)
    sums = {"nll": 0.0, "reference_nll": 0.0, "same": 0.0}
    divergences: list[Tensor] = []
    done = 0
    for ids in usable:
        theirs = reference.blocks(ids[:-1], BLOCK_ROWS) if reference is not None else None
        start = 1
        for logits in model.blocks(ids[:-1], BLOCK_ROWS):
            progress("evaluating, token", done, total)
            targets = torch.tensor(ids[start : start + len(logits)])
            start += len(logits)
            done += len(logits)
            log_model = torch.log_softmax(logits.float(), dim=-1)
            sums["nll"] -= _chosen(log_model, targets)
            _check_finite("model", sums["nll"], done)
            if theirs is not None:
                log_reference = torch.log_softmax(next(theirs).float(), dim=-1)
                assert log_reference.shape == log_model.shape, (log_reference.shape, log_model.shape)
                sums["reference_nll"] -= _chosen(log_reference, targets)
                _check_finite("reference", sums["reference_nll"], done)
                sums["same"] += float((log_reference.argmax(-1) == log_model.argmax(-1)).sum())
                divergences.append(_divergence(log_reference, log_model))
        assert start == len(ids), f"{start - 1} of {len(ids) - 1} positions were scored"
    progress("evaluating, token", total, total)
    found = Evaluation(tokens=total, sequences=len(usable), nll=sums["nll"] / total)
    return _with_reference(found, sums, divergences) if divergences else found


def _with_reference(found: Evaluation, sums: dict[str, float], divergences: list[Tensor]) -> Evaluation:
    values = torch.cat(divergences).sort().values
    count = len(values)
    return Evaluation(
        tokens=found.tokens,
        sequences=found.sequences,
        nll=found.nll,
        reference_nll=sums["reference_nll"] / count,
        kld=float(values.mean()),
        kld_median=float(values[count // 2]),
        kld_99=float(values[min(count - 1, int(count * 0.99))]),
        kld_max=float(values[-1]),
        agreement=sums["same"] / count,
    )


def _chosen(log_probs: Tensor, targets: Tensor) -> float:
    return float(log_probs.gather(1, targets[:, None]).double().sum())


def _check_finite(whose: str, nll: float, tokens: int) -> None:
    if not math.isfinite(nll):
        raise ModelError(
            f"the perplexity of the {whose} is not finite within the first {tokens} tokens: the weights "
            "are damaged or too large for the dtype; eesd eval --engine names the layer where that begins"
        )


def _divergence(log_reference: Tensor, log_model: Tensor) -> Tensor:
    """KLD per row, [rows], in float64 from the sum on. A token the reference rules out adds 0, not 0 * inf."""
    terms = log_reference.exp() * (log_reference - log_model)
    return terms.masked_fill_(log_reference == -math.inf, 0.0).double().sum(-1).clamp_(min=0.0)


class TransformersScorer:
    """A folder run by transformers: the independent forward."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def from_folder(
        cls, folder: Path, dtype: torch.dtype = torch.float32, quantize: str | None = None, weights: str | None = None
    ) -> TransformersScorer:
        return cls(transformers_model(folder, dtype, quantize, weights))

    @torch.inference_mode()
    def blocks(self, ids: Sequence[int], rows: int) -> Iterator[Tensor]:
        hidden = self.model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
        for part in hidden.split(rows):
            yield self.model.lm_head(part).float()


def transformers_model(
    folder: Path, dtype: torch.dtype, quantize: str | None = None, weights: str | None = None
) -> Any:
    """transformers' own model on the weights of a folder of any kind, in `dtype`, no quantized kernel anywhere.

    `quantize`: a 16-bit folder's weights are rounded to nf4 or fp4 on the way. `weights`: the file of several.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: transformers cannot read config.json ({_one_line(error)})") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights handed over are no longer quantized
    state = dequantized_state(
        Checkpoint(folder, weights, quantize=quantize), dtype, biases=ModelConfig.from_folder(folder).biases
    )
    transformers.utils.logging.disable_progress_bar()  # ours is shown instead
    family: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, info = family.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return model.eval()


def dequantized_state(checkpoint: Checkpoint, dtype: torch.dtype, *, biases: Sequence[str] = ()) -> dict[str, Tensor]:
    """All weights of a folder under Hugging Face's names, quantized matrices multiplied out.

    An all-zero bias in a model without biases would be an unknown key; projections in `biases` keep theirs.
    """
    state: dict[str, Tensor] = {}
    for name in checkpoint.tensors:
        module, _, part = name.rpartition(".")
        owner, inner, _ = name.partition(".weight.")
        if name.endswith("rotary_emb.inv_freq") or (inner and checkpoint.stored_blocks(owner)):
            continue  # old files store the first, it is computed; the second describes `<owner>.weight`
        if part == "qweight" or (part == "weight" and checkpoint.has_blocks(module)):
            state[f"{module}.weight"] = checkpoint.dequantized(module).to(dtype)
        elif part == "bias":
            bias = checkpoint.tensor(name)
            if module.rpartition(".")[2] in biases or bool(bias.any()):
                state[name] = bias.to(dtype)
        elif not (part in _QUANTIZED_PARTS and checkpoint.is_quantized(module)):
            state[name] = checkpoint.tensor(name).to(dtype)
    return state


def read_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """Token ids from JSONL: a list of ids, or an object with `ids`, a line."""
    sequences = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise PromptError(f"{path}, line {number}: not JSON ({error})") from error
        ids = value.get("ids") if isinstance(value, dict) else value
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise PromptError(f"{path}, line {number}: expected a list of token ids from 0 to {vocab_size - 1}")
        sequences.append(ids)
    return sequences


def read_text(path: Path, encode: Any, *, first: Sequence[int] = (), window: int = WINDOW) -> list[list[int]]:
    """A text file as windows of token ids, each beginning with `first` (a BOS, for models that expect one)."""
    return windows(encode(_read_text(path)), first=first, window=window)


def windows(ids: Sequence[int], *, first: Sequence[int] = (), window: int = WINDOW) -> list[list[int]]:
    """Cuts a long sequence into windows that do not overlap; a tail too short to predict anything is dropped."""
    step = window - len(first)
    if step < 2:
        raise PromptError(f"a window of {window} tokens is too short; take at least {len(first) + 2}")
    parts = [[*first, *ids[start : start + step]] for start in range(0, len(ids), step)]
    return [part for part in parts if len(part) > 1]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
