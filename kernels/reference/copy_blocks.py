"""Copy whole blocks, in all layers: storage[:, :, destination] = storage[:, :, source]."""

from torch import Tensor


def copy_blocks(storage: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """`storage` (layer, 2, block, ...) is written; both lists (N,) int64, and no block is in both of them."""
    storage[:, :, destinations] = storage[:, :, sources]
