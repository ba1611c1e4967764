"""Mixtures of experts: assignments are sorted by expert on the device, and no size is read on the host.

Bytes moved, for N tokens of K experts each, of width H and inner width I: the weights of all experts in use, 3 I H
elements each where the activation is gated, and some N K (4 H + 5 I) elements of activations.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.decoder_layers import Expert, Projection
from kernels.gpu.elementwise import gelu_tanh_and_mul, silu_and_mul
from kernels.gpu.launch import Configuration, launch
from kernels.reference.elementwise import gelu_tanh, relu

ACTIVATIONS = {
    "silu_and_mul": silu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
}

SUM_BLOCK = 1024
ROWS, OUTPUTS, INPUTS = 16, 64, 64
"""The tile of `grouped_linear`: one for all numbers of rows, so that a row's bits depend on it alone."""


class StackedExperts(NamedTuple):
    """The experts of a layer, side by side."""

    up: Projection  # weights (experts, I or 2 I, H), biases (experts, I or 2 I)
    down: Projection  # weights (experts, H, I), biases (experts, H)
    activation: str
    numbers: Tensor  # (experts,) int64: 0, 1, ...


def pack_experts(experts: Iterable[Expert], count: int) -> StackedExperts:
    """Return `count` experts in one piece; each is copied as it comes, so one of them at a time is there twice.

    Raise ValueError if some of them have a bias that others lack.
    """
    stacks: list[Tensor | None] = []
    activation = ""
    for index, expert in enumerate(experts):
        parts = (*expert.up, *expert.down)
        if index == 0:
            stacks = [None if part is None else part.new_empty(count, *part.shape) for part in parts]
            activation = expert.activation
        for stack, part in zip(stacks, parts, strict=True):
            if stack is not None and part is not None:
                stack[index].copy_(part)
            elif stack is not part:
                raise ValueError("some experts have biases that others lack")
    up, down = Projection(*stacks[:2]), Projection(*stacks[2:])
    return StackedExperts(up, down, activation, torch.arange(count, device=up.weight.device))


def mix_experts(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: StackedExperts, *, batch_invariant: bool = False
) -> Tensor:
    """y[t] = Σ_k topk_weights[t, k] * experts[topk_ids[t, k]](x[t]), summed in float32 in the order of k.

    With `batch_invariant`, all products are `grouped_linear`'s.
    """
    count, used = topk_ids.shape
    if not count:
        return torch.empty_like(x)
    ids, order = topk_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, experts.numbers, right=True, out_int32=True)
    rows = x.index_select(0, order // used)
    multiply = partial(_grouped, ids=ids, ends=ends, batch_invariant=batch_invariant)
    inner = ACTIVATIONS[experts.activation](multiply(rows, experts.up))
    parts = multiply(inner, experts.down)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[1]
    grid = count, triton.cdiv(width, SUM_BLOCK)
    # Products are rounded before they are added, as the reference rounds them.
    launch(
        _weighted_sum,
        grid,
        parts,
        topk_weights.contiguous(),
        places,
        y,
        width,
        enable_fp_fusion=False,
        K=used,
        BLOCK=SUM_BLOCK,
    )
    return y


def _grouped(x: Tensor, projection: Projection, *, ids: Tensor, ends: Tensor, batch_invariant: bool) -> Tensor:
    """Return x Wᵀ + b, (N, out), where ids[n] is the expert of row n, and the rows of expert e end before ends[e]."""
    weights, biases = projection
    aligned = all(width * x.itemsize % 16 == 0 for width in weights.shape[1:])
    if not batch_invariant and aligned and (x.dtype == torch.bfloat16 or x.device.type == "cpu"):
        y = F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    else:
        y = grouped_linear(x, weights, ends)
    return y if biases is None else y.add_(biases.index_select(0, ids))


def grouped_linear(
    x: Tensor,  # (N, in), contiguous
    weights: Tensor,  # (experts, out, in), contiguous
    ends: Tensor,  # (experts,) int32
) -> Tensor:
    """Return x Wᵀ, (N, out): for the types and widths that torch's product does not take, and for bits that do not
    depend on the batch.

    Each expert's rows are cut into tiles; there are at most N / ROWS + experts, so the grid follows from shapes, and a
    program finds its expert and its rows from `ends`.
    """
    experts, outputs, inputs = weights.shape
    if not (x.is_contiguous() and weights.is_contiguous()):
        raise ValueError("rows and weights must be contiguous")
    y = x.new_empty(len(x), outputs)
    grid = triton.cdiv(len(x), ROWS) + experts, triton.cdiv(outputs, OUTPUTS)
    block = triton.next_power_of_2(experts)
    launch(
        _grouped_linear,
        grid,
        x,
        weights,
        ends,
        y,
        inputs,
        outputs,
        EXPERTS=experts,
        EXPERT_BLOCK=block,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS,
    )
    return y


@triton.jit
def _grouped_linear(
    x,
    weights,
    ends,
    y,
    inputs,
    outputs,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    tile = tl.program_id(0)
    numbers = tl.arange(0, EXPERT_BLOCK)
    last = tl.load(ends + numbers, mask=numbers < EXPERTS, other=0)
    first = tl.load(ends + numbers - 1, mask=(numbers > 0) & (numbers < EXPERTS), other=0)
    tiles = tl.where(numbers < EXPERTS, (last - first + ROWS - 1) // ROWS, 0)
    tiles_before = tl.cumsum(tiles, 0) - tiles
    mine = (tiles_before <= tile) & (tile < tiles_before + tiles)
    if tl.sum(mine.to(tl.int32), 0) > 0:
        expert = tl.sum(tl.where(mine, numbers, 0), 0).to(tl.int64)
        start = tl.sum(tl.where(mine, first + (tile - tiles_before) * ROWS, 0), 0)
        end = tl.sum(tl.where(mine, last, 0), 0)
        row = start + tl.arange(0, ROWS)
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = (row < end)[:, None] & (output < outputs)[None, :]
        left = x + row.to(tl.int64)[:, None] * inputs
        right = weights + (expert * outputs + output)[None, :] * inputs
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for begin in range(0, inputs, INPUTS):
            column = begin + tl.arange(0, INPUTS)
            a = tl.load(left + column[None, :], mask=(row < end)[:, None] & (column < inputs)[None, :], other=0.0)
            b = tl.load(
                right + column[:, None], mask=(output < outputs)[None, :] & (column < inputs)[:, None], other=0.0
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        tl.store(y + row.to(tl.int64)[:, None] * outputs + output[None, :], total, mask=inside)


@triton.jit
def _weighted_sum(parts, topk_weights, places, y, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        place = tl.load(places + token * K + k)
        part = tl.load(parts + place * width + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(topk_weights + token * K + k)
    tl.store(y + token * width + column, total, mask=inside)


def configurations() -> Iterator[Configuration]:
    """Yield the shapes of Mixtral 8x7B and Qwen3 30B-A3B, and their products where those are not torch's."""
    for name, experts, used, width, inner in (("8 experts", 8, 2, 4096, 14336), ("128 experts", 128, 8, 2048, 768)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            new = partial(torch.empty, device="meta", dtype=dtype)
            numbers = torch.empty(experts, dtype=torch.int64, device="meta")
            up, down = (Projection(new(experts, *shape), None) for shape in ((2 * inner, width), (width, inner)))
            stacked = StackedExperts(up, down, "silu_and_mul", numbers)
            ids = torch.empty(64, used, dtype=torch.int64, device="meta")
            weights = torch.empty(64, used, device="meta")
            run = partial(mix_experts, new(64, width), weights, ids, stacked)
            name_of_type = str(dtype).removeprefix("torch.")
            if dtype == torch.bfloat16:  # its products are torch's, which the table does not have
                yield Configuration(f"{name} {name_of_type}", run, "64 tokens")
                run, name_of_type = partial(run, batch_invariant=True), "bfloat16 invariant"
            moved = (3 * experts * inner * width + 64 * used * (4 * width + 5 * inner)) * dtype.itemsize
            flops = 64 * used * 6 * inner * width
            yield Configuration(f"{name} {name_of_type}", run, "64 tokens", moved, flops)
