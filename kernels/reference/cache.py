"""Storing keys and values in the paged cache, and copying its blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.layout import LARGEST_QUANTS, KVLayout, has_scales, scales
from kernels.reference.elementwise import rms_norm, rotary


def kv_layout(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> KVLayout:
    """Return the layout that the reference reads: both keys and values have the head's dimension last."""
    return KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype)


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[block, head, offset] = value, for each token's flat index.

    A cache with scales gets value ≈ quant * scale, with scale = max |value| / 127 over the vector (int8) or / 448
    (float8_e4m3fn), and quant the nearest number that its type has, the even one of two.
    """
    block_size = key_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for new, cache in ((keys, key_cache), (values, value_cache)):
        if has_scales(cache.dtype):
            cache[blocks, :, offsets], scales(cache)[blocks, :, offsets] = _quantize(new, cache.dtype)
        else:
            cache[blocks, :, offsets] = new


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
        cos, sin = (table[positions] for table in cos_sin)
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
    write_kv(k, v, key_cache, value_cache, slot_mapping)
    return q


def copy_blocks(storage: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """storage[:, :, destination] = storage[:, :, source], in all layers."""
    storage[:, :, destinations] = storage[:, :, sources]


def swap_out(storage: Tensor, host: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """host[host_block] = storage[:, :, block], for each (block, host_block).

    It is one copy a block: on a CPU that is twice as fast as one of all blocks by their indices, and on a GPU what it
    gathers first is as small as a block.
    """
    for block, host_block in moves:
        host[host_block].copy_(storage[:, :, block], non_blocking=True)


def swap_in(storage: Tensor, host: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """storage[:, :, block] = host[host_block], for each (host_block, block)."""
    for host_block, block in moves:
        storage[:, :, block].copy_(host[host_block], non_blocking=True)


def _quantize(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return quants (..., D) of `dtype` and scales (...) of vectors (..., D).

    If a vector is not finite, its quants are 0 and its scale is NaN.
    """
    limit = LARGEST_QUANTS[dtype]
    largest = vectors.float().abs().amax(-1)
    broken = ~largest.isfinite()
    vectors = torch.where(broken[..., None], 0.0, vectors.float())
    tiny = largest < 1e-30  # its inverse would overflow
    inverse = torch.where(tiny | broken, 0.0, limit / largest)
    quants = (vectors * inverse[..., None]).clamp(-limit, limit)
    if not dtype.is_floating_point:
        quants = quants.round()
    return quants.to(dtype), torch.where(tiny, 0.0, largest / limit).masked_fill(broken, torch.nan)
