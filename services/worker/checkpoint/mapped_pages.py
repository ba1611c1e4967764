"""`will_need` and `release`: tell the system which pages of mapped files are read next, and which were read last.

Without the first, a page is read from the disk when it is touched, in pieces that are too small for the disk's speed.
Without the second, pages stay in the process's memory for as long as their file is open. Both are advice: a page that
was released is mapped again when it is touched. Where the system has no such call, nothing happens.
"""

import ctypes
from contextlib import suppress
from functools import cache
from mmap import PAGESIZE
from typing import Final

from torch import Tensor

_MADV_WILLNEED: Final = 3  # of Linux's mman.h
_MADV_DONTNEED: Final = 4
_READ_AHEAD: Final = 2**19  # bytes; of a longer range, Linux reads no more than one request of the disk may have


def will_need(mapped: Tensor) -> None:
    """Begin to read the bytes of `mapped` into memory, and do not wait for them."""
    first, end = mapped.data_ptr() // PAGESIZE * PAGESIZE, _end(mapped)
    for start in range(first, end, _READ_AHEAD):
        _madvise(start, min(end - start, _READ_AHEAD), _MADV_WILLNEED)


def release(mapped: Tensor) -> None:
    """Remove the pages that lie within `mapped` from the process's memory.

    They must be pages of a mapped file that was not written to: on the heap, their bytes would become zeros.
    """
    first, end = -(-mapped.data_ptr() // PAGESIZE) * PAGESIZE, _end(mapped) // PAGESIZE * PAGESIZE
    if first < end:
        _madvise(first, end - first, _MADV_DONTNEED)


def _end(tensor: Tensor) -> int:
    """Return the address behind the last number of a tensor, whose rows may lie apart, or be the same."""
    if not tensor.numel():
        return tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _madvise(start: int, size: int, advice: int) -> None:
    with suppress(AttributeError):
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
