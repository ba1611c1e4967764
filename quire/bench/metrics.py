"""From timings to numbers. Pure, and by the definitions of `vllm bench serve`:

- TTFT: from sending a request to its first piece. ITL: between two pieces, all requests' together.
- TPOT: (E2EL - TTFT) / (tokens - 1), of requests with more than one token.
- E2EL: from sending to the last piece.
- Goodput: requests a second that keep every goal; one with a single token has a TPOT of 0 there.
- Rates are over the whole run, failed requests' time included. Percentiles are interpolated; deviations are those of a
  whole population. Where there is nothing to look at, figures are 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quire.bench.client import Outcome


class Spread(NamedTuple):
    """How values lie, in milliseconds."""

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
    request_goodput: float | None  # of those, the ones that keep the goals; None without goals
    output_throughput: float  # tokens a second
    total_token_throughput: float
    peak_output_throughput: float  # most pieces in one second
    peak_concurrency: int


def totals(outcomes: Sequence[Outcome], seconds: float, goals: Mapping[str, float]) -> Totals:
    """Of a run that took so many seconds. Goals are seconds by name: ttft, tpot, e2el."""
    whole = [outcome for outcome in outcomes if outcome.ok]
    read, written = sum(one.prompt_len for one in whole), sum(one.output_tokens for one in whole)
    good = sum(keeps(one, goals) for one in whole)
    timeline = Timeline(whole)
    return Totals(
        completed=len(whole),
        failed=len(outcomes) - len(whole),
        input_tokens=read,
        output_tokens=written,
        request_throughput=len(whole) / seconds,
        request_goodput=good / seconds if goals else None,
        output_throughput=written / seconds,
        total_token_throughput=(read + written) / seconds,
        peak_output_throughput=float(max(timeline.pieces, default=0)),
        peak_concurrency=max(timeline.running, default=0),
    )


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds of the completed requests by name, all that there are."""
    whole = [outcome for outcome in outcomes if outcome.ok]
    return {
        "ttft": [one.ttft for one in whole],
        "tpot": [tpot(one) for one in whole if one.output_tokens > 1],
        "itl": [itl for one in whole for itl in one.itls],
        "e2el": [one.latency for one in whole],
        "client_queue_time": [one.queued for one in whole],
        "e2el_including_client_queue": [one.queued + one.latency for one in whole],
    }


def spread(seconds: Sequence[float], percentiles: Sequence[float]) -> Spread:
    """How these values lie."""
    values = np.array(seconds or [0.0]) * 1000
    found = np.percentile(values, list(percentiles)).tolist()
    return Spread(
        float(values.mean()), float(np.median(values)), float(values.std()), dict(zip(percentiles, found, strict=True))
    )


def tpot(outcome: Outcome) -> float:
    """Seconds a token behind the first; 0 if there is only that."""
    return (outcome.latency - outcome.ttft) / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else 0.0


def keeps(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    """Whether a completed request took no longer than any of the goals."""
    took = {"ttft": outcome.ttft, "tpot": tpot(outcome), "e2el": outcome.latency}
    return all(took[name] <= limit for name, limit in goals.items())


class Timeline:
    """Completed requests second by second, from when the first was sent; one is running in each that it touches."""

    def __init__(self, whole: Sequence[Outcome]) -> None:
        begin = min((one.started for one in whole), default=0.0)
        end = max((one.started + one.latency for one in whole), default=begin)
        length = math.ceil(end - begin) + 1 if whole else 0
        self.pieces = [0] * length
        self.running = [0] * length
        for one in whole:
            now = one.started - begin + one.ttft
            self.pieces[int(now)] += 1
            for itl in one.itls:
                now += itl
                self.pieces[min(int(now), length - 1)] += 1  # sums of floats may end a hair behind
            for second in range(int(one.started - begin), int(one.started + one.latency - begin) + 1):
                self.running[second] += 1
