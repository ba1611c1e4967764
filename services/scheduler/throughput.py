"""`Throughput`: a counter's growth a second, over the last seconds. Time is a parameter."""

from collections import deque

WINDOW = 10.0
"""Seconds over which the rate is taken."""


class Throughput:
    """A moving rate of a counter that starts at 0."""

    def __init__(self, now: float) -> None:
        self._seen: deque[tuple[float, int]] = deque([(now, 0)])  # (time, value), a little more than a window of them

    def rate(self, value: int, now: float) -> float:
        """Note the counter's present value, and return its growth a second over the window."""
        self._seen.append((now, value))
        while self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()
        began, before = self._seen[0]
        return (value - before) / (now - began) if now > began else 0.0
