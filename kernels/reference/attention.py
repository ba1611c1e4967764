"""Attention of ragged rows over a paged cache.

    out[t, h] = Σ_j softmax_j(cap(scale * q[t, h] · K[j])) V[j],   j over positions p - window < j ≤ p

for the query at absolute position p, where K and V are those of its row's sequence and of head h // (Hq / Hkv). Without
a window, j starts at 0. cap(x) = softcap * tanh(x / softcap), or x without a softcap. Softmax is in float32. If the
cache leaves biases out (kernels/kv_bias.py), K[j] is the cached vector + the bias rotated to position j, and V[j] the
cached vector + the bias.

A row is any number of queries at consecutive positions. `plan_attention` computes once a step, for all layers, what
depends only on the shape of the batch: rows with the same number of queries and similar context form a group, whose
blocks are gathered by one index, and whose attention is computed as one batch. The queries of one kv head are joined in
one dimension, so that its keys and values are read once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.kv_bias import KVBias
from kernels.layout import has_scales, scales
from kernels.reference.elementwise import rotary

_MAX_QUERIES = 256
"""Queries in a piece. Longer rows are cut, which bounds the mask's size, and the first ones gather few blocks."""

Angles = tuple[Tensor, Tensor]


def pack_angles(cos: Tensor, sin: Tensor) -> Angles:
    """Return both tables unchanged."""
    return cos, sin


class Piece(NamedTuple):
    """Consecutive queries of a row: all of them, unless the row is long."""

    slot: int  # the row of the block tables
    first: int  # index of the first query in the batch
    start: int  # its position
    size: int  # queries

    @property
    def end(self) -> int:
        """The position after the last query's."""
        return self.start + self.size


@dataclass(frozen=True)
class PieceGroup:
    """N pieces of one size C, padded to the blocks of the longest: L positions."""

    queries: Tensor | None  # (N C,) int64: their indices in the batch; None if the group is the whole batch in order
    size: int  # C
    length: int  # L
    blocks: Tensor  # (N Hkv L/block_size,) int64: which (block, head) parts of the cache to gather
    padding: Tensor  # int64: indices of the gathered (N Hkv L) vectors after their piece's last position
    positions: Tensor  # (N, C, 1) absolute positions of the queries
    masks: dict[int, Tensor] = field(default_factory=dict)  # by window, made by `_mask` when first used


@dataclass(frozen=True)
class AttentionPlan:
    """The batch's groups, the same for all layers."""

    groups: list[PieceGroup]


def plan_attention(rows: BatchRows, block_tables: Tensor, *, block_size: int, num_kv_heads: int) -> AttentionPlan:
    """Cut the rows into pieces, and group pieces of the same size and similar length."""
    columns = (rows.slots, rows.offsets[:-1], rows.starts, rows.offsets.diff())
    pieces = [
        Piece(slot, first + done, start + done, min(_MAX_QUERIES, count - done))
        for slot, first, start, count in zip(*(column.tolist() for column in columns), strict=True)
        for done in range(0, count, _MAX_QUERIES)
    ]
    groups = list(_group_pieces(pieces, block_size))
    return AttentionPlan(
        [_make_group(group, block_tables, block_size, num_kv_heads, whole=len(groups) == 1) for group in groups]
    )


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
    angles: Angles | None = None,
) -> Tensor:
    """Compute attention group by group, and put the results where the queries were."""
    bias = bias or KVBias()
    out = None
    for group in plan.groups:
        part = _attend(
            q if group.queries is None else q[group.queries],
            _gather(key_cache, group, q.dtype, bias.keys, angles),
            _gather(value_cache, group, q.dtype, bias.values),
            group,
            scale,
            window,
            softcap,
        )
        if group.queries is None:
            return part
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        out[group.queries] = part
    return q.new_empty(q.shape) if out is None else out


def _group_pieces(pieces: list[Piece], block_size: int) -> Iterator[list[Piece]]:
    """Yield groups of pieces of one size, in the batch's order.

    Padding is at most 16 blocks more than a quarter of the group's blocks.
    """
    group: list[Piece] = []
    group_blocks = 0
    for piece in sorted(pieces, key=lambda piece: (piece.size, piece.end)):
        blocks = -(-piece.end // block_size)
        padding = blocks * len(group) - group_blocks
        if group and (piece.size != group[0].size or padding > 16 + group_blocks // 4):
            yield sorted(group, key=lambda piece: piece.first)
            group, group_blocks = [], 0
        group.append(piece)
        group_blocks += blocks
    if group:
        yield sorted(group, key=lambda piece: piece.first)


def _make_group(pieces: list[Piece], block_tables: Tensor, block_size: int, heads: int, whole: bool) -> PieceGroup:
    slots, firsts, starts, sizes = torch.tensor(pieces).T
    ends = starts + sizes
    width = -(-int(ends.max()) // block_size)
    device, indices = block_tables.device, torch.arange(pieces[0].size)
    blocks = block_tables[slots.to(device), :width].long()
    is_padding = torch.arange(width * block_size) >= ends[:, None]
    return PieceGroup(
        queries=None if whole else (firsts[:, None] + indices).flatten().to(device),
        size=len(indices),
        length=width * block_size,
        blocks=(blocks[:, None, :] * heads + torch.arange(heads, device=device)[:, None]).flatten(),
        padding=is_padding[:, None].expand(-1, heads, -1).flatten().nonzero()[:, 0].to(device),
        positions=(starts[:, None] + indices)[..., None].to(device),
    )


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, group: PieceGroup, scale: float, window: int, softcap: float
) -> Tensor:
    """Return the attention (N C, Hq, D) of one group: `q` (N C, Hq, D), `keys` and `values` (N, Hkv, L, D)."""
    num_heads, dim = q.shape[1:]
    kv_heads, queries_per_kv = keys.shape[1], num_heads // keys.shape[1]
    size = group.size
    q = q.reshape(-1, size, kv_heads, queries_per_kv, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(-1, kv_heads, queries_per_kv * size, dim)
    mask = _mask(group, window, queries_per_kv, q.dtype)
    if softcap:
        out = _softcapped(q, keys, values, mask, scale, softcap)
    else:
        out = F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)
    return out.reshape(-1, kv_heads, queries_per_kv, size, dim).permute(0, 3, 1, 2, 4).reshape(-1, num_heads, dim)


def _gather(
    cache: Tensor, group: PieceGroup, dtype: torch.dtype, bias: Tensor | None = None, angles: Angles | None = None
) -> Tensor:
    """Return the group's vectors (N, Hkv, L, D), with `bias` (Hkv, D) added, rotated to each position by any angles.

    Vectors after a piece's end are set to zero, since the mask would not hide a NaN.
    """
    parts = cache.flatten(0, 1).index_select(0, group.blocks)
    if has_scales(cache.dtype):
        parts = parts.float() * scales(cache).flatten(0, 1).index_select(0, group.blocks)[..., None]
    vectors = parts.view(-1, cache.shape[-1]).index_fill_(0, group.padding, 0.0)
    vectors = vectors.view(-1, cache.shape[1], group.length, cache.shape[-1])
    if bias is not None:
        vectors = vectors + _at_positions(bias, group.length, angles)
    return vectors.to(dtype)


def _at_positions(bias: Tensor, length: int, angles: Angles | None) -> Tensor:
    """Return a bias (Hkv, D) at each position, (Hkv, L, D). No query sees a position beyond the angles' last."""
    repeated = bias.float()[None].expand(length, -1, -1)
    if angles is not None:
        cos, sin = (F.pad(table[:length], (0, 0, 0, max(0, length - len(table)))) for table in angles)
        repeated = rotary(repeated, cos, sin)
    return repeated.transpose(0, 1)


def _mask(group: PieceGroup, window: int, queries_per_kv: int, dtype: torch.dtype) -> Tensor:
    """Return (N, 1, Hq/Hkv C, L): 0 where a query sees a position and -inf where not."""
    if window not in group.masks:
        keys = torch.arange(group.length, device=group.positions.device)
        visible = keys <= group.positions
        if window:
            visible &= keys > group.positions - window
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        group.masks[window] = mask[:, None, None].expand(-1, 1, queries_per_kv, -1, -1).flatten(2, 3)
    return group.masks[window]


def _softcapped(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    scores = (q @ keys.transpose(-1, -2)).float() * (scale / softcap)
    return torch.softmax(scores.tanh_() * softcap + mask, -1).to(values.dtype) @ values
