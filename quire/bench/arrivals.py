"""Computes the arrival times of requests, in seconds from the start of a run, from rate, burstiness and seed."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np


class Ramp(NamedTuple):
    """A rate that grows from the first request to the last, in requests per second."""

    kind: Literal["linear", "exponential"]
    first: int
    last: int


def rates(count: int, rate: float, ramp: Ramp | None = None) -> list[float]:
    """Return the rate (requests per second) at each of `count` requests: always `rate`, or the ramp's."""
    if ramp is None:
        return [rate] * count
    shares = [index / max(count - 1, 1) for index in range(count)]
    if ramp.kind == "exponential":
        return [ramp.first * (ramp.last / ramp.first) ** share for share in shares]
    return [ramp.first + (ramp.last - ramp.first) * share for share in shares]


def milestones(ramp: Ramp, rates_per_second: Sequence[float], times: Sequence[float]) -> list[tuple[int, float]]:
    """Return each whole rate (requests per second) that a ramp reaches, and when (seconds)."""
    reached_at, reached = [(ramp.first, 0.0)], ramp.first
    for rate, time in zip(rates_per_second, times, strict=True):
        reached_at += [(whole, time) for whole in range(reached + 1, int(rate) + 1)]
        reached = max(reached, int(rate))
    return reached_at


def arrival_times(rates_per_second: Sequence[float], burstiness: float, seed: int) -> list[float]:
    """Return the time of each request in seconds, in order, from the rate at each request.

    The gaps between requests are gamma-distributed with mean 1 / rate and shape `burstiness`: shape 1 is a Poisson
    process, and an infinite shape gives equal gaps. At a constant rate the times are stretched so that the last is
    exactly count / rate, and a run has the configured rate, whatever its seed. A rate of 0 (the start of a linear
    ramp) is replaced by the next one.
    """
    if not rates_per_second or math.isinf(rates_per_second[0]):
        return [0.0] * len(rates_per_second)
    means = 1.0 / np.array(
        [rate or next_rate for rate, next_rate in zip(rates_per_second, [*rates_per_second[1:], 1.0], strict=True)]
    )
    rng = np.random.default_rng(seed)
    gaps = means if math.isinf(burstiness) else rng.gamma(burstiness, means / burstiness)
    times = list(itertools.accumulate(gaps.tolist()))
    if min(rates_per_second) == max(rates_per_second) and times[-1] > 0:
        stretch = len(rates_per_second) / rates_per_second[0] / times[-1]
        times = [time * stretch for time in times]
    return times
