"""Store new keys and values: cache[block, head, offset] = value, for each token's flat index."""

from torch import Tensor


def write_kv(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write to the caches (block, kv_head, slot, dim), and to nothing else.

    `keys` and `values` (T, kv_head, dim) of any strides, in the caches' dtype; `slots` (T,) int64, flat indices, all
    different.
    """
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = keys
    value_cache[blocks, :, offsets] = values
