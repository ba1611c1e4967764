"""Where keys and values lie in memory. The only file that knows.

    storage: (layer, K or V, block, kv head, slot in the block, dim), one allocation for all layers

Heads come before slots, so that what one head needs of a block is one contiguous piece. Kernels may want another order
within a piece: with `keys_transposed`, that of keys is (dim, slot), and with `lanes` the dimensions are rounded up to a
multiple, the added ones being zero. Both show in the strides of `views` only, never in their shapes.

A position of a sequence has the flat index `block * block_size + offset`, with the block taken from the sequence's
table at `position // block_size` and `offset = position % block_size`.

Storage must hold finite numbers from the start: readers mask what lies beyond a sequence, and may do it by adding.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64  # bytes


@dataclass(frozen=True)
class KVLayout:
    """Sizes of a KV cache, all but the number of blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # positions
    dtype: torch.dtype
    keys_transposed: bool = False
    lanes: int = 1

    @property
    def dim(self) -> int:
        """Elements that a head's vector takes."""
        return -(-self.head_dim // self.lanes) * self.lanes

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, keys and values."""
        return self.num_layers * 2 * self.num_kv_heads * self.dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Zeroed storage; on a CPU its pages are only taken from the system as they are first written."""
        shape = (self.num_layers, 2, num_blocks, self.num_kv_heads, self.block_size, self.dim)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        size = math.prod(shape) * self.dtype.itemsize
        memory = np.zeros(size + CACHE_LINE, np.uint8)  # torch.zeros would write it all
        start = -memory.ctypes.data % CACHE_LINE
        return torch.from_numpy(memory[start : start + size]).view(self.dtype).view(shape)

    def views(self, storage: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(K, V) of each layer, both (block, kv_head, slot, head_dim), sharing `storage`'s memory."""
        pairs = []
        for keys, values in storage:
            if self.keys_transposed:
                keys = keys.view(*keys.shape[:2], self.dim, self.block_size).transpose(2, 3)
            pairs.append((keys[..., : self.head_dim], values[..., : self.head_dim]))
        return pairs


def flat_slots(tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Flat indices (T,) int64 of `positions` (T,), each of the sequence whose table is `tables[rows[t]]`."""
    blocks = tables[rows, positions // block_size].long()
    return blocks * block_size + positions % block_size
