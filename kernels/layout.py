"""The layout of keys and values in memory. Only this file knows it, and csrc/kv_cache.h for the kernels in C++.

    storage: (layer, K or V, block, kv head, slot in the block, dim), one allocation for all layers

Heads come before slots, so that one head's part of a block is contiguous. Kernels may want another order within such
a part: with `keys_transposed`, that of keys is (dim, slot), and with `lanes` the dimensions are rounded up to a
multiple, the added ones being zero. Both show in the strides of `views` only, never in their shapes.

Integers are quants: each vector (of a token and a head) has a scale by which its quants are multiplied. The scales of
a head's part of a block lie behind its quants, so they are copied, shared and counted with it; `scales` returns those
of a view.

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
SCALE = torch.float32


@dataclass(frozen=True)
class KVLayout:
    """The sizes of a KV cache, all but the number of blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # positions
    dtype: torch.dtype
    keys_transposed: bool = False
    lanes: int = 1

    @property
    def dim(self) -> int:
        """Elements of a head's vector with padding; of quants a multiple of 4, so that the scales are aligned."""
        lanes = self.lanes if self.dtype.is_floating_point else math.lcm(self.lanes, SCALE.itemsize)
        return -(-self.head_dim // lanes) * lanes

    @property
    def _width(self) -> int:
        """Elements of the storage that a vector takes, its scale included."""
        return self.dim if self.dtype.is_floating_point else self.dim + SCALE.itemsize

    @property
    def bytes_per_token(self) -> int:
        """The size of a token's keys and values, in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self._width * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Return zeroed storage. On a CPU its pages are taken from the system only as they are first written."""
        shape = (self.num_layers, 2, num_blocks, self.num_kv_heads, self.block_size, self._width)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        size = math.prod(shape) * self.dtype.itemsize
        memory = np.zeros(size + CACHE_LINE, np.uint8)  # torch.zeros would write it all
        start = -memory.ctypes.data % CACHE_LINE
        return torch.from_numpy(memory[start : start + size]).view(self.dtype).view(shape)

    def views(self, storage: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (K, V) of each layer, both (block, kv_head, slot, head_dim), sharing `storage`'s memory."""
        shape = (storage.shape[2], self.num_kv_heads, self.block_size, self.head_dim)
        head = self.block_size * self._width
        outer, rows, columns = (self.num_kv_heads * head, head), (self.dim, 1), (1, self.block_size)

        def view(part: Tensor, inner: tuple[int, int]) -> Tensor:
            # `scales` reads the strides; without `as_strided`, torch may make up those of dimensions of size 1.
            return part.as_strided(shape, (*outer, *inner), part.storage_offset())

        return [(view(keys, columns if self.keys_transposed else rows), view(values, rows)) for keys, values in storage]


def scales(view: Tensor) -> Tensor:
    """Return the scales of a view of quants: (block, kv_head, slot) float32, sharing its memory."""
    blocks, heads, slots, _ = view.shape
    block, head = view.stride()[:2]
    start = view.storage_offset() + head - slots * SCALE.itemsize
    scale_bytes = view.as_strided((blocks, heads, slots, SCALE.itemsize), (block, head, SCALE.itemsize, 1), start)
    return scale_bytes.view(SCALE)[..., 0]


def flat_slots(tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return flat indices (T,) int64 of `positions` (T,), each of the sequence whose table is `tables[rows[t]]`."""
    blocks = tables[rows, positions // block_size].long()
    return blocks * block_size + positions % block_size
