"""`DecodeGraphs`: CUDA graphs of the model's forward pass for batches of decodes.

A graph launches all kernels of a pass at once, where Python needs some 9 µs for each: at small batches a GPU would wait
for them. It reads and writes fixed addresses, so its inputs are the rows in `SequenceStates`, and its result is copied
to one tensor for all graphs. A batch runs the next larger graph, padded with rows that have no token and write nothing.

Logits and sampling are not in the graphs: they are launched while the graph runs, so nothing waits for them, and there
need be no graph for each kind of sampling.
"""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.batch import Batch

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Runs a function that launches kernels, and returns one that launches the same kernels again."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows to capture: 1, 2, 4, then every eighth, up to all slots or 512."""
    largest = min(max_num_seqs, 512)
    return sorted({size for size in (1, 2, 4, *range(8, largest + 1, 8), largest) if size <= largest})


class DecodeGraphs:
    """The graphs of one epoch."""

    def __init__(self, sizes: list[int], forward: Callable[[int], Tensor], capture: Capture) -> None:
        """Capture `forward`, which returns the hidden states (rows, H) of that many rows, for each of `sizes`."""
        self._sizes = sizes
        self._replays: dict[int, Callable[[], object]] = {}
        self._hidden = torch.empty(0)
        began = time.perf_counter()
        for size in reversed(sizes):  # the largest first: the others find room in its memory
            self._replays[size] = capture(self._store(size, forward))
        if sizes:
            seconds = time.perf_counter() - began
            logger.info("captured %d graphs of up to %d decodes in %.1f s", len(sizes), sizes[-1], seconds)

    def size_for(self, batch: Batch) -> int:
        """Return the rows of the graph that `batch` runs in; 0 if none takes it."""
        if batch.counts.max() > 1:
            return 0
        return next((size for size in self._sizes if size >= len(batch.slots)), 0)

    def run(self, size: int) -> Tensor:
        """Run the graph of `size` rows. Return the hidden states (size, H), which the next run overwrites."""
        self._replays[size]()
        return self._hidden[:size]

    def _store(self, size: int, forward: Callable[[int], Tensor]) -> Callable[[], None]:
        def store() -> None:
            hidden = forward(size)
            if len(self._hidden) < size:
                self._hidden = torch.empty_like(hidden)
            self._hidden[:size].copy_(hidden)

        return store


def cuda_capture() -> Capture:
    """Return the capture of CUDA graphs that share their memory: one of them runs at a time.

    All are captured on one stream, since libraries keep a workspace for each.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate workspaces in a first run, which a graph cannot hold
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            run()
        return graph.replay

    return capture


def repeat(run: Callable[[], object]) -> Callable[[], object]:
    """Run a function that launches kernels, and return it: the capture of interpreted kernels, which need no graph."""
    run()
    return run
