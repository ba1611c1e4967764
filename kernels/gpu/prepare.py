"""The inputs of a step: what the host has sent in one copy is spread over the device's arrays, by the formulas of
kernels/reference/prepare.py.

Bytes moved: 8 a number that is copied; for a token of a batch some 40, and a few of the offsets, which caches hold.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch_rows import BatchRows, RowLengths
from kernels.gpu.launch import Configuration, launch

BLOCK = 1024
"""Numbers of a segment that a program copies."""

TOKENS = 128
"""Tokens of a program that prepares inputs."""


def copy_segments(destination: Tensor, source: Tensor, segments: Tensor, longest: int) -> None:
    """Launch one kernel; segments shorter than `longest` leave programs without work."""
    if not destination.dtype == source.dtype == torch.int32 or segments.dtype != torch.int64 or segments.shape[1] != 3:
        raise ValueError("segments (N, 3) are int64, and what they copy is int32")
    grid = (len(segments), triton.cdiv(longest, BLOCK))
    launch(_copy_segments, grid, destination, source, segments.contiguous(), num_stages=1, BLOCK=BLOCK)


def prepare_inputs(
    rows: BatchRows, tokens: Tensor, block_tables: Tensor, *, num_tokens: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch one kernel; each token finds its row by bisection."""
    ids = tokens.new_empty(num_tokens)
    positions, slot_mapping = (tokens.new_empty(num_tokens, dtype=torch.int64) for _ in range(2))
    launch(
        _prepare_inputs,
        (triton.cdiv(num_tokens, TOKENS),),
        ids,
        positions,
        slot_mapping,
        rows.offsets,
        rows.starts,
        rows.slots,
        tokens,
        block_tables,
        len(rows.starts),
        num_tokens,
        tokens.stride(0),
        block_tables.stride(0),
        num_stages=1,
        BLOCK_SIZE=block_size,
        BLOCK=TOKENS,
    )
    return ids, positions, slot_mapping


# Segments and rows may be views into a step's buffer, with any alignment, and rows of tables have any length.
@triton.jit(do_not_specialize_on_alignment=["segments"])
def _copy_segments(destination, source, segments, BLOCK: tl.constexpr):
    segment = segments + tl.program_id(0) * 3
    length = tl.load(segment + 2)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(source + tl.load(segment + 1) + at, mask=at < length)
    tl.store(destination + tl.load(segment) + at, numbers, mask=at < length)


@triton.jit(
    do_not_specialize=["rows", "num_tokens", "token_stride", "table_stride"],
    do_not_specialize_on_alignment=["offsets", "starts", "slots"],
)
def _prepare_inputs(
    ids,  # (T,) int32, written
    positions,  # (T,) int64, written
    slot_mapping,  # (T,) int64, written
    offsets,
    starts,
    slots,
    tokens,
    block_tables,
    rows,
    num_tokens,
    token_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = index < tl.load(offsets + rows).to(tl.int32)
    low = tl.zeros([BLOCK], tl.int32)  # the last row that begins at the token or before it
    high = low + rows
    span = rows
    while span > 1:
        middle = (low + high) // 2
        is_before = tl.load(offsets + middle).to(tl.int32) <= index
        narrower = high - low > 1
        low = tl.where(narrower & is_before, middle, low)
        high = tl.where(narrower & (is_before == 0), middle, high)
        span = (span + 1) // 2
    first = tl.load(offsets + low).to(tl.int32)
    position = tl.load(starts + low).to(tl.int64) + index - first
    position = tl.where(used, position, 0)
    slot = tl.load(slots + low).to(tl.int64)
    token = tl.load(tokens + slot * token_stride + position, mask=used, other=0)
    block = tl.load(block_tables + slot * table_stride + position // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
    inside = index < num_tokens
    tl.store(ids + index, token, mask=inside)
    tl.store(positions + index, position, mask=inside)
    tl.store(slot_mapping + index, tl.where(used, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)


def configurations() -> Iterator[Configuration]:
    """Yield the kernels for 256 rows and 2,048 tokens."""

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, tables = new(256, 8192), new(256, 512)
    rows = BatchRows(new(257), new(256), new(256), RowLengths(1, 1024, 8192))
    segments = new(512, 3, dtype=torch.int64)
    yield Configuration(
        "copy segments",
        lambda: copy_segments(tokens.view(-1), new(2**16), segments, 1024),
        "512 segments, 65,536 numbers",
        8 * 2**16 + segments.nbytes,
    )
    yield Configuration(
        "prepare inputs",
        lambda: prepare_inputs(rows, tokens, tables, num_tokens=2048, block_size=16),
        "2,048 tokens",
        2048 * 40,
    )
