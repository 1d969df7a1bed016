"""The linear layer of the engine: a kernel bound to its stored tensors."""

from __future__ import annotations

from torch import Tensor

from quant.kernels import Product, Stored


class GPTQLinear:
    """y = x W^T (+ bias). `stored` are views into a layer's blob, so binding costs nothing and copies nothing."""

    __slots__ = ("kernel", "stored")

    def __init__(self, kernel: Product, stored: Stored) -> None:
        self.kernel = kernel
        self.stored = stored

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        return self.kernel.matmul(x, self.stored)
