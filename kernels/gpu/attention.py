"""Paged attention in Triton, by the formula of kernels/reference/attention.py.

One kernel serves rows of any number of queries. A program takes a tile of queries of one row and one kv head: the heads
that share the kv head lie side by side as the tile's rows, so its keys and values are read once for all of them. It
walks the keys in tiles at absolute places, with a running softmax in float32. Programs find their row from the offsets,
and lengths are read on the device: the grid follows from the shapes of the batch alone.

Rows of many queries fill tiles. Each query of a row of `FEW` or fewer is a tile of its own, and its keys are cut into
segments that several programs compute; a second kernel adds these from left to right. A query's segments are 256
positions at absolute places, or so many times 256, by powers of two, that it has at most `SEGMENTS`: they depend on its
position and window alone. How many programs share the segments of a query decides about speed, never about bits.

With `batch_invariant`, tiles have one shape, and long rows add up the same segments, in registers. Then a query's bits
depend on its row, its position and its context only, wherever the row is cut.

It reads each key and value of a row once a tile, and a table entry a page. Segments add 4 * D + 8 bytes a head, written
and read once: 3 % of a segment of 256 two-byte keys and values where four heads share them.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.batch_rows import BatchRows, RowLengths
from kernels.gpu.launch import INTERPRETED, Configuration, launch, processors
from kernels.kv_bias import KVBias
from kernels.layout import LARGEST_QUANTS, KVLayout, has_scales, scales

FEW = 4
"""Queries of a row up to which each is a tile of its own."""

SEGMENT = 256
"""Positions of a segment, unless a query would have more than `SEGMENTS`."""

SEGMENTS = 64
"""Segments of a query at most, which bounds the memory of unfinished sums. A window may touch one more."""

KV_CACHE_DTYPES = frozenset({torch.float32, torch.int8, torch.float8_e4m3fn})
"""The types of caches that are read, beside the type of the queries."""

PROGRAMS = 16
"""Programs a multiprocessor to aim at when segments are shared out: enough that rows of unequal length even out."""

_LOG2_E = 1.4426950408889634

_SEGMENT = tl.constexpr(SEGMENT)


class Tile(NamedTuple):
    """The shape of a tile, and how a program computes it."""

    rows: int  # queries times the heads that share a kv head
    keys: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """The tiles of rows of few queries, of other rows, and of all rows if bits must not depend on the batch."""

    few: Tile
    many: Tile
    invariant: Tile


# By the dimension of a head, rounded up to a power of two. The limits are registers: none of these spills on sm_80,
# sm_90 or sm_100 (`python -m kernels.gpu.build`). wgmma takes 64 rows or more.
_TILES = {
    64: Tiles(Tile(16, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 3)),
    128: Tiles(Tile(16, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 3)),
    256: Tiles(Tile(16, 32, 4, 3), Tile(64, 32, 8, 3), Tile(32, 32, 8, 3)),
}
_PADDED = Tiles(Tile(16, 32, 4, 3), Tile(128, 32, 8, 3), Tile(64, 32, 8, 3))  # 80 and 96 are padded to 128
_UNALIGNED = _PADDED._replace(many=Tile(64, 32, 8, 3))  # 100, 120: strides of these make loads of two bytes
_QUANTISED = {  # quants are converted in registers
    64: Tiles(Tile(16, 32, 4, 3), Tile(64, 64, 8, 3), Tile(64, 64, 8, 3)),
    128: Tiles(Tile(16, 32, 4, 3), Tile(64, 64, 8, 3), Tile(64, 32, 8, 3)),
    256: Tiles(Tile(16, 16, 4, 3), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
}
_BIASED = Tiles(Tile(16, 32, 4, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2))  # a second product, from float32
_FLOAT32 = Tiles(Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(16, 32, 4, 2))  # tensor cores have no such products


class AttentionPlan(NamedTuple):
    """The batch's rows on the device, the same for all layers."""

    rows: BatchRows
    block_tables: Tensor  # (slots, M) int32 or int64, entries of a row side by side
    block_size: int
    batch_invariant: bool

    @property
    def few(self) -> int:
        """The queries of a row up to which each is a tile of its own; 0: no row has so few."""
        return min(FEW, self.rows.lengths.max_queries) if self.rows.lengths.min_queries <= FEW else 0

    @property
    def has_longer_rows(self) -> bool:
        return self.rows.lengths.max_queries > FEW


def plan_attention(
    rows: BatchRows, block_tables: Tensor, *, block_size: int, num_kv_heads: int, batch_invariant: bool = False
) -> AttentionPlan:
    """Return the rows, which are read on the device. Only the reference needs `num_kv_heads`.

    A row without queries is padding, which costs a program and writes nothing.
    """
    if block_size < 1 or block_size & (block_size - 1) or block_size > 256:
        raise ValueError(f"the GPU's attention takes blocks of 1, 2, 4, ... 256 positions, not {block_size}")
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    return AttentionPlan(rows.to(block_tables.device), block_tables, block_size, batch_invariant)


def pack_angles(cos: Tensor, sin: Tensor) -> Tensor:
    """Return (P, R): at each position the cosines of one half of the dimensions, and their sines."""
    half = cos.shape[1] // 2
    return torch.cat((cos[:, :half], sin[:, :half]), 1)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    bias: KVBias | None = None,
    angles: Tensor | None = None,
) -> Tensor:
    """Launch the kernel for rows of few queries and for longer ones, as far as the plan says that there may be such."""
    _check(q, key_cache, value_cache, plan)
    if q.stride(2) != 1:
        q = q.contiguous()
    batch = _Batch(q, torch.empty(q.shape, dtype=q.dtype, device=q.device), key_cache, value_cache, plan, window)
    factors = (scale / softcap, softcap * _LOG2_E) if softcap else (scale * _LOG2_E, 0.0)
    biases = bias or KVBias()
    tiles = choose_tiles(
        q.shape[2],
        batch.group,
        q.dtype,
        quantised=has_scales(key_cache.dtype),
        biased=biases.keys is not None and angles is not None,
    )
    if plan.few:
        _attend_few(batch, tiles.invariant if plan.batch_invariant else tiles.few, factors, biases, angles)
    if plan.has_longer_rows:
        tile = tiles.invariant if plan.batch_invariant else tiles.many
        queries = tile.rows // batch.group
        grid = (q.shape[0] // queries + len(plan.rows.starts), batch.kv_heads)
        _launch(batch, tile, grid, factors, biases, angles, MERGE=plan.batch_invariant)
    return batch.out


def choose_tiles(dim: int, group: int, dtype: torch.dtype, *, quantised: bool = False, biased: bool = False) -> Tiles:
    """Return the tiles for heads of `dim`, `group` of which share a kv head.

    `biased`: keys are cached without a bias, which is rotated and added here.
    """
    width = max(64, triton.next_power_of_2(dim))
    if width not in _TILES:
        raise ValueError(f"the GPU's attention takes heads of at most 256 dimensions, not {dim}")
    if dtype == torch.float32:
        tiles = _FLOAT32
    elif biased:
        tiles = _BIASED
    elif quantised:
        tiles = _QUANTISED[width]
    elif 64 < dim < 128:
        tiles = _UNALIGNED if dim % 16 else _PADDED
    else:
        tiles = _TILES[width]
    return Tiles(*(_widened(tile, triton.next_power_of_2(group), dtype) for tile in tiles))


def _widened(tile: Tile, rows: int, dtype: torch.dtype) -> Tile:
    """Return `tile` with `rows` at least, which a kv head's queries need, in a form that does not spill."""
    if rows <= tile.rows:
        return tile
    if dtype == torch.float32 and rows > 32:
        return Tile(rows, 16, 8, 2)
    return tile._replace(rows=rows, num_warps=8 if rows > 64 else tile.num_warps)


def choose_splits(rows: int, kv_heads: int, segments: int, processors: int) -> int:
    """Return how many programs share the segments of a query and a kv head."""
    return min(segments, -(-PROGRAMS * processors // (rows * kv_heads)))


def configurations() -> Iterator[Configuration]:
    """Yield decodes and chunks of the head sizes, caches and options that models have."""
    for decode in (True, False):
        for dim in (32, 64, 80, 96, 128, 160, 256):
            yield _configuration(f"{dim}", dim, decode=decode)
        yield _configuration("120", 120, decode=decode, wide_loads=False)
        quants = itertools.product((64, 128, 256), LARGEST_QUANTS)
        for dim, cache in (*quants, (128, torch.float32)):
            yield _configuration(f"{dim} {_name(cache)}", dim, decode=decode, cache=cache)
        for dim, cache in ((128, torch.bfloat16), (256, torch.bfloat16), *((128, dtype) for dtype in LARGEST_QUANTS)):
            name = f"{dim} {_name(cache)} invariant"
            yield _configuration(name, dim, decode=decode, cache=cache, batch_invariant=True)
        yield _configuration("256 window softcap", 256, decode=decode, window=4096, softcap=50.0)
        for dim, heads, kv_heads in ((64, 14, 2), (128, 32, 8)):  # a rotated bias: Qwen2's, which has no other heads
            for cache in LARGEST_QUANTS:
                name = f"{dim} {_name(cache)} biases"
                yield _configuration(name, dim, heads, kv_heads, decode=decode, cache=cache, biased=True)
        for dim, heads, dtype in ((64, 71, torch.bfloat16), (64, 71, torch.float32), (128, 48, torch.bfloat16)):
            yield _configuration(f"{heads} of {dim} {_name(dtype)}", dim, heads, 1, decode=decode, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _configuration(
    name: str,
    dim: int,
    heads: int = 32,
    kv_heads: int = 8,
    *,
    decode: bool,
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype | None = None,
    batch_invariant: bool = False,
    biased: bool = False,
    wide_loads: bool = True,
    **options: Any,
) -> Configuration:
    """Return 64 queries of 4,096 positions each, or a chunk of 8,192. `cache`: its type, if it is not `dtype`."""
    meta = torch.device("meta")
    rows, queries, context = (64, 1, 4096) if decode else (1, 8192, 8192)
    layout = KVLayout(1, kv_heads, dim, 16, cache or dtype)
    keys, values = layout.views(layout.allocate(1024, meta))[0]
    q = torch.empty(rows * queries, heads, dim, dtype=dtype, device=meta)
    tables = torch.empty(rows, context // 16, dtype=torch.int32, device=meta)
    if biased:
        vector = torch.empty(kv_heads, dim, device=meta)
        options |= {"bias": KVBias(vector, vector), "angles": torch.empty(context, dim, device=meta)}

    def run() -> None:
        numbers = torch.empty(rows + 1, dtype=torch.int32, device=meta)
        batch_rows = BatchRows(numbers, numbers[1:], numbers[1:], RowLengths(queries, queries, context))
        plan = plan_attention(batch_rows, tables, block_size=16, num_kv_heads=kv_heads, batch_invariant=batch_invariant)
        paged_attention(q, keys, values, plan, scale=dim**-0.5, **options)

    pairs = rows * context if decode else queries * (queries + 1) // 2
    return Configuration(
        f"{'decode' if decode else 'chunk'} {name}",
        run,
        f"{rows} × {queries} queries, {context} positions, {heads}/{kv_heads} heads of {dim}",
        bytes_moved=rows * context * layout.bytes_per_token + 2 * q.numel() * q.element_size(),
        flops=4 * pairs * heads * dim,
        wgmma=not decode and not biased and dtype != torch.float32 and not (batch_invariant and dim == 256),
        wide_loads=wide_loads,
        oldest=89 if cache == torch.float8_e4m3fn else 80,
    )


class _Batch(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    out: Tensor
    key_cache: Tensor
    value_cache: Tensor
    plan: AttentionPlan
    window: int

    @property
    def kv_heads(self) -> int:
        return self.key_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def segments(self) -> int:
        """The most segments of a query, by the longest row and the window."""
        units = -(-self.plan.rows.lengths.max_length // SEGMENT)
        if self.window:
            units = min(units, -(-self.window // SEGMENT) + 1)
        return max(1, min(units, SEGMENTS + 1))


def _check(q: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> None:
    """Raise ValueError if the kernel cannot read these tensors."""
    heads, dim = q.shape[1:]
    kv_heads = key_cache.shape[1]
    if heads % kv_heads or key_cache.shape[3] != dim or key_cache.shape[2] != plan.block_size:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache {tuple(key_cache.shape)}")
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1:
        raise ValueError("the GPU's attention reads keys and values of one layout, with the dimension last")
    if key_cache.dtype not in (q.dtype, *KV_CACHE_DTYPES) or value_cache.dtype != key_cache.dtype:
        raise ValueError(f"a cache of {key_cache.dtype} does not serve queries of {q.dtype}")


def _attend_few(batch: _Batch, tile: Tile, factors: tuple[float, float], biases: KVBias, angles: Tensor | None) -> None:
    """Attend the rows of few queries: in one launch if each query has one segment, else in two."""
    q, plan, segments = batch.q, batch.plan, batch.segments
    items = len(plan.rows.starts) * plan.few
    if segments == 1:
        _launch(batch, tile, (items, batch.kv_heads), factors, biases, angles, BY_QUERY=True)
        return
    splits = choose_splits(items, batch.kv_heads, segments, processors(q.device))
    shape = (items, batch.kv_heads, segments, batch.group)
    parts = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
    stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    grid = (items, batch.kv_heads, splits)
    _launch(batch, tile, grid, factors, biases, angles, parts, stats, BY_QUERY=True)
    launch(
        _add_segments,
        (items, batch.kv_heads),
        batch.out,
        parts,
        stats,
        biases.values,
        plan.rows.offsets,
        plan.rows.starts,
        plan.few,
        segments,
        batch.window,
        num_warps=4,
        num_stages=3,
        GROUP=batch.group,
        DIM=q.shape[2],
        SEGMENTS=SEGMENTS,
        BLOCK_M=triton.next_power_of_2(batch.group),
        BLOCK_D=triton.next_power_of_2(q.shape[2]),
    )


def _launch(
    batch: _Batch,
    tile: Tile,
    grid: tuple[int, ...],
    factors: tuple[float, float],
    biases: KVBias,
    angles: Tensor | None,
    parts: Tensor | None = None,
    stats: Tensor | None = None,
    **constants: Any,
) -> None:
    q, plan, dim = batch.q, batch.plan, batch.q.shape[2]
    quantised = has_scales(batch.key_cache.dtype)
    key_scales = scales(batch.key_cache) if quantised else None
    value_scales = scales(batch.value_cache) if quantised else None
    rotated = 0 if angles is None or biases.keys is None else angles.shape[1]
    launch(
        _attend,
        grid,
        q,
        batch.out,
        parts,
        stats,
        batch.key_cache,
        batch.value_cache,
        key_scales,
        value_scales,
        biases.keys,
        biases.values,
        angles if rotated else None,
        *plan.rows[:3],
        plan.block_tables,
        len(plan.rows.starts),
        plan.few,
        batch.segments,
        batch.window,
        *factors,
        *q.stride()[:2],
        *batch.key_cache.stride()[:3],
        *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        plan.block_tables.stride(0),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        GROUP=batch.group,
        DIM=dim,
        ROTATED=rotated,
        PAGE=plan.block_size,
        SEGMENTS=SEGMENTS,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_R=max(16, triton.next_power_of_2(rotated)),
        **{"BY_QUERY": False, "MERGE": False, **constants},
        WINDOWED=batch.window > 0,
        SOFTCAPPED=factors[1] > 0,
        TURN_PRECISION="ieee" if INTERPRETED or q.dtype == torch.float32 else "bf16x3",
    )


@triton.jit
def _segment_length(first, end, SEGMENTS: tl.constexpr):
    """Return the positions of each segment of a query that sees those from `first` to `end` - 1; of any shape."""
    units = (end - 1) // _SEGMENT - first // _SEGMENT + 1
    doublings = units * 0
    for i in tl.static_range(14):
        doublings += (units > (SEGMENTS << i)).to(doublings.dtype)
    return _SEGMENT << doublings


@triton.jit
def _merge(max_left, sum_left, acc_left, max_right, sum_right, acc_right):
    """Return the greatest score, sum of weights and weighted values of two parts of a query's keys."""
    largest = tl.maximum(max_left, max_right)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    left, right = tl.exp2(max_left - finite), tl.exp2(max_right - finite)
    # Which product is fused with the sum must not be the compiler's choice: it might differ between two kernels.
    total = tl.fma(sum_right, right, sum_left * left)
    acc = tl.fma(acc_right, tl.broadcast_to(right[:, None], acc_right.shape), acc_left * left[:, None])
    return largest, total, acc


@triton.jit
def _find_row(offsets, rows, tile, QUERIES: tl.constexpr):
    """Return the row that `tile` belongs to: that of row r begin at offsets[r] // QUERIES + r, which leaves room."""
    low = rows * 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(offsets + middle) // QUERIES + middle).to(tl.int32)
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    return low


# Tensors may be views into a step's buffer, with any alignment: Triton must not compile the kernel anew for one.
_ANYWHERE = ["offsets", "starts", "slots", "tables"]


@triton.jit(
    do_not_specialize=["rows", "few", "segments", "window", "table_stride"], do_not_specialize_on_alignment=_ANYWHERE
)
def _attend(
    q,
    out,
    parts,  # (rows * few, kv head, segment, GROUP, DIM) float32; None: there is one segment, or `MERGE`
    stats,  # (rows * few, kv head, segment, GROUP, 2) float32: greatest score and sum of weights
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    key_bias,
    value_bias,
    angles,
    offsets,
    starts,
    slots,
    tables,
    rows,
    few,
    segments,
    window,
    scale,  # by which products become scores; in base 2 if there is no softcap
    softcap,  # in base 2; 0: none
    q_token_stride,
    q_head_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BY_QUERY: tl.constexpr,  # tiles are single queries of rows of at most `few`, else queries of other rows
    MERGE: tl.constexpr,  # add segments up in registers
    WINDOWED: tl.constexpr,
    SOFTCAPPED: tl.constexpr,
    TURN_PRECISION: tl.constexpr,
):
    QUERIES: tl.constexpr = 1 if BY_QUERY else BLOCK_M // GROUP
    # Weights and their sum are taken times this power of two: multiplied by a scale, weights of at most 1 would be too
    # small for float16. The products stay below the largest value, since quants go up to 127 or 448.
    EXPONENT: tl.constexpr = 0.0 if value_scales is None else 6.0 if value_cache.dtype.element_ty == tl.int8 else 8.0
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    if BY_QUERY:
        item = tl.program_id(0)
        row = item // few
        query = item % few
    else:
        item = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a row are the longest: first come they
        row = _find_row(offsets, rows, item, QUERIES)
        query = (item - (tl.load(offsets + row) // QUERIES + row).to(tl.int32)) * QUERIES
    first_token = tl.load(offsets + row)
    count = (tl.load(offsets + row + 1) - first_token).to(tl.int32)
    if query >= count:
        return
    if BY_QUERY:
        if count > few:
            return
    else:
        if count <= few:
            return
    row_start = tl.load(starts + row).to(tl.int32)

    members = tl.arange(0, BLOCK_M)
    local = query + members // GROUP
    heads = kv_head * GROUP + members % GROUP
    used = (members < QUERIES * GROUP) & (local < count)
    positions = tl.where(used, row_start + local, -1)
    dims = tl.arange(0, BLOCK_D)
    used_dims = dims < DIM
    tokens = first_token.to(tl.int64) + local
    q_rows = q + tokens * q_token_stride + heads * q_head_stride
    queries = tl.load(q_rows[:, None] + dims[None, :], mask=used[:, None] & used_dims[None, :], other=0.0)

    # With angles, q · rotated(b) = Σ_i cos_i (q_i b_i + q_j b_j) + sin_i (q_j b_i - q_i b_j), j being i + R / 2.
    if key_bias is not None:
        key_bias += kv_head * DIM
        biases = tl.load(key_bias + dims, mask=used_dims & (dims >= ROTATED), other=0.0)
        constant = tl.sum(queries.to(tl.float32) * biases[None, :], 1)
    if ROTATED > 0:
        HALF: tl.constexpr = ROTATED // 2
        turns = tl.arange(0, BLOCK_R)
        used_turns = turns < ROTATED
        pair = turns % HALF
        masks = used[:, None] & used_turns[None, :]
        q_first = tl.load(q_rows[:, None] + pair[None, :], mask=masks, other=0.0).to(tl.float32)
        q_second = tl.load(q_rows[:, None] + HALF + pair[None, :], mask=masks, other=0.0).to(tl.float32)
        b_first = tl.load(key_bias + pair, mask=used_turns, other=0.0)
        b_second = tl.load(key_bias + HALF + pair, mask=used_turns, other=0.0)
        along = q_first * b_first[None, :] + q_second * b_second[None, :]
        across = q_second * b_first[None, :] - q_first * b_second[None, :]
        turned = tl.where(turns[None, :] < HALF, along, across)

    # Keys from `begin` to `end` - 1 are read, in tiles from `tile` to `last_tile` - 1.
    end = row_start + tl.minimum(query + QUERIES, count)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(row_start + query - window + 1, 0)
    if parts is not None:
        split = tl.program_id(2)
        splits = tl.num_programs(2)
        length = _segment_length(begin, end, SEGMENTS)
        tiles = length // BLOCK_N
        first_segment = begin // length
        last_segment = (end - 1) // length
        mine = (last_segment - first_segment + splits - split) // splits
        tile = tl.where(split == 0, (begin - first_segment * length) // BLOCK_N, 0)
        beyond = (last_segment + 1) * length - end
        has_last = (last_segment - first_segment) % splits == split
        last_tile = mine * tiles - tl.where(has_last, beyond // BLOCK_N, 0)
    else:
        tile = begin // BLOCK_N
        last_tile = tl.cdiv(end, BLOCK_N)
    if MERGE:
        firsts = tl.maximum(positions - window + 1, 0) if WINDOWED else positions * 0
        lengths = _segment_length(firsts, positions + 1, SEGMENTS)
        total_largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total_sum = tl.zeros((BLOCK_M,), tl.float32)
        total_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    key_cache += kv_head.to(tl.int64) * head_stride
    value_cache += kv_head.to(tl.int64) * head_stride
    if key_scales is not None:
        key_scales += kv_head.to(tl.int64) * scale_head_stride
        value_scales += kv_head.to(tl.int64) * scale_head_stride
    tables += tl.load(slots + row).to(tl.int64) * table_stride
    places = tl.arange(0, BLOCK_N)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for index in range(tile, last_tile):
        if parts is not None:
            segment = split + index // tiles * splits
            start = (first_segment + segment) * length + index % tiles * BLOCK_N
        else:
            start = index * BLOCK_N
        keys_at = start + places
        readable = (keys_at >= begin) & (keys_at < end)

        # One table entry a page. Those of pages without a readable key may be anything.
        if PAGE >= BLOCK_N:
            block = tl.load(tables + start // PAGE).to(tl.int64)
            blocks = tl.zeros((BLOCK_N,), tl.int64) + block
            page_slots = start % PAGE + places
        else:
            pages = start // PAGE + tl.arange(0, BLOCK_N // PAGE)
            seen = (pages * PAGE < end) & (pages * PAGE + PAGE > begin)
            entries = tl.load(tables + pages, mask=seen, other=0).to(tl.int64)
            blocks = tl.reshape(tl.broadcast_to(entries[:, None], (BLOCK_N // PAGE, PAGE)), (BLOCK_N,))
            page_slots = places % PAGE
        vectors = (blocks * block_stride + page_slots * slot_stride)[:, None] + dims[None, :]

        if DIM == BLOCK_D:
            keys = tl.load(key_cache + vectors)
        else:
            keys = tl.load(key_cache + vectors, mask=used_dims[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        if key_scales is not None:
            scale_at = blocks * scale_block_stride + page_slots
            scores *= tl.load(key_scales + scale_at, mask=readable, other=0.0)[None, :]
        if key_bias is not None:
            scores += constant[:, None]
        if ROTATED > 0:
            at = keys_at.to(tl.int64)[:, None] * ROTATED + turns[None, :]
            table = tl.load(angles + at, mask=readable[:, None] & used_turns[None, :], other=0.0)
            scores += tl.dot(turned, tl.trans(table), input_precision=TURN_PRECISION)
        scores *= scale
        if SOFTCAPPED:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))  # tanh; 2 log2(e)
        visible = keys_at[None, :] <= positions[:, None]
        if WINDOWED:
            visible = visible & (keys_at[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - (finite - EXPONENT)[:, None])
        rescale = tl.exp2(largest - finite)
        largest = new_largest
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        # A weight of 0 does not hide a NaN where nothing was written yet, so values are masked.
        values = tl.load(value_cache + vectors, mask=readable[:, None] & used_dims[None, :], other=0.0)
        if value_scales is not None:
            weights *= tl.load(value_scales + scale_at, mask=readable, other=0.0)[None, :]
        acc = tl.dot(
            weights.to(queries.dtype), values.to(queries.dtype), acc * rescale[:, None], input_precision="ieee"
        )

        if parts is not None:  # noqa: SIM102 (Triton decides this as it compiles, and the next as it runs)
            if ((index + 1) % tiles == 0) | (index + 1 == last_tile):
                part = ((item.to(tl.int64) * kv_heads + kv_head) * segments + segment) * GROUP + members
                tl.store(parts + part[:, None] * DIM + dims[None, :], acc, mask=used[:, None] & used_dims[None, :])
                tl.store(stats + part * 2, largest, mask=used)
                tl.store(stats + part * 2 + 1, weight_sum, mask=used)
                largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                weight_sum = tl.zeros((BLOCK_M,), tl.float32)
                acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if MERGE:  # noqa: SIM102
            if (start + BLOCK_N) % _SEGMENT == 0:
                ends = (start + BLOCK_N) % lengths == 0
                new_largest, new_sum, new_acc = _merge(total_largest, total_sum, total_acc, largest, weight_sum, acc)
                total_largest = tl.where(ends, new_largest, total_largest)
                total_sum = tl.where(ends, new_sum, total_sum)
                total_acc = tl.where(ends[:, None], new_acc, total_acc)
                largest = tl.where(ends, float("-inf"), largest)
                weight_sum = tl.where(ends, 0.0, weight_sum)
                acc = tl.where(ends[:, None], 0.0, acc)

    if parts is None:
        if MERGE:
            largest, weight_sum, acc = _merge(total_largest, total_sum, total_acc, largest, weight_sum, acc)
        result = acc / tl.where(used, weight_sum, 1.0)[:, None]
        if value_bias is not None:
            result += tl.load(value_bias + kv_head * DIM + dims, mask=used_dims, other=0.0)[None, :]
        at = (tokens * (kv_heads * GROUP) + heads)[:, None] * DIM + dims[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=used[:, None] & used_dims[None, :])


@triton.jit(do_not_specialize=["few", "segments", "window"], do_not_specialize_on_alignment=_ANYWHERE[:2])
def _add_segments(
    out,
    parts,
    stats,
    value_bias,
    offsets,
    starts,
    few,
    segments,
    window,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up the segments of one query and kv head, from left to right."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    row = item // few
    query = item % few
    token = tl.load(offsets + row).to(tl.int64) + query
    count = (tl.load(offsets + row + 1) - tl.load(offsets + row)).to(tl.int32)
    if (query >= count) | (count > few):
        return
    position = tl.load(starts + row).to(tl.int32) + query
    begin = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    length = _segment_length(begin, position + 1, SEGMENTS)

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    used = members < GROUP
    masks = used[:, None] & (dims < DIM)[None, :]
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for segment in range(position // length - begin // length + 1):
        part = ((item.to(tl.int64) * kv_heads + kv_head) * segments + segment) * GROUP + members
        part_largest = tl.load(stats + part * 2, mask=used, other=0.0)
        part_sum = tl.load(stats + part * 2 + 1, mask=used, other=1.0)
        part_acc = tl.load(parts + part[:, None] * DIM + dims[None, :], mask=masks, other=0.0)
        largest, weight_sum, acc = _merge(largest, weight_sum, acc, part_largest, part_sum, part_acc)
    result = acc / weight_sum[:, None]
    if value_bias is not None:
        result += tl.load(value_bias + kv_head * DIM + dims, mask=dims < DIM, other=0.0)[None, :]
    at = (token * (kv_heads * GROUP) + kv_head * GROUP + members)[:, None] * DIM + dims[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=masks)
