"""Adapters (LoRA) of a linear operation: two grouped products, over the segments of tokens that use one adapter.

A stack is the reference's: A as (S, P R, in), B as (S, out, R). Bytes moved, for N tokens, G adapters in use and s
bytes an element: (G (P R in + R out) + N (in + 2 out)) s + 8 N P R.

A program computes a tile of one segment's tokens. The grid follows from the number of segments and the longest one,
which the host knows: nothing is read from the device, and programs past a segment's end return at once. A tile has one
shape for all numbers of tokens and inputs are summed from left to right, so a row's bits depend on it alone.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Configuration, launch
from kernels.lora import LoraSegments, LoraStack
from kernels.reference.lora import new_lora

ROWS, INPUTS, OUTPUTS = 16, 64, 64
MAX_COLUMNS = 64
"""Outputs of A that a program computes at most."""
MIN_DEPTH = 16
"""Inputs of B that a matrix instruction takes at least; past the rank they are zero."""


def lora_shrink(x: Tensor, stack: LoraStack, segments: LoraSegments) -> Tensor:
    """h[t] = A[s] x[t], (T, P R) float32, of tokens in segments; the others' rows are not written."""
    columns, inputs = stack.a.shape[1:]
    if x.stride(1) != 1 or x.shape[1] != inputs or x.dtype != stack.a.dtype or not stack.a.is_contiguous():
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} do not fit adapters {tuple(stack.a.shape)} {stack.a.dtype}")
    shrunk = torch.empty(len(x), columns, dtype=torch.float32, device=x.device)
    block = max(16, min(MAX_COLUMNS, triton.next_power_of_2(columns)))
    grid = len(segments.slots), triton.cdiv(segments.longest, ROWS), triton.cdiv(columns, block)
    launch(
        _shrink,
        grid,
        x,
        stack.a,
        segments.slots,
        segments.offsets,
        shrunk,
        x.stride(0),
        columns,
        inputs,
        ROWS=ROWS,
        COLUMNS=block,
        INPUTS=INPUTS,
    )
    return shrunk


def lora_expand(y: Tensor, shrunk: Tensor, stack: LoraStack, segments: LoraSegments) -> None:
    """y[t, outputs of part p] += B[s, outputs of part p] h[t, p R : (p + 1) R], rounded once more."""
    outputs, rank = stack.b.shape[1:]
    if not (y.is_contiguous() and shrunk.is_contiguous() and stack.b.is_contiguous()) or y.shape[1] != outputs:
        raise ValueError(f"outputs {tuple(y.shape)} do not fit adapters {tuple(stack.b.shape)}, or are not contiguous")
    first = 0
    for part, width in enumerate(stack.outputs):
        grid = len(segments.slots), triton.cdiv(segments.longest, ROWS), triton.cdiv(width, OUTPUTS)
        launch(
            _expand,
            grid,
            y,
            shrunk,
            stack.b,
            segments.slots,
            segments.offsets,
            first,
            width,
            outputs,
            part * rank,
            shrunk.shape[1],
            ROWS=ROWS,
            OUTPUTS=OUTPUTS,
            RANK=rank,
            DEPTH=max(MIN_DEPTH, min(rank, MAX_COLUMNS)),
        )
        first += width


@triton.jit(do_not_specialize=["columns"])
def _shrink(
    x,
    a,
    slots,
    offsets,
    shrunk,
    x_stride,
    columns,
    inputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    segment = tl.program_id(0)
    end = tl.load(offsets + segment + 1)
    first = tl.load(offsets + segment) + tl.program_id(1) * ROWS
    if first < end:
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        used_rows, used_columns = row < end, column < columns
        left = x + row.to(tl.int64)[:, None] * x_stride
        right = a + (tl.load(slots + segment).to(tl.int64) * columns + column)[None, :] * inputs
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, inputs, INPUTS):
            k = begin + tl.arange(0, INPUTS)
            rows = tl.load(left + k[None, :], mask=used_rows[:, None] & (k < inputs)[None, :], other=0.0)
            weights = tl.load(right + k[:, None], mask=(k < inputs)[:, None] & used_columns[None, :], other=0.0)
            total = tl.dot(rows, weights, total, input_precision="ieee")
        at = shrunk + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(at, total, mask=used_rows[:, None] & used_columns[None, :])


@triton.jit(do_not_specialize=["first_output", "first_column"])
def _expand(
    y,
    shrunk,
    b,
    slots,
    offsets,
    first_output,  # of the part
    width,  # of the part
    outputs,
    first_column,  # of the part, in `shrunk`
    columns,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    segment = tl.program_id(0)
    end = tl.load(offsets + segment + 1)
    first = tl.load(offsets + segment) + tl.program_id(1) * ROWS
    if first < end:
        row = first + tl.arange(0, ROWS)
        output = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
        used_rows, used_outputs = row < end, output < width
        left = shrunk + row.to(tl.int64)[:, None] * columns + first_column
        right = b + (tl.load(slots + segment).to(tl.int64) * outputs + first_output + output)[None, :] * RANK
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for begin in tl.static_range(0, RANK, DEPTH):
            r = begin + tl.arange(0, DEPTH)
            rows = tl.load(left + r[None, :], mask=used_rows[:, None] & (r < RANK)[None, :], other=0.0)
            weights = tl.load(right + r[:, None], mask=(r < RANK)[:, None] & used_outputs[None, :], other=0.0)
            total = tl.dot(rows, weights.to(tl.float32), total, input_precision="ieee")
        at = y + row.to(tl.int64)[:, None] * outputs + first_output + output[None, :]
        inside = used_rows[:, None] & used_outputs[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(y.dtype.element_ty), mask=inside)


def configurations() -> Iterator[Configuration]:
    """Yield the operations of a Llama of 8 billion parameters, at 64 decodes with 4 adapters of its type."""
    shapes = {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336))}
    for name, (inputs, outputs) in shapes.items():
        for rank in (8, 16, 32, 64, 128):
            yield _configuration(f"{name} rank {rank}", inputs, outputs, rank, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        yield _configuration(f"qkv rank 16 {str(dtype).removeprefix('torch.')}", *shapes["qkv"], 16, dtype)


def _configuration(
    name: str, inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype, tokens: int = 64, adapters: int = 4
) -> Configuration:
    meta = torch.device("meta")
    stack = new_lora(adapters, rank, inputs, outputs, dtype, meta)
    numbers = torch.empty(adapters + 1, dtype=torch.int64, device=meta)
    segments = LoraSegments(numbers[:adapters], numbers, tokens // adapters)
    x = torch.empty(tokens, inputs, dtype=dtype, device=meta)
    y = torch.empty(tokens, sum(outputs), dtype=dtype, device=meta)

    def run() -> None:
        lora_expand(y, lora_shrink(x, stack, segments), stack, segments)

    moved = (stack.a.numel() + stack.b.numel() + x.numel() + 2 * y.numel()) * dtype.itemsize
    moved += 8 * tokens * len(outputs) * rank
    flops = 2 * tokens * rank * (len(outputs) * inputs + sum(outputs))
    return Configuration(name, run, f"{tokens} tokens of {adapters} adapters", bytes_moved=moved, flops=flops)
