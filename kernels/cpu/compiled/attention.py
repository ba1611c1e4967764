"""Paged attention and the writing of keys and values, compiled; formulas and rules stand with the references.

The caches have the reference's shapes, but lie as `kv_layout` says: keys with the position last, so that sixteen keys
are the lanes of one vector of scores. Blocks are multiples of 16 positions, or divide 16.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kv_bias import KVBias
from kernels.layout import KVLayout

kv_layout = partial(KVLayout, keys_transposed=True, lanes=16)
TILE = 64  # keys that the kernel takes at a time


class AttentionPlan(NamedTuple):
    """What `paged_attention` needs to know of a batch; the same for all layers."""

    offsets: Tensor  # (R + 1,) int64
    starts: Tensor  # (R,) int64
    tables: Tensor  # (R, M) int32, contiguous


def plan_attention(
    offsets: Tensor, starts: Tensor, tables: Tensor, *, block_size: int, num_kv_heads: int
) -> AttentionPlan:
    """As the reference; the sizes are read from the caches."""
    return AttentionPlan(offsets, starts, tables.to(torch.int32).contiguous())


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
    """As the reference, computed in float32; the caches may be of a narrower type, or codes with scales."""
    wide = q.float()
    out = wide.new_empty(wide.shape)
    lacking = bias or KVBias()
    torch.ops.quire.paged_attention(wide, key_cache, value_cache, *plan, scale, window, softcap, *lacking, angles, out)
    return out.to(q.dtype)


def pack_angles(cos: Tensor, sin: Tensor) -> Tensor:
    """Return (tiles, R, 64) of cosines and sines (P, R): 64 positions side by side, the last ones padded with zeros."""
    half, length = cos.shape[1] // 2, cos.shape[0]
    both = torch.cat((cos[:, :half], sin[:, :half]), 1)
    padded = F.pad(both, (0, 0, 0, -length % TILE))
    return padded.view(-1, TILE, 2 * half).transpose(1, 2).contiguous()


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """As the reference, rounding to the caches' dtype."""
    torch.ops.quire.write_kv(keys.float(), values.float(), key_cache, value_cache, slots)
