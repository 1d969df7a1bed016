"""The layer arithmetic on a CPU in bfloat16, fused: the fast counterpart of `TorchOps`, with the same contract.

Each operation is one or two calls of a compiled kernel. Large ones run on torch's own OpenMP threads: a second pool
would fight with torch's workers, which spin for a while after each int4 product. Results depend neither on the number
of threads nor on the rows that share a call. An instance keeps no scratch memory, so threads may share it.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from pathlib import Path
from typing import Any

import torch

from eesd_lite.cache import Rows
from eesd_lite.ops import QKNorm, Reach
from eesd_lite.progress import Progress, no_progress

_SMALL_WORK = 300_000  # products below which waking the other threads costs more than it saves
_WEIGHT_BLOCK = 128  # weight rows that a thread takes at a time: prefetching pays in long runs
_MAX_ROW_BLOCK = 8  # query rows that share the widening of keys and values


class FusedCpuOps:
    """See `eesd_lite.ops.Ops`; bfloat16 throughout, residual and logits float32."""

    name = "fused-cpu"
    dtype = torch.bfloat16

    def __init__(self, threads: int) -> None:
        from eesd_lite import cpu_attention, cpu_kernels  # numba takes half a second to import

        assert threads >= 1, f"threads {threads}"
        kernels = cpu_kernels.compile_kernels()
        self._scratch_floats = cpu_attention.attend_scratch
        self._limit_step = cpu_attention.LIMIT_STEP
        self._parallel = _openmp_parallel() if threads > 1 else None
        self.threads = threads if self._parallel is not None else 1
        # Short calls keep the GIL: another thread that took it in between would hold it for longer than the call.
        kernel = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
        self._rms_norm = kernel(kernels.rms_norm)
        self._silu_mul = kernel(kernels.silu_mul)
        self._split_rows = kernel(kernels.split_rows)
        self._write_keys = kernel(kernels.write_keys)
        free = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
        self._attend = (kernels.attend, kernel(kernels.attend), free(kernels.attend))
        self._linear = (kernels.linear, kernel(kernels.linear), free(kernels.linear))

    @staticmethod
    def supported(device: torch.device | str, dtype: torch.dtype) -> str | None:
        """Why these operations cannot be used, or None if they can."""
        if torch.device(device).type != "cpu":
            return f"the fused operations run on the CPU, not on {device}"
        if dtype != torch.bfloat16:
            return f"the fused operations compute in bfloat16, not in {dtype}"
        try:
            import numba  # noqa: F401
        except ImportError as error:
            return f"the fused operations need numba: {error}"
        return None

    @staticmethod
    def warm_up(progress: Progress = no_progress) -> None:
        """Compiles the kernels (about 10 s, once on a machine) or loads them from the disk cache."""
        progress("loading the CPU kernels, compiled on first use", 0, 0)
        from eesd_lite import cpu_kernels

        cpu_kernels.compile_kernels()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert delta.shape == residual.shape, f"residual {tuple(residual.shape)}, delta {tuple(delta.shape)}"
        assert delta.dtype is torch.bfloat16 and delta.is_contiguous(), f"delta is {delta.dtype}, or not contiguous"
        return self._norm(residual, delta, weight, eps)

    def _norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        count, width = x.shape
        assert x.dtype is torch.float32 and x.is_contiguous(), f"residual is {x.dtype}, or not contiguous"
        _check_weight(weight, (width,))
        out = torch.empty((count, width), dtype=torch.bfloat16)
        added = 0 if delta is None else delta.data_ptr()
        addresses = (x.data_ptr(), added, weight.data_ptr(), out.data_ptr())
        arguments = array("q", (*addresses, count, width, _float_bits(eps)))
        self._rms_norm(arguments.buffer_info()[0])
        return out

    def attention(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: Rows,
        reach: Reach,
        num_heads: int,
        qk_norm: QKNorm | None = None,
    ) -> torch.Tensor:
        arguments, out = self._attention_arguments(qkv, k_cache, v_cache, rows, reach, num_heads, qk_norm)
        address = arguments.buffer_info()[0]
        longest = self._write_keys(address)
        assert longest >= 0, f"{rows} goes beyond a capacity of {k_cache.shape[1]} or {arguments[21]} positions"
        count, (kv_heads, _, head_dim) = len(rows), k_cache.shape
        small = count * longest * out.shape[1] < _SMALL_WORK
        threads = 1 if small else self.threads
        row_block = min(_MAX_ROW_BLOCK, -(-count // threads)) if count > 1 else 1
        limit = -(-longest // self._limit_step) * self._limit_step
        floats = self._scratch_floats(row_block, num_heads // kv_heads, head_dim, limit)
        scratch = torch.empty(threads * floats, dtype=torch.float32)
        arguments[18], arguments[19], arguments[20] = row_block, limit, scratch.data_ptr()
        self._run(self._attend, address, threads, small)
        return out

    def _attention_arguments(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        rows: Rows,
        reach: Reach,
        num_heads: int,
        qk_norm: QKNorm | None,
    ) -> tuple[array[int], torch.Tensor]:
        count, (kv_heads, capacity, head_dim), (cos, sin) = len(rows), k_cache.shape, reach.rope
        width = (num_heads + 2 * kv_heads) * head_dim
        assert qkv.shape == (count, width), f"qkv {tuple(qkv.shape)}, expected {(count, width)}"
        assert num_heads % kv_heads == 0 and head_dim % 2 == 0, f"{num_heads}, {kv_heads} heads of {head_dim}"
        assert v_cache.shape == k_cache.shape, f"k {tuple(k_cache.shape)}, v {tuple(v_cache.shape)}"
        assert qkv.dtype is k_cache.dtype is v_cache.dtype is torch.bfloat16, f"{qkv.dtype}, {k_cache.dtype}"
        assert qkv.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous(), "not contiguous"
        assert cos.dtype is sin.dtype is torch.float32 and cos.is_contiguous() and sin.is_contiguous(), f"{cos.dtype}"
        assert cos.shape == sin.shape == (cos.shape[0], head_dim // 2), (
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        )
        norms = (0, 0, 0)
        if qk_norm is not None:
            _check_weight(qk_norm.query, (head_dim,))
            _check_weight(qk_norm.key, (head_dim,))
            norms = (qk_norm.query.data_ptr(), qk_norm.key.data_ptr(), _float_bits(qk_norm.eps))
        window = capacity if reach.window is None else reach.window
        out = torch.empty((count, num_heads * head_dim), dtype=torch.bfloat16)
        tensors = (qkv, k_cache, v_cache, rows.positions, rows.slots, rows.prefix, rows.paths)
        addresses = (tensor.data_ptr() for tensor in tensors)
        shapes = (count, num_heads, kv_heads, head_dim, capacity)
        later = (0, 0, 0)  # rows in a block, key limit, scratch
        tables = (rows.paths.shape[1], cos.data_ptr(), sin.data_ptr())
        return array(
            "q", (0, 0, *addresses, *tables, *shapes, out.data_ptr(), *later, cos.shape[0], *norms, window)
        ), out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        count, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.dtype is torch.bfloat16 and gate_up.is_contiguous(), f"{gate_up.dtype}, or not contiguous"
        out = torch.empty((count, width), dtype=torch.bfloat16)
        arguments = array("q", (gate_up.data_ptr(), out.data_ptr(), count, width))
        self._silu_mul(arguments.buffer_info()[0])
        return out

    def dense(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None:
            _check_weight(bias, (weight.shape[0],))
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)
        return self._product(x, weight, bias, out)

    def logits(self, x: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        return self._product(x, lm_head, None, torch.empty((x.shape[0], lm_head.shape[0]), dtype=torch.float32))

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        (count, width), weight_rows = x.shape, weight.shape[0]
        _check_weight(weight, (weight_rows, width))
        assert x.dtype is torch.bfloat16 and x.is_contiguous(), f"x is {x.dtype}, or not contiguous"
        split = torch.empty((count, width), dtype=torch.float32)
        small = count * weight_rows * width < _SMALL_WORK
        threads = 1 if small else self.threads
        block = _WEIGHT_BLOCK if weight_rows >= 8 * threads * _WEIGHT_BLOCK else _WEIGHT_BLOCK // 4
        sums = torch.empty(threads * 16, dtype=torch.float32)
        arguments = array("q", (x.data_ptr(), split.data_ptr(), count, width))
        self._split_rows(arguments.buffer_info()[0])
        operands = (split.data_ptr(), count, weight.data_ptr(), weight_rows, width)
        added, narrow = 0 if bias is None else bias.data_ptr(), int(out.dtype is torch.bfloat16)
        arguments = array("q", (0, 0, *operands, added, out.data_ptr(), narrow, sums.data_ptr(), block))
        self._run(self._linear, arguments.buffer_info()[0], threads, small)
        return out

    def _run(self, kernel: tuple[int, Any, Any], address: int, threads: int, small: bool) -> None:
        """Runs a kernel whose threads share out the work themselves."""
        pointer, holding_gil, releasing_gil = kernel
        if threads > 1 and self._parallel is not None:
            self._parallel(pointer, address, threads, 0)
        elif small:
            holding_gil(address)
        else:
            releasing_gil(address)


def _float_bits(value: float) -> int:
    """The bits of a float32, which kernels take as an integer argument."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def _check_weight(weight: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert weight.shape == shape, f"weight {tuple(weight.shape)}, expected {shape}"
    assert weight.dtype is torch.bfloat16 and weight.is_contiguous(), f"weight is {weight.dtype}, or not contiguous"


def _openmp_parallel() -> Any:
    """GOMP_parallel(function, data, threads, flags) of the OpenMP library that torch itself runs on, or None.

    GNU's, LLVM's and Intel's libraries all have it; without it everything runs on one thread.
    """
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            function = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None
