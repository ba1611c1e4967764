"""Matrix products with weights: torch's, which are the vendor's, and batch-invariant ones in Triton.

Bytes moved, for N rows and a weight (out, in) of s bytes an element: (out in + N (in + out)) s, and 2 N in out
operations; up to some 180 rows of two-byte types an H200 spends more time on the weight's bytes than on the products.

The vendor's library picks a kernel by the number of rows, and each sums in its own order. In the batch-invariant
product the bits of a row depend on that row and the weight alone:

- Inputs are cut into segments at fixed places, by the weight's shape and type alone. A segment is summed from left to
  right in float32, and so are the sums of segments. One program computes the segments of a tile in turn, or each has a
  program of its own and a second kernel adds them up. The number of rows says which. It decides about speed, never
  about bits. The sums that are stored move another 8 N out bytes a segment.
- Tiles have one shape for all numbers of rows, since Hopper's wgmma, which takes 64 rows or more, may round otherwise
  than mma.sync. It is 128 rows. A decode does not fill it, but loses little: an H200 needs 1.6 times as long for the
  weight's bytes as for the products of a whole tile. Tiles of 64 rows would make that 3.2; but chunks of prompts, which
  the L2 cache bounds, would read half as much again from it.
- Nothing but matrix products is multiplied here, so there is no sum that a compiler could fuse with a product or not.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Configuration, launch, processors
from kernels.quantized import Weight
from kernels.reference import linear as reference

SEGMENT = 512
"""Inputs of a segment at least: as many as keep a program busy for longer than it takes to fill its pipeline."""

PROGRAMS = 256
"""Programs to aim at when inputs are cut: two for each of an H200's 132 multiprocessors, which hold two at a time."""

GROUP = 8
"""Tiles of rows that are computed side by side, so that they find the weight's tiles in the L2 cache."""

SUM_BLOCK = 512


class Tile(NamedTuple):
    """The shape of a tile, and how a program computes it."""

    rows: int
    outputs: int
    inputs: int  # of a step
    num_warps: int
    num_stages: int


_TILE = Tile(128, 128, 64, 8, 3)
_FLOAT32_TILE = Tile(64, 64, 32, 8, 3)  # tensor cores have no such products


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """y = x Wᵀ in float32, as the product has summed it: rounded to two bytes, many likely tokens would be equal."""
    if x.dtype == torch.float32 or x.device.type == "cpu":  # torch has no such product of CPU tensors
        return F.linear(x, weight).float()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def pack_linear_batch_invariant(weight: Weight) -> Tensor:
    """Return the weight with the inputs of an output side by side, in float32 if it is quantised."""
    return reference.pack_linear(weight).contiguous()


def linear_batch_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ + b, rounded once."""
    return _linear(x, weight, bias, x.dtype)


def logits_batch_invariant(x: Tensor, weight: Tensor) -> Tensor:
    """y = x Wᵀ in float32."""
    return _linear(x, weight, None, torch.float32)


def choose_segments(outputs: int, inputs: int, tile: Tile) -> tuple[int, int]:
    """Return the inputs of a segment, a multiple of the tile's, and how many segments there are."""
    count = max(1, min(PROGRAMS // triton.cdiv(outputs, tile.outputs), inputs // SEGMENT))
    length = triton.cdiv(triton.cdiv(inputs, count), tile.inputs) * tile.inputs
    return length, triton.cdiv(inputs, length)


def should_split(tiles: int, num_processors: int) -> bool:
    """Return whether segments get programs of their own: their tiles leave half of the multiprocessors idle, or more.

    With more tiles, the parts that are written and read again would cost more than is gained.
    """
    return 2 * tiles <= num_processors


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    outputs, inputs = weight.shape
    if x.shape[1] != inputs or x.dtype != weight.dtype or not weight.is_contiguous():
        raise ValueError(f"rows {tuple(x.shape)} {x.dtype} do not fit a weight {tuple(weight.shape)} {weight.dtype}")
    if x.stride(1) != 1 or x.data_ptr() % 16:  # rows must not be read in another way because others come before them
        x = x.clone(memory_format=torch.contiguous_format)
    if bias is not None:
        bias = bias.expand(outputs).contiguous()
    y = torch.empty(len(x), outputs, dtype=dtype, device=x.device)
    tile = _FLOAT32_TILE if x.dtype == torch.float32 else _TILE
    length, segments = choose_segments(outputs, inputs, tile)
    tiles = triton.cdiv(len(x), tile.rows) * triton.cdiv(outputs, tile.outputs)
    split = segments > 1 and should_split(tiles, processors(x.device))
    sums, stride = y, 0
    if split:
        stride = triton.cdiv(y.numel(), 16) * 16  # strides of another alignment would need another object
        sums = torch.empty(segments * stride, dtype=torch.float32, device=x.device)
    launch(
        _multiply,
        (tiles, segments if split else 1),
        x,
        weight,
        None if split else bias,
        sums,
        len(x),
        outputs,
        inputs,
        x.stride(0),
        length,
        stride,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        ADD_UP=segments > 1 and not split,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        GROUP=GROUP,
    )
    if split:
        grid = len(x), triton.cdiv(outputs, SUM_BLOCK)
        launch(_add_segments, grid, sums, bias, y, stride, outputs, segments, BLOCK=SUM_BLOCK)
    return y


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x,
    weight,
    bias,
    y,  # (rows, outputs), or as many for each segment, which are its sums
    rows,
    outputs,
    inputs,
    x_stride,
    length,  # of a segment
    segment_stride,  # in `y`
    ADD_UP: tl.constexpr,  # a program computes all segments of its tile
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    output_tiles = tl.cdiv(outputs, OUTPUTS)
    group = tl.program_id(0) // (GROUP * output_tiles)
    place = tl.program_id(0) % (GROUP * output_tiles)
    members = tl.minimum(tl.cdiv(rows, ROWS) - group * GROUP, GROUP)
    row = (group * GROUP + place % members) * ROWS + tl.arange(0, ROWS)
    output = place // members * OUTPUTS + tl.arange(0, OUTPUTS)
    segment = tl.program_id(1)
    begin = segment * length
    end = inputs if ADD_UP else tl.minimum(begin + length, inputs)

    used_rows = row < rows
    used_outputs = output < outputs
    column = tl.arange(0, INPUTS)
    left = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    # Past the last output another one is read: a mask here would cost registers.
    right = weight + tl.where(used_outputs, output, 0).to(tl.int64)[None, :] * inputs + column[:, None]
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if ADD_UP:
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(begin, end, INPUTS):
        readable = start + column < inputs
        a = tl.load(left + start, mask=used_rows[:, None] & readable[None, :], other=0.0)
        b = tl.load(right + start, mask=readable[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if ADD_UP:  # noqa: SIM102 (Triton decides this as it compiles, and the next as it runs)
            if ((start + INPUTS) % length == 0) | (start + INPUTS >= end):
                total += acc
                acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    result = total if ADD_UP else acc
    if bias is not None:
        result += tl.load(bias + output, mask=used_outputs, other=0.0).to(tl.float32)[None, :]
    y += segment.to(tl.int64) * segment_stride
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=used_rows[:, None] & used_outputs[None, :])


@triton.jit(do_not_specialize=["segments"])
def _add_segments(sums, bias, y, segment_stride, outputs, segments, BLOCK: tl.constexpr):
    """Add up the segments of a row's outputs, from left to right."""
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    at = tl.program_id(0).to(tl.int64) * outputs + output
    sums += at
    total = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.range(segments, loop_unroll_factor=4):  # so that the next loads do not wait for the sum
        total += tl.load(sums + segment * segment_stride, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


def configurations() -> Iterator[Configuration]:
    """Yield the products of a Llama of 8 billion parameters: decodes of 64 rows, chunks of 8,192, and logits."""
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    for name, shape in shapes.items():
        yield _configuration(f"decode {name}", 64, shape, torch.bfloat16)
        yield _configuration(f"chunk {name}", 8192, shape, torch.bfloat16)
    yield _configuration("decode qkv with biases", 64, shapes["qkv"], torch.bfloat16, biased=True)
    yield _configuration("chunk qkv with biases", 8192, shapes["qkv"], torch.bfloat16, biased=True)
    yield _configuration("logits", 64, (128256, 4096), torch.bfloat16, to_logits=True)
    for dtype in (torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield _configuration(f"decode qkv {name}", 64, shapes["qkv"], dtype)
        yield _configuration(f"chunk qkv {name}", 8192, shapes["qkv"], dtype)
        yield _configuration(f"decode gate_up {name}", 64, shapes["gate_up"], dtype)
        yield _configuration(f"logits {name}", 64, (128256, 4096), dtype, to_logits=True)


def _configuration(
    name: str,
    rows: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    biased: bool = False,
    to_logits: bool = False,
) -> Configuration:
    outputs, inputs = shape
    new = partial(torch.empty, dtype=dtype, device="meta")
    x, weight, bias = new(rows, inputs), new(shape), new(outputs) if biased else None
    result = torch.float32 if to_logits else dtype
    return Configuration(
        name,
        partial(_linear, x, weight, bias, result),
        f"{rows} rows, {inputs} → {outputs}",
        bytes_moved=(weight.numel() + x.numel()) * dtype.itemsize + rows * outputs * result.itemsize,
        flops=2 * rows * inputs * outputs,
        wgmma=dtype != torch.float32,
        wide_loads=True,
    )
