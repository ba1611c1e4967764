"""Computes latencies and rates from the outcomes of requests, as `vllm bench serve` defines them. No I/O.

- TTFT: from sending a request to its first piece (a chunk with a token, see client.py). ITL: between two pieces, all
  requests' together.
- TPOT: (E2EL - TTFT) / (tokens - 1), of requests with more than one token.
- E2EL: from sending to the last piece.
- Goodput: requests per second that meet every goal. A request with a single token has a TPOT of 0 here.
- Rates are over the whole run, failed requests' time included. Percentiles are interpolated; standard deviations are
  the population's. Without requests, all values are 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quire.bench.client import Outcome


class LatencyStats(NamedTuple):
    """The distribution of one latency, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]  # by percent


class Totals(NamedTuple):
    """Counts and rates of a run."""

    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    request_throughput: float  # completed requests a second
    request_goodput: float | None  # completed requests a second that meet the goals; None without goals
    output_throughput: float  # tokens a second
    total_token_throughput: float  # input and output tokens a second
    peak_output_throughput: float  # most pieces in one second, as vLLM counts it
    peak_concurrency: int


def totals(outcomes: Sequence[Outcome], seconds: float, goals: Mapping[str, float]) -> Totals:
    """Return the totals of a run that took `seconds`. `goals` are seconds by the latency's name: ttft, tpot, e2el."""
    completed = [outcome for outcome in outcomes if outcome.ok]
    input_tokens = sum(outcome.prompt_len for outcome in completed)
    output_tokens = sum(outcome.output_tokens for outcome in completed)
    num_good = sum(meets_goals(outcome, goals) for outcome in completed)
    timeline = Timeline(completed)
    return Totals(
        completed=len(completed),
        failed=len(outcomes) - len(completed),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        request_throughput=len(completed) / seconds,
        request_goodput=num_good / seconds if goals else None,
        output_throughput=output_tokens / seconds,
        total_token_throughput=(input_tokens + output_tokens) / seconds,
        peak_output_throughput=float(max(timeline.pieces, default=0)),
        peak_concurrency=max(timeline.running, default=0),
    )


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the latencies (seconds) of the completed requests, by name."""
    completed = [outcome for outcome in outcomes if outcome.ok]
    return {
        "ttft": [outcome.ttft for outcome in completed],
        "tpot": [tpot(outcome) for outcome in completed if outcome.output_tokens > 1],
        "itl": [itl for outcome in completed for itl in outcome.itls],
        "e2el": [outcome.latency for outcome in completed],
        "client_queue_time": [outcome.queued for outcome in completed],
        "e2el_including_client_queue": [outcome.queued + outcome.latency for outcome in completed],
    }


def latency_stats(seconds: Sequence[float], percentiles: Sequence[float]) -> LatencyStats:
    """Return the distribution of latencies in seconds, with these percentiles (0 to 100)."""
    values = np.array(seconds or [0.0]) * 1000
    at_percentiles = np.percentile(values, list(percentiles)).tolist()
    return LatencyStats(
        float(values.mean()),
        float(np.median(values)),
        float(values.std()),
        dict(zip(percentiles, at_percentiles, strict=True)),
    )


def tpot(outcome: Outcome) -> float:
    """Return the seconds per token after the first; 0 if there is only one."""
    return (outcome.latency - outcome.ttft) / (outcome.output_tokens - 1) if outcome.output_tokens > 1 else 0.0


def meets_goals(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    """Return whether a completed request took no longer than any of the goals."""
    latencies = {"ttft": outcome.ttft, "tpot": tpot(outcome), "e2el": outcome.latency}
    return all(latencies[name] <= limit for name, limit in goals.items())


class Timeline:
    """Pieces and running requests by second, since the first completed request was sent.

    A request counts as running in each second that it touches.
    """

    def __init__(self, completed: Sequence[Outcome]) -> None:
        begin = min((outcome.started for outcome in completed), default=0.0)
        end = max((outcome.started + outcome.latency for outcome in completed), default=begin)
        length = math.ceil(end - begin) + 1 if completed else 0
        self.pieces = [0] * length
        self.running = [0] * length
        for outcome in completed:
            now = outcome.started - begin + outcome.ttft
            self.pieces[int(now)] += 1
            for itl in outcome.itls:
                now += itl
                self.pieces[min(int(now), length - 1)] += 1  # rounding may put a sum slightly after the end
            for second in range(int(outcome.started - begin), int(outcome.started + outcome.latency - begin) + 1):
                self.running[second] += 1
