"""`HostBlocks`: the blocks of KV in host memory, and the copies between them and the device.

On a GPU the copies have a stream of their own, so that those of a plan run beside the step before it. They need not
wait for that one: the scheduler names only blocks that no step in flight computes or reads. The plan's own step waits
for them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kernels.layout import KVLayout
from kernels.ops import Ops
from services.worker.interface import OutOfMemory

Moves = Sequence[tuple[int, int]]

_MEASURED_BYTES = 32 * 2**20
"""Bytes that a measurement copies: more than a core's caches hold."""

_REPEATS = 3


class HostBlocks:
    """`num_blocks` blocks of `layout` on the host of `device`. Raise OutOfMemory if they cannot be pinned for a GPU."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, ops: Ops) -> None:
        self._ops = ops
        self._memory = layout.allocate_host(num_blocks)
        self._stream: Any = None
        if device.type == "cuda" and num_blocks:
            _pin(self._memory)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        if getattr(self, "_stream", None) is not None:
            self._stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]

    def swap_out(self, storage: Tensor, moves: Moves) -> None:
        """Copy blocks of `storage` to the host: (block, host block). What is launched after that waits for it."""
        if moves:
            with self._copying():
                self._ops.swap_out(storage, self._memory, moves)

    def swap_in(self, storage: Tensor, moves: Moves) -> None:
        """Copy host blocks to `storage`: (host block, block). What is launched after that waits for it."""
        if moves:
            with self._copying():
                self._ops.swap_in(storage, self._memory, moves)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


@torch.inference_mode()
def measure_bandwidth(layout: KVLayout, device: torch.device, ops: Ops) -> float:
    """Return the bytes per second of copies of blocks to the host, or back, whichever is slower."""
    count = max(1, _MEASURED_BYTES // layout.bytes_per_block)
    storage, host = layout.allocate(count, device), HostBlocks(layout, count, device, ops)
    moves = [(index, index) for index in range(count)]
    slower = max(
        _fastest(device, lambda: host.swap_out(storage, moves)), _fastest(device, lambda: host.swap_in(storage, moves))
    )
    return count * layout.bytes_per_block / slower


def _fastest(device: torch.device, copy: Callable[[], None]) -> float:
    """Return the least seconds of a few copies, of which the first ones touch the memory."""
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _pin(memory: Tensor) -> None:
    """Pin `memory`. torch's own pinned memory would be as large as the next power of two."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status):
        raise OutOfMemory(f"{memory.nbytes} bytes of host memory cannot be pinned: a smaller --swap-space needs less")
