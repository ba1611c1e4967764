"""`copy_to`: copies the tensors of weight files to a device.

Weight files are memory maps, which a GPU cannot read by itself: torch would wait for each copy, and for everything
that was launched before it. So the host fills pinned buffers in turn, and the GPU reads one while the host fills the
next. The host waits for nothing but the last copy from the buffer that it is about to fill. Copies run on a stream of
their own, for which the current one waits when a parameter is complete. Types are converted on the GPU afterwards.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

_BUFFER_BYTES = 64 * 2**20
_NUM_BUFFERS = 2  # the GPU reads one faster than the host fills the other

Copy = Callable[[Iterable[tuple[Tensor, Tensor]]], None]
"""Copies, in each pair, the second tensor into the first one. Their shapes are equal, and their types may differ."""


def copy_to(device: torch.device) -> Copy:
    """Return the function that copies tensors from the host to `device`."""
    if device.type != "cuda":
        return _copy_directly
    buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_BUFFERS)]
    return PinnedRing(buffers, SideStream(device)).copy


class Event(Protocol):
    """A place in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the stream has come there."""
        ...


class Stream(Protocol):
    """A stream that works beside the current one."""

    def between(self) -> AbstractContextManager[None]:
        """Work launched within the block comes after what was launched before it, and before what is launched later."""
        ...

    def launch(self, work: Callable[[], object]) -> Event:
        """Launch `work` and return the event of its end."""
        ...


class PinnedRing:
    """Copies tensors through buffers that are filled in turn."""

    def __init__(self, buffers: Sequence[Tensor], stream: Stream) -> None:
        """`buffers` are bytes (size,) of pinned memory, all of one size."""
        self._buffers: deque[tuple[Tensor, Event | None]] = deque((buffer, None) for buffer in buffers)
        self._size, self._stream = len(buffers[0]), stream
        self._lock = threading.Lock()  # transformers loads in several threads

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor, on the host, into the first one. Operations launched later see them all."""
        with self._lock, self._stream.between():
            for target, source in pairs:
                for target_piece, piece in _split(target, source, self._size):
                    self._send(target_piece, piece)

    def _send(self, target: Tensor, source: Tensor) -> None:
        buffer, last_copy = self._buffers.popleft()
        if last_copy:
            last_copy.synchronize()
        pinned = buffer[: source.nbytes].view(source.dtype).view(source.shape)
        pinned.copy_(source)
        self._buffers.append((buffer, self._stream.launch(partial(_upload, target, pinned))))


class SideStream:
    """A CUDA stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def between(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # which may still use memory that the targets have taken over
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def launch(self, work: Callable[[], object]) -> Event:
        work()
        event: Event = self._stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        return event


def _copy_directly(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def _split(target: Tensor, source: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pieces of both tensors that hold the same elements, of at most `size` bytes of the source."""
    if source.ndim == 2 and source.stride(0) < source.stride(1):
        target, source = target.T, source.T  # transposed: its pieces lie side by side in the file
    if source.nbytes <= size:
        if source.numel():
            yield target, source
        return
    rows = size // source[0].nbytes
    if rows:
        yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)
        return
    for target_row, row in zip(target, source, strict=True):
        yield from _split(target_row, row, size)


def _upload(target: Tensor, pinned: Tensor) -> None:
    """Copy `pinned` into `target` without waiting. torch alone would convert its type on the host."""
    same = pinned.dtype == target.dtype
    target.copy_(pinned if same else pinned.to(target.device, non_blocking=True), non_blocking=True)
