"""The memory layout of keys and values. Only this file and csrc/kv_cache.h, for the C++ kernels, know it.

    storage: (layer, K or V, block, kv head, slot in the block, dim), one allocation for all layers

Heads come before slots, so that one head's part of a block is contiguous. Kernels may need another order within such
a part. With `lanes`, dim is padded with zeros to a multiple of it. With `grouped`, as many elements as fill a lane of 4
bytes lie side by side (of float16 one): keys are (dim / group, slot, group), values (slot / group, dim, group), in
groups of all slots if a block has fewer. There, keys of int8 are unsigned, 128 more than the quants. What `views`
returns is then for kernels only; `vectors` reads it.

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

GROUPS = {torch.int8: 4, torch.bfloat16: 2}
"""The elements of a group, of types that have more than one."""


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
    grouped: bool = False
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
        return self._allocate_on_host(shape)

    def allocate_host(self, num_blocks: int) -> Tensor:
        """Return zeroed memory on the host for swapped blocks, each in one piece: (host block, layer, K or V, ...).

        The system allocates its pages when they are first written.
        """
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self._vector_size)
        return self._allocate_on_host(shape)

    def _allocate_on_host(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * self.dtype.itemsize
        memory = np.zeros(size + CACHE_LINE, np.uint8)  # torch.zeros would write all of it
        start = -memory.ctypes.data % CACHE_LINE
        return torch.from_numpy(memory[start : start + size]).view(self.dtype).view(shape)

    def views(self, storage: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (K, V) of each layer, both (block, kv_head, slot, head_dim), sharing `storage`'s memory.

        If the layout is grouped, they are (block, kv_head, slot, padded_dim) and have their elements as memory has.
        """
        dim = self.padded_dim if self.grouped else self.head_dim
        shape = (storage.shape[2], self.num_kv_heads, self.block_size, dim)
        head = self.block_size * self._vector_size
        strides = (self.num_kv_heads * head, head, self.padded_dim, 1)

        def view(part: Tensor) -> Tensor:
            # `scales` reads the strides; without `as_strided`, torch may choose others for dimensions of size 1.
            return part.as_strided(shape, strides, part.storage_offset())

        return [(view(keys), view(values)) for keys, values in storage]

    def vectors(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the elements of two views as (block, kv_head, slot, head_dim): copies, if the layout is grouped."""
        if not self.grouped:
            return keys, values
        group = GROUPS.get(self.dtype, 1)
        key_groups = keys.reshape(*keys.shape[:2], -1, self.block_size, group).transpose(2, 3)
        value_groups = values.reshape(*values.shape[:2], -1, self.padded_dim, min(group, self.block_size))
        ordered = (key_groups.reshape(keys.shape), value_groups.transpose(3, 4).reshape(values.shape))
        if self.dtype == torch.int8:
            ordered = ordered[0] ^ -128, ordered[1]
        return ordered[0][..., : self.head_dim], ordered[1][..., : self.head_dim]


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
