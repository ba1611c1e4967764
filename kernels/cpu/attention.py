"""Paged attention in the type of the cache: csrc/attention.cpp. `kv_layout` (cache.py) defines the caches' layout."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch_rows import BatchRows
from kernels.kv_bias import KVBias

TILE = 64  # positions of a tile of angles; equal to ANGLE_TILE in csrc/attention_block.h


class AttentionPlan(NamedTuple):
    """The batch's rows, the same for all layers."""

    offsets: Tensor  # (rows + 1,) int64
    starts: Tensor  # (rows,) int64
    block_tables: Tensor  # (rows, M) int32, contiguous


def plan_attention(rows: BatchRows, block_tables: Tensor, *, block_size: int, num_kv_heads: int) -> AttentionPlan:
    """Return the rows, with the tables as the kernel reads them. It takes the sizes from the caches."""
    width = -(-rows.lengths.max_length // block_size)
    tables = block_tables.numpy()[rows.slots.numpy(), :width]  # numpy takes a fifth of torch's time here
    offsets, starts = (part.numpy().astype(np.int64) for part in (rows.offsets, rows.starts))
    return AttentionPlan(
        torch.from_numpy(offsets), torch.from_numpy(starts), torch.from_numpy(tables.astype(np.int32, order="C"))
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
    angles: Tensor | None = None,
) -> Tensor:
    """Return the attention in `q`'s type. The caches may be of a narrower type, or quants with scales."""
    wide = q.float()
    out = wide.new_empty(wide.shape)
    biases = bias or KVBias()
    torch.ops.quire.paged_attention(wide, key_cache, value_cache, *plan, scale, window, softcap, *biases, angles, out)
    return out.to(q.dtype)


def pack_angles(cos: Tensor, sin: Tensor) -> Tensor:
    """Pack cosines and sines (P, R) into tiles of 64 positions, (tiles, R, 64): of each the first half of R, since the
    second repeats it. The last tile is padded with zeros.
    """
    half, length = cos.shape[1] // 2, cos.shape[0]
    both = torch.cat((cos[:, :half], sin[:, :half]), 1)
    padded = F.pad(both, (0, 0, 0, -length % TILE))
    return padded.view(-1, TILE, 2 * half).transpose(1, 2).contiguous()
