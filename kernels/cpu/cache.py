"""Storing keys and values in the paged cache: csrc/elementwise.cpp.

Keys are stored in groups of dimensions with the positions side by side, so that the scores of sixteen keys are computed
at once, and values in groups of positions. The head's dimension is padded to a multiple of 16.
"""

import torch
from torch import Tensor

from kernels.cpu.elementwise import rms_norm, rotary
from kernels.layout import KVLayout


def kv_layout(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> KVLayout:
    """Return the layout that the kernels read; `block_size` is a multiple of 16, or divides 16."""
    return KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype, grouped=True, lanes=16)


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store keys and values, rounded to the caches' type."""
    torch.ops.quire.write_kv(keys.float(), values.float(), key_cache, value_cache, slot_mapping)


def rotate_and_store(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values, and return the queries."""
    kv_heads = key_cache.shape[1]
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    if cos_sin is not None:
        cos, sin = (table.index_select(0, positions) for table in cos_sin)
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
    write_kv(k, v, key_cache, value_cache, slot_mapping)
    return q
