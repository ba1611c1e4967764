"""Figures from timings, as `vllm bench serve` defines them. No I/O.

- TTFT: from sending a request to its first piece. ITL: between two pieces, all requests' together.
- TPOT: (E2EL - TTFT) / (tokens - 1), of requests with more than one token.
- E2EL: from sending to the last piece.
- Goodput: requests per second that meet every goal; one with a single token has a TPOT of 0 there.
- Rates are over the whole run, failed requests' time included. Percentiles are interpolated; deviations are those of a
  whole population. Without requests, figures are 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quire.bench.client import Outcome


class Spread(NamedTuple):
    """The distribution of values, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


class Totals(NamedTuple):
    """Counts and rates of a run."""

    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    request_throughput: float  # completed requests a second
    request_goodput: float | None  # completed requests a second that meet the goals; None without goals
    output_throughput: float  # tokens a second
    total_token_throughput: float
    peak_output_throughput: float  # most pieces in one second
    peak_concurrency: int


def totals(outcomes: Sequence[Outcome], seconds: float, goals: Mapping[str, float]) -> Totals:
    """Return the totals of a run of `seconds`. `goals` are seconds by name: ttft, tpot, e2el."""
    completed = [outcome for outcome in outcomes if outcome.ok]
    read, written = sum(one.prompt_len for one in completed), sum(one.output_tokens for one in completed)
    good = sum(meets(one, goals) for one in completed)
    timeline = Timeline(completed)
    return Totals(
        completed=len(completed),
        failed=len(outcomes) - len(completed),
        input_tokens=read,
        output_tokens=written,
        request_throughput=len(completed) / seconds,
        request_goodput=good / seconds if goals else None,
        output_throughput=written / seconds,
        total_token_throughput=(read + written) / seconds,
        peak_output_throughput=float(max(timeline.pieces, default=0)),
        peak_concurrency=max(timeline.running, default=0),
    )


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the latencies (seconds) of the completed requests, by name."""
    completed = [outcome for outcome in outcomes if outcome.ok]
    return {
        "ttft": [one.ttft for one in completed],
        "tpot": [tpot(one) for one in completed if one.output_tokens > 1],
        "itl": [itl for one in completed for itl in one.itls],
        "e2el": [one.latency for one in completed],
        "client_queue_time": [one.queued for one in completed],
        "e2el_including_client_queue": [one.queued + one.latency for one in completed],
    }


def spread(seconds: Sequence[float], percentiles: Sequence[float]) -> Spread:
    """Return the distribution of these values."""
    values = np.array(seconds or [0.0]) * 1000
    at_percentiles = np.percentile(values, list(percentiles)).tolist()
    return Spread(
        float(values.mean()),
        float(np.median(values)),
        float(values.std()),
        dict(zip(percentiles, at_percentiles, strict=True)),
    )


def tpot(outcome: Outcome) -> float:
    """Return the seconds per token after the first; 0 if there is only one."""
    return (outcome.latency - outcome.ttft) / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else 0.0


def meets(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    """Return whether a completed request took no longer than any of the goals."""
    took = {"ttft": outcome.ttft, "tpot": tpot(outcome), "e2el": outcome.latency}
    return all(took[name] <= limit for name, limit in goals.items())


class Timeline:
    """Completed requests by second since the first was sent; a request runs in each second that it touches."""

    def __init__(self, completed: Sequence[Outcome]) -> None:
        begin = min((one.started for one in completed), default=0.0)
        end = max((one.started + one.latency for one in completed), default=begin)
        length = math.ceil(end - begin) + 1 if completed else 0
        self.pieces = [0] * length
        self.running = [0] * length
        for one in completed:
            now = one.started - begin + one.ttft
            self.pieces[int(now)] += 1
            for itl in one.itls:
                now += itl
                self.pieces[min(int(now), length - 1)] += 1  # sums of floats may end a hair behind
            for second in range(int(one.started - begin), int(one.started + one.latency - begin) + 1):
                self.running[second] += 1
