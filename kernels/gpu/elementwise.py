"""Norms, and activations with a gate. A program has one row, or a piece of one, so a row's bits depend on it alone.

Block sizes follow from the width alone. Arithmetic is in float32, and results are rounded where the reference rounds
them. GELU without a gate and ReLU are one launch in torch.

Bytes moved, for N rows of width H and elements of s bytes: a norm reads and writes 2 N H s, with a sum 4 N H s; an
activation with a gate moves 3 N H s, where H is the width of its result.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Configuration, launch

MAX_WIDTH = 32768
"""The widest row that a program's registers hold."""

ACTIVATION_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * weight, with the product in the weight's type."""
    rows = _rows(x)
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _norm(_rms_norm, rows, None, (_vector(weight, rows),), eps, y, None)
    return y.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual)."""
    rows = _rows(x)
    y, total = (torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(2))
    _norm(_rms_norm, rows, _like(residual, x), (_vector(weight, rows),), eps, y, total)
    return y.view(x.shape), total.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""
    rows = _rows(x)
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    vectors = _vector(weight, rows), None if bias is None else _vector(bias, rows)
    _norm(_layer_norm, rows, None, vectors, eps, y, None)
    return y.view(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual)."""
    rows = _rows(x)
    y, total = (torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(2))
    vectors = _vector(weight, rows), None if bias is None else _vector(bias, rows)
    _norm(_layer_norm, rows, _like(residual, x), vectors, eps, y, total)
    return y.view(x.shape), total.view(x.shape)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """y = silu(gate) * up, with silu(v) = v * sigmoid(v)."""
    return _activate_and_mul(gate_up, gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """y = gelu_tanh(gate) * up."""
    return _activate_and_mul(gate_up, gelu=True)


def _rows(x: Tensor) -> Tensor:
    """Return `x` as (rows, width) with neighbours in a row side by side; a copy only where no view is possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _like(other: Tensor, x: Tensor) -> Tensor:
    if other.shape != x.shape or other.dtype != x.dtype:
        raise ValueError(f"cannot add {tuple(other.shape)} {other.dtype} to {tuple(x.shape)} {x.dtype}")
    return _rows(other)


def _vector(vector: Tensor, rows: Tensor) -> Tensor:
    if vector.shape != rows.shape[1:]:
        raise ValueError(f"a vector of {tuple(vector.shape)} does not fit rows of {rows.shape[1]}")
    return vector.contiguous()


def _norm(
    kernel,  # `_rms_norm` or `_layer_norm`
    x: Tensor,
    residual: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    eps: float,
    y: Tensor,
    total: Tensor | None,
) -> None:
    count, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} are wider than {MAX_WIDTH}")
    block = triton.next_power_of_2(width)
    residual_stride = 0 if residual is None else residual.stride(0)
    strides = x.stride(0), residual_stride
    launch(
        kernel,
        (count,),
        x,
        residual,
        *vectors,
        y,
        total,
        *strides,
        eps,
        width,
        num_warps=norm_warps(block),
        BLOCK=block,
    )


def norm_warps(block: int) -> int:
    """Return the warps of a program with `block` elements: 16 elements a thread, in two loads of 16 bytes."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _load_row(x, residual, total, row, column, inside, x_stride, residual_stride, width: tl.constexpr):
    """Return a row of `x` in float32. If there is a residual, it is added first, and the rounded sum is stored."""
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row * width + column, values, mask=inside)
    return values.to(tl.float32)


@triton.jit(do_not_specialize=["eps"])
def _rms_norm(x, residual, weight, y, total, x_stride, residual_stride, eps, width: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide = _load_row(x, residual, total, row, column, inside, x_stride, residual_stride, width)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0)
    normed = (wide * scale).to(weights.dtype).to(tl.float32) * weights.to(tl.float32)
    tl.store(y + row * width + column, normed.to(weights.dtype).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def _layer_norm(
    x, residual, weight, bias, y, total, x_stride, residual_stride, eps, width: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide = _load_row(x, residual, total, row, column, inside, x_stride, residual_stride, width)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = centred * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, normed.to(y.dtype.element_ty), mask=inside)


def _activate_and_mul(gate_up: Tensor, *, gelu: bool) -> Tensor:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"rows of {gate_up.shape[-1]} have no two halves")
    rows, width = _rows(gate_up), gate_up.shape[-1] // 2
    y = rows.new_empty(len(rows), width)
    grid = len(rows), triton.cdiv(width, ACTIVATION_BLOCK)
    launch(_activation, grid, rows, y, rows.stride(0), width, num_warps=4, GELU=gelu, BLOCK=ACTIVATION_BLOCK)
    return y.view(*gate_up.shape[:-1], width)


@triton.jit
def _activation(gate_up, y, stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, _activated(gate, GELU) * up, mask=inside)


@triton.jit
def _activated(v, GELU: tl.constexpr):
    """Return silu(v), or gelu(v) in its tanh form: (1 + tanh(u)) / 2 is sigmoid(2 u)."""
    u = v * (1.5957691216057308 * (1.0 + 0.044715 * v * v)) if GELU else v
    small = tl.exp(-tl.abs(u))  # of -|u|, since exp(-u) overflows
    return v * (tl.where(u >= 0, 1.0, small) / (1.0 + small))


def configurations() -> Iterator[Configuration]:
    """Yield the widths of common models: each has the block of its power of two."""
    for dtype in (torch.bfloat16, torch.float16):
        new = partial(torch.empty, dtype=dtype, device="meta")
        name = str(dtype).removeprefix("torch.")
        for width in (1024, 2048, 4096, 8192, 16384):
            x, weight = new(64, width), new(width)
            size = 64 * width * dtype.itemsize
            yield Configuration(f"rms_norm {width} {name}", partial(rms_norm, x, weight, 1e-5), "64 rows", 2 * size)
            yield Configuration(
                f"add_rms_norm {width} {name}", partial(add_rms_norm, x, x, weight, 1e-5), "64 rows", 4 * size
            )
        x, weight = new(64, 4096), new(4096)
        size = 64 * 4096 * dtype.itemsize
        yield Configuration(
            f"layer_norm 4096 {name}", partial(layer_norm, x, weight, weight, 1e-5), "64 rows", 2 * size
        )
        yield Configuration(
            f"add_layer_norm 4096 {name}", partial(add_layer_norm, x, x, weight, weight, 1e-5), "64 rows", 4 * size
        )
        size = 64 * 14336 * dtype.itemsize
        for operation in (silu_and_mul, gelu_tanh_and_mul):
            run = partial(operation, new(64, 2 * 14336))
            yield Configuration(f"{operation.__name__} {name}", run, "64 rows of 14336", 3 * size)
