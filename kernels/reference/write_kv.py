"""Store new keys and values: cache[block, head, offset] = value, for each token's flat index.

In a cache of codes, value ≈ code * scale with scale = max |value| / 127 over the vector, and code the nearest integer.
"""

import torch
from torch import Tensor

from kernels.layout import scales


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write to the caches (block, kv_head, slot, dim), and to nothing else.

    `keys` and `values` (T, kv_head, dim) of any strides, in the caches' dtype or to be coded; `slots` (T,) int64, flat
    indices, all different.
    """
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for new, cache in ((keys, key_cache), (values, value_cache)):
        if cache.dtype == torch.int8:
            cache[blocks, :, offsets], scales(cache)[blocks, :, offsets] = _coded(new)
        else:
            cache[blocks, :, offsets] = new


def _coded(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales; a vector that is not finite gets NaN as its scale."""
    vectors = vectors.float()
    largest = vectors.abs().amax(-1)
    tiny = largest < 1e-30  # its inverse would be no number
    inverse = torch.where(tiny, 0.0, 127 / largest)
    codes = (vectors * inverse[..., None]).clamp(-127, 127).nan_to_num().round().to(torch.int8)
    return codes, torch.where(tiny, 0.0, largest / 127) + (vectors * 0).sum(-1)
