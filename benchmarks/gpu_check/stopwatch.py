"""`Stopwatch`: times calls on a device, in the same way whether it is a GPU or a CPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from services.worker.decode_graphs import Capture, cuda_capture, repeat

WARM_UP = 3
"""Calls on a GPU that come before those that are measured, so that its clock rate has risen."""

FLUSHED_BYTES = 2**28
"""Written before each measured call on a GPU, so that its inputs are not in a cache: more than any L2 cache has."""

Call = Callable[[], object]


class Clock(Protocol):
    """Marks moments in the order of a device's work."""

    def mark(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks. It waits for the later one."""


class HostClock:
    """The clock of a device that has finished a call when it returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class EventClock:
    """The clock of a CUDA device: marks are events in the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000


class Stopwatch:
    """Measures medians of `repeats` calls on `device`."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        is_cuda = device.type == "cuda"
        self._device, self._repeats = device, repeats
        self._warm_up = WARM_UP if is_cuda else 0
        self._clock: Clock = EventClock() if is_cuda else HostClock()
        self._capture: Capture = cuda_capture() if is_cuda else repeat
        self._flushed = torch.empty(FLUSHED_BYTES if is_cuda else 1, dtype=torch.uint8, device=device)

    @torch.inference_mode()
    def seconds(self, call: Call, *, in_graph: bool = True) -> float:
        """Return the median time of `call`. On a GPU it runs as a graph, so that Python's launches do not count.

        A call that no graph can hold must take longer than its launches.
        """
        replay = self._capture(call) if in_graph else repeat(call)
        for _ in range(self._warm_up):
            replay()
        spans = []
        for _ in range(self._repeats):
            self._flushed.zero_()
            begin = self._clock.mark()
            replay()
            spans.append((begin, self._clock.mark()))
        return statistics.median(self._clock.seconds(begin, end) for begin, end in spans)

    @torch.inference_mode()
    def seconds_of_launch(self, call: Call, count: int) -> float:
        """Return the time of one of `count` calls in a row without a graph: Python's, if the device needs less."""
        call()
        self.wait()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - began) / count

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
