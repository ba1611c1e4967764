"""Reads the data of tensors, as floats or as blocks. The `gguf` package dequantises blocks.

Some thousands of blocks are dequantised at once, as many as fit into a core's cache. Smaller chunks, as in
the package, would spend most of the time in Python, and larger ones in memory. Several threads share the chunks of a
large tensor.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf.quants
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from shared.errors import ModelError
from shared.gguf.header import StoredTensor

CHUNK = 2**18
"""Values that are dequantised in one call."""

MIN_SHARED_CHUNKS = 16
"""The number of chunks from which threads are used. In smaller tensors they mostly wait for the interpreter's lock."""

FLOAT_TYPES: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.F64: np.dtype("<f8"),
}
"""Types that are not quantised."""


def check_type(tensor: StoredTensor) -> None:
    """Raise `ModelError` if the tensor is of a type that cannot be dequantised."""
    if tensor.type not in FLOAT_TYPES and not hasattr(_codec(tensor.type), "dequantize_blocks"):
        supported = [type.name for type in GGMLQuantizationType if hasattr(_codec(type), "dequantize_blocks")]
        raise ModelError(f"{tensor}: this type cannot be read (supported: F32, F16, {', '.join(supported)})")


Region = tuple[slice, ...]
"""What to read of a tensor: the bounds of each dimension; () is all of it."""


def map_blocks(tensor: StoredTensor, expert: int | None = None, region: Region = ()) -> NDArray[np.uint8]:
    """Return the blocks (..., bytes) of what `region` takes of the tensor, or of an expert's matrix along its first
    dimension. Where `region` begins or ends in a block, the whole block is there.

    They are mapped from the file. Writing to them changes memory, not the file.
    """
    block, size = GGML_QUANT_SIZES[tensor.type]
    *outer, columns = _shape(tensor, expert)
    shape = (*outer, columns // block, size)
    offset = tensor.offset + (expert or 0) * math.prod(shape)
    blocks = np.memmap(tensor.path, np.uint8, "c", offset, shape)
    if not region:
        return blocks
    *rows, column = region
    return blocks[(*rows, slice(column.start // block, -(-column.stop // block)))]


def read_tensor(tensor: StoredTensor, expert: int | None = None, threads: int = 1, region: Region = ()) -> NDArray[Any]:
    """Return what `region` takes of the tensor, or of an expert's matrix along its first dimension.

    Floats are mapped from the file as they are stored. Other types are dequantised to float32.
    """
    blocks = map_blocks(tensor, expert, region)
    if is_mapped(tensor):
        return blocks.view(FLOAT_TYPES[tensor.type])[..., 0]
    return _dequantize(blocks, tensor.type, threads, region)


def dequantize_rows(
    tensor: StoredTensor, expert: int | None, rows: slice | NDArray[np.intp], threads: int = 1, region: Region = ()
) -> NDArray[np.float32]:
    """Return some rows of what `region` takes of the matrix, or of an expert's in a stack of them, in float32."""
    return _dequantize(map_blocks(tensor, expert, region)[rows], tensor.type, threads, region)


def is_mapped(tensor: StoredTensor) -> bool:
    """Return whether `read_tensor` maps the tensor, rather than dequantising it."""
    return tensor.type in FLOAT_TYPES


def _dequantize(
    blocks: NDArray[np.uint8], type: GGMLQuantizationType, threads: int, region: Region
) -> NDArray[np.float32]:
    """Dequantise blocks (..., blocks, bytes) to (..., values), of which `region` may begin or end within blocks."""
    *outer, count, size = blocks.shape
    codec, block = _codec(type), GGML_QUANT_SIZES[type][0]
    stored = blocks.reshape(-1, size)
    codec.init_grid()  # makes the lookup tables of some types, which two threads must not do at once
    values = np.empty((len(stored), block), np.float32)

    def dequantize(start: int, end: int) -> None:
        values[start:end] = codec.dequantize_blocks(stored[start:end])

    _for_chunks(dequantize, len(stored), block, threads)
    values = values.reshape(*outer, count * block)
    if not region:
        return values
    first, length = region[-1].start % block, region[-1].stop - region[-1].start
    return values[..., first : first + length]


def _shape(tensor: StoredTensor, expert: int | None) -> tuple[int, ...]:
    return tensor.shape if expert is None else tensor.shape[1:]


def _for_chunks(work: Callable[[int, int], None], count: int, block: int, threads: int) -> None:
    """Call `work` with the start and the end of each chunk of `count` blocks of `block` values."""
    chunk = max(CHUNK // block, 1)  # blocks
    starts = range(0, count, chunk)
    ends = [min(start + chunk, count) for start in starts]
    if threads == 1 or len(starts) < MIN_SHARED_CHUNKS:
        for start, end in zip(starts, ends, strict=True):
            work(start, end)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, starts, ends))


def _codec(type: GGMLQuantizationType) -> Any:
    """Return the `gguf` package's class for a quantised type; None if it has none."""
    return getattr(gguf.quants, type.name, None)
