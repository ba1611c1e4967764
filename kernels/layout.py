"""The memory layout of keys and values. Only this file and csrc/kv_cache.h, for the C++ kernels, know it.

    storage: (layer, K or V, block, kv head, slot in the block, dim), one allocation for all layers

Heads come before slots, so that one head's part of a block is contiguous. Kernels may need another order within such
a part: with `keys_transposed`, keys are (dim, slot), and with `lanes`, dim is padded with zeros to a multiple of it.
Only the strides of `views` show this, never their shapes.

In a cache of int8 or float8_e4m3fn, each vector (of a token and a head) is quantised with its own scale. The scales of
a head's part of a block are stored after its quants, so they are copied, shared and counted with the block. `scales`
returns the scales of a view.

A position of a sequence has the flat index `block * block_size + offset`, with the block taken from the sequence's
table at `position // block_size` and `offset = position % block_size`.

Storage must hold finite numbers from the start: kernels may mask positions beyond a sequence by adding -inf.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64  # bytes
SCALE_DTYPE = torch.float32

LARGEST_QUANTS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The types of quants, and the largest quant of each. A vector's scale is its largest number divided by that."""


def has_scales(dtype: torch.dtype) -> bool:
    """Return whether a cache of `dtype` holds quants, with a scale for each vector."""
    return dtype in LARGEST_QUANTS


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
    def padded_dim(self) -> int:
        """The elements of a head's vector with padding. Of quants, a multiple of 4 keeps the scales aligned."""
        lanes = math.lcm(self.lanes, SCALE_DTYPE.itemsize) if has_scales(self.dtype) else self.lanes
        return -(-self.head_dim // lanes) * lanes

    @property
    def _vector_size(self) -> int:
        """The elements of storage that a vector takes, including its scale."""
        return self.padded_dim + (SCALE_DTYPE.itemsize if has_scales(self.dtype) else 0)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's keys and values in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self._vector_size * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Return zeroed storage. On a CPU, the system allocates its pages when they are first written."""
        shape = (self.num_layers, 2, num_blocks, self.num_kv_heads, self.block_size, self._vector_size)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        size = math.prod(shape) * self.dtype.itemsize
        memory = np.zeros(size + CACHE_LINE, np.uint8)  # torch.zeros would write all of it
        start = -memory.ctypes.data % CACHE_LINE
        return torch.from_numpy(memory[start : start + size]).view(self.dtype).view(shape)

    def views(self, storage: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (K, V) of each layer, both (block, kv_head, slot, head_dim), sharing `storage`'s memory."""
        shape = (storage.shape[2], self.num_kv_heads, self.block_size, self.head_dim)
        head = self.block_size * self._vector_size
        outer, rows, columns = (self.num_kv_heads * head, head), (self.padded_dim, 1), (1, self.block_size)

        def view(part: Tensor, inner: tuple[int, int]) -> Tensor:
            # `scales` reads the strides; without `as_strided`, torch may choose others for dimensions of size 1.
            return part.as_strided(shape, (*outer, *inner), part.storage_offset())

        return [(view(keys, columns if self.keys_transposed else rows), view(values, rows)) for keys, values in storage]


def scales(view: Tensor) -> Tensor:
    """Return the scales of a view of quants: (block, kv_head, slot) float32, sharing its memory."""
    blocks, heads, slots, _ = view.shape
    block, head = view.stride()[:2]
    size = SCALE_DTYPE.itemsize
    start = view.storage_offset() + head - slots * size
    scale_bytes = view.as_strided((blocks, heads, slots, size), (block, head, size, 1), start)
    return scale_bytes.view(SCALE_DTYPE)[..., 0]


def flat_slots(tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return flat indices (T,) int64 of `positions` (T,), each of the sequence whose table is `tables[rows[t]]`."""
    blocks = tables[rows, positions // block_size].long()
    return blocks * block_size + positions % block_size
