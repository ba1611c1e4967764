"""Stored tensors to numbers. The arithmetic of each quantised type is the `gguf` package's.

Blocks are taken some thousands at a time, as many as fit a core's cache: a few rows at a time, as the package does it
itself, spends the time in Python, and whole tensors at a time spend it in memory. Several threads share large tensors.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

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

_ZEROS = {GGMLQuantizationType.Q4_0: 8, GGMLQuantizationType.Q4_1: 0, GGMLQuantizationType.Q8_0: 128}


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


class Codes(NamedTuple):
    """A quantised matrix before it is multiplied out: number = step * (code - zero), or step * code + least."""

    bits: int
    codes: NDArray[np.uint8]  # (rows, columns)
    steps: NDArray[np.float16]  # (rows, columns / 32)
    leasts: NDArray[np.float16] | None  # (rows, columns / 32)
    zero: int  # where there are no leasts


def has_codes(tensor: StoredTensor) -> bool:
    """Whether a tensor's type is plain blocks of 4 or 8 bits."""
    return tensor.type in _ZEROS


def read_codes(tensor: StoredTensor, index: int | None = None) -> Codes | None:
    """The matrix, or the one at `index` of those stacked; None if its type is not plain blocks of 4 or 8 bits.

    The layout of a block: a step of float16, a least of float16 (Q4_1), then 32 signed bytes (Q8_0), or 16 bytes whose
    low halves are the first 16 codes and whose high halves the rest.
    """
    if not has_codes(tensor):
        return None
    block, size = GGML_QUANT_SIZES[tensor.type]
    rows, columns = tensor.shape[-2:]
    count = rows * columns // block
    stored = np.memmap(tensor.path, np.uint8, "r", tensor.offset + (index or 0) * count * size, (count, size))

    def halves(start: int) -> NDArray[np.float16]:
        return np.ascontiguousarray(stored[:, start : start + 2]).view(np.float16).reshape(rows, columns // block)

    if tensor.type == GGMLQuantizationType.Q8_0:
        codes = stored[:, 2:] ^ np.uint8(0x80)  # a signed byte and 128
        return Codes(8, codes.reshape(rows, columns), halves(0), None, _ZEROS[tensor.type])
    packed = stored[:, size - block // 2 :]
    codes = np.concatenate((packed & 15, packed >> 4), 1).reshape(rows, columns)
    leasts = halves(2) if tensor.type == GGMLQuantizationType.Q4_1 else None
    return Codes(4, codes, halves(0), leasts, _ZEROS[tensor.type])


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
