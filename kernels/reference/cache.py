"""Storing keys and values in the paged cache, and copying its blocks."""

import torch
from torch import Tensor

from kernels.layout import KVLayout, scales


def kv_layout(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> KVLayout:
    """Return the layout that the reference reads: both keys and values have the head's dimension last."""
    return KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype)


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[block, head, offset] = value, for each token's flat index.

    An int8 cache gets value ≈ quant * scale, with scale = max |value| / 127 over the vector and quant the nearest
    integer.
    """
    block_size = key_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for new, cache in ((keys, key_cache), (values, value_cache)):
        if cache.dtype == torch.int8:
            cache[blocks, :, offsets], scales(cache)[blocks, :, offsets] = _quantize(new)
        else:
            cache[blocks, :, offsets] = new


def copy_blocks(storage: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """storage[:, :, destination] = storage[:, :, source], in all layers."""
    storage[:, :, destinations] = storage[:, :, sources]


def _quantize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 quants (..., D) and scales (...) of vectors (..., D). The scale is NaN if a vector is not finite."""
    vectors = vectors.float()
    largest = vectors.abs().amax(-1)
    tiny = largest < 1e-30  # its inverse would overflow
    inverse = torch.where(tiny, 0.0, 127 / largest)
    quants = (vectors * inverse[..., None]).clamp(-127, 127).nan_to_num().round().to(torch.int8)
    return quants, torch.where(tiny, 0.0, largest / 127) + (vectors * 0).sum(-1)
