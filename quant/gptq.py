"""GPTQ for one matrix (Frantar et al., arXiv 2210.17323, algorithm 1), and round-to-nearest as its yardstick.

Columns are quantized in order; the error of each is pushed onto the columns that are still to come, along the inverse
Hessian of the layer's inputs. The layer-by-layer driver that supplies the Hessians is `eesd_lite.quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.matrix import QuantizedMatrix

BLOCK_COLUMNS = 128  # about so many columns share one lazy update of the rest (paper, section 3.3, step 2)


@dataclass(frozen=True)
class GridSettings:
    """How a group of weights becomes a grid. `group_size` -1 means one group over all input features."""

    bits: int = 4
    group_size: int = 64
    sym: bool = True
    desc_act: bool = False
    damp_percent: float = 0.01
    least_zero: int = 0  # 1 where zero points are stored minus one: readers disagree about what a 0 becomes
    shrink_steps: int = 16  # candidate clippings of the range, 1.0 down to 0.7; 1 = no search


def find_grid(weights: Tensor, settings: GridSettings) -> tuple[Tensor, Tensor]:
    """Scale and zero point per row for one group, `weights` float32 [out, group] -> (scales [out], zeros int32 [out]).

    Among a few clippings of the range the one with the least squared error wins. Scales are rounded to bfloat16, whose
    mantissa float16 holds exactly: file, int4 kernel and reference then use the very same number.
    """
    max_code = 2**settings.bits - 1
    low = weights.amin(dim=1).clamp(max=0)
    high = weights.amax(dim=1).clamp(min=0)
    if settings.sym:
        high = torch.maximum(-low, high)
        low = -high
    low = torch.minimum(low, -high * settings.least_zero / (max_code - settings.least_zero))
    flat = (high - low) <= 0
    low, high = torch.where(flat, -1.0, low), torch.where(flat, 1.0, high)
    best_error = torch.full_like(low, float("inf"))
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for step in range(settings.shrink_steps):
        shrink = 1.0 - 0.3 * step / max(settings.shrink_steps - 1, 1)
        scale = ((high - low) * shrink / max_code).clamp(min=2.0**-14).to(torch.bfloat16).to(torch.float32)
        zero = torch.full_like(scale, (max_code + 1) / 2) if settings.sym else torch.round(-low * shrink / scale)
        zero = zero.clamp(settings.least_zero, max_code)
        codes = torch.clamp(torch.round(weights / scale[:, None]) + zero[:, None], 0, max_code)
        error = ((codes - zero[:, None]) * scale[:, None] - weights).pow(2).sum(dim=1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero.to(torch.int32)


def _encode(column: Tensor, scale: Tensor, zero: Tensor, max_code: int) -> Tensor:
    return torch.clamp(torch.round(column / scale) + zero, 0, max_code)


def round_to_nearest(weight: Tensor, settings: GridSettings) -> QuantizedMatrix:
    """Quantize `weight` [out, in] group by group without looking at any input: the baseline that GPTQ must beat."""
    out_features, in_features = weight.shape
    group = in_features if settings.group_size == -1 else settings.group_size
    codes = torch.empty(out_features, in_features, dtype=torch.uint8)
    scales, zeros = [], []
    for start in range(0, in_features, group):
        part = weight[:, start : start + group].to(torch.float32)
        scale, zero = find_grid(part, settings)
        codes[:, start : start + group] = _encode(part, scale[:, None], zero[:, None], 2**settings.bits - 1).to(
            torch.uint8
        )
        scales.append(scale)
        zeros.append(zero)
    g_idx = torch.arange(in_features) // group
    return QuantizedMatrix(codes, torch.stack(scales), torch.stack(zeros), g_idx, settings.bits)


def inverse_factor(hessian: Tensor, damp_percent: float) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped `hessian` [in, in]; damping grows until there is one."""
    damp = damp_percent * hessian.diagonal().mean()
    for _ in range(8):
        damped = hessian + damp * torch.eye(hessian.shape[0], dtype=hessian.dtype)
        factor, info = torch.linalg.cholesky_ex(damped)
        if info.item() == 0:
            # Rounding may spoil the inverse of a nearly singular matrix, so it is checked too.
            inverse_upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if info.item() == 0:
                return inverse_upper
        damp = damp * 10
    raise ArithmeticError(f"Hessian of size {hessian.shape[0]} is not positive definite even with damping {damp:.3g}")


def gptq_quantize(weight: Tensor, hessian: Tensor, settings: GridSettings) -> QuantizedMatrix:
    """Quantize `weight` float32 [out, in] so that the error on inputs with second moment `hessian` [in, in] is small.

    With `desc_act` columns are taken in order of falling Hessian diagonal, so groups follow that order and `g_idx`
    records them. Raises ArithmeticError when the Hessian holds non-finite values or cannot be inverted.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise ArithmeticError("the Hessian of the inputs holds non-finite values")
    weight, hessian = weight.to(torch.float32).clone(), hessian.to(torch.float32).clone()
    out_features, in_features = weight.shape
    group = in_features if settings.group_size == -1 else settings.group_size
    dead = hessian.diagonal() == 0  # inputs that never fire: their weights cannot matter
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    order = torch.argsort(hessian.diagonal(), descending=True) if settings.desc_act else torch.arange(in_features)
    weight = weight[:, order]
    factor = inverse_factor(hessian[order][:, order], settings.damp_percent)

    max_code = 2**settings.bits - 1
    codes = torch.empty(out_features, in_features)
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    block = group * max(1, BLOCK_COLUMNS // group)  # whole groups: a grid must see all errors made before it
    for start in range(0, in_features, block):
        end = min(start + block, in_features)
        errors = torch.empty(out_features, end - start)
        for column in range(start, end):
            if column % group == 0:
                scale, zero = find_grid(weight[:, column : column + group], settings)
                scales.append(scale)
                zeros.append(zero)
            code = _encode(weight[:, column], scales[-1], zeros[-1], max_code)
            codes[:, column] = code
            error = (weight[:, column] - (code - zeros[-1]) * scales[-1]) / factor[column, column]
            weight[:, column + 1 : end] -= torch.outer(error, factor[column, column + 1 : end])
            errors[:, column - start] = error
        weight[:, end:] -= errors @ factor[start:end, end:]

    inverse = torch.argsort(order)
    g_idx = (torch.arange(in_features) // group)[inverse]
    return QuantizedMatrix(
        codes[:, inverse].to(torch.uint8), torch.stack(scales), torch.stack(zeros), g_idx, settings.bits
    )
