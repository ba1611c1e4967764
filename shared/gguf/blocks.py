"""Stored tensors to numbers. The arithmetic of each quantised type is the `gguf` package's.

Blocks are taken some thousands at a time, as many as fit a core's cache: a few rows at a time, as the package does it
itself, spends the time in Python, and whole tensors at a time spend it in memory. Several threads share large tensors.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from shared.errors import ModelError
from shared.gguf.header import StoredTensor

CHUNK = 2**18
"""Numbers that are dequantised at once."""

SHARED = 16
"""Chunks from which on threads share a tensor: in small ones they mostly wait for each other's Python."""

PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.F64: np.dtype("<f8"),
}
"""Types that are their own numbers."""


def check_type(tensor: StoredTensor) -> None:
    """Raises `ModelError` if the tensor is of a type that cannot be dequantised."""
    if tensor.type not in PLAIN and not hasattr(_quantisation(tensor.type), "dequantize_blocks"):
        known = [kind.name for kind in GGMLQuantizationType if hasattr(_quantisation(kind), "dequantize_blocks")]
        raise ModelError(f"{tensor}: this type cannot be read (supported: F32, F16, {', '.join(known)})")


def read_part(tensor: StoredTensor, index: int | None = None, threads: int = 1) -> NDArray[Any]:
    """The tensor, or the one at `index` of those stacked in it: floats, mapped where stored as such, else float32."""
    block, size = GGML_QUANT_SIZES[tensor.type]
    shape = tensor.shape if index is None else tensor.shape[1:]
    count = int(np.prod(shape)) // block
    offset = tensor.offset + (index or 0) * count * size
    if tensor.type in PLAIN:
        mapped: NDArray[Any] = np.memmap(tensor.path, PLAIN[tensor.type], "r", offset, shape)
        return mapped
    stored: NDArray[np.uint8] = np.memmap(tensor.path, np.uint8, "r", offset, (count, size))
    return _dequantise(stored, tensor.type, threads).reshape(shape)


def _dequantise(stored: NDArray[np.uint8], kind: GGMLQuantizationType, threads: int) -> NDArray[np.float32]:
    """(blocks, bytes) to (blocks, numbers)."""
    quantisation, block = _quantisation(kind), GGML_QUANT_SIZES[kind][0]
    quantisation.init_grid()  # lookup tables of some types, which must not be made by two threads
    numbers = np.empty((len(stored), block), np.float32)
    step = max(CHUNK // block, 1)

    def one(start: int) -> None:
        numbers[start : start + step] = quantisation.dequantize_blocks(stored[start : start + step])

    starts = range(0, len(stored), step)
    if threads == 1 or len(starts) < SHARED:
        for start in starts:
            one(start)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, starts))
    return numbers


def _quantisation(kind: GGMLQuantizationType) -> Any:
    """The package's class of that name; None if it has none."""
    return getattr(quants, kind.name, None)
