"""`Throughput`: the growth of a counter per second, over the last ten seconds. Time is a parameter."""

from collections import deque

WINDOW = 10.0
"""Seconds over which the rate is taken."""


class Throughput:
    """A moving rate of a counter that starts at 0."""

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])  # (time, value), a little over a window

    def rate(self, value: int, now: float) -> float:
        """Note the counter's present value, and return its growth per second over the window."""
        self._samples.append((now, value))
        while self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        first_time, first_value = self._samples[0]
        return (value - first_value) / (now - first_time) if now > first_time else 0.0
