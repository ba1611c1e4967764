"""Tests how timings become metrics, and how the printed block and the result file show them."""

import itertools
import math
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench import metrics
from quire.bench.client import Outcome
from quire.bench.load import Run
from quire.bench.options import ServeOptions
from quire.bench.report import format_report, make_record, summarize

SECONDS = st.floats(min_value=0, max_value=100)
WHOLE = Outcome(8, ok=True, started=10.0, queued=0.5, ttft=0.2, itls=[0.1, 0.3], latency=0.6, output_tokens=5, text="a")
SHORT = Outcome(4, ok=True, started=10.5, queued=0.0, ttft=0.4, latency=0.4, output_tokens=1)
FAILED = Outcome(6, error="gone", started=10.2, ttft=9.0, itls=[9.0], latency=9.0, output_tokens=2)
THREE = [WHOLE, FAILED, SHORT]


def outcomes() -> st.SearchStrategy[list[Outcome]]:
    def one(ttft: float, itls: list[float], extra: int, ok: bool, started: float) -> Outcome:
        tokens = 1 + len(itls) + extra
        return Outcome(
            3, ok=ok, started=started, ttft=ttft, itls=itls, latency=ttft + math.fsum(itls), output_tokens=tokens
        )

    return st.lists(
        st.builds(one, SECONDS, st.lists(SECONDS, max_size=5), st.integers(0, 3), st.booleans(), SECONDS), max_size=8
    )


def test_totals_are_counts_and_rates_of_what_was_completed() -> None:
    results = metrics.totals(THREE, 2.0, {"ttft": 0.3, "e2el": 1.0})
    assert results == metrics.Totals(
        completed=2,
        failed=1,
        input_tokens=12,
        output_tokens=6,
        request_throughput=1.0,
        request_goodput=0.5,
        output_throughput=3.0,
        total_token_throughput=9.0,
        peak_output_throughput=4.0,
        peak_concurrency=2,
    )
    assert metrics.totals(THREE, 2.0, {}).request_goodput is None


def test_latencies_are_those_of_what_was_completed() -> None:
    results = metrics.latencies(THREE)
    assert results["ttft"] == [0.2, 0.4]
    assert results["tpot"] == [pytest.approx(0.1)], "0.4 s for four tokens in two pieces; a single token has none"
    assert results["itl"] == [0.1, 0.3]
    assert results["e2el"] == [0.6, 0.4]
    assert results["client_queue_time"] == [0.5, 0.0]
    assert results["e2el_including_client_queue"] == [1.1, 0.4]


def test_latency_stats_are_in_milliseconds_with_interpolated_percentiles() -> None:
    results = metrics.latency_stats([0.001, 0.002, 0.003, 0.010], [50, 90, 99.9])
    assert (results.mean, results.median) == (4.0, 2.5)
    assert results.std == pytest.approx(math.sqrt(12.5))
    assert results.percentiles == {50: 2.5, 90: pytest.approx(7.9), 99.9: pytest.approx(9.979)}
    assert metrics.latency_stats([], [99]) == metrics.LatencyStats(0.0, 0.0, 0.0, {99: 0.0})


@given(outcomes(), st.dictionaries(st.sampled_from(["ttft", "tpot", "e2el"]), SECONDS))
def test_goodput_grows_with_the_goals_and_is_what_keeps_all(outcomes: list[Outcome], goals: dict[str, float]) -> None:
    good = sum(
        one.ok
        and all(
            {"ttft": one.ttft, "e2el": one.latency, "tpot": metrics.tpot(one)}[name] <= limit
            for name, limit in goals.items()
        )
        for one in outcomes
    )
    totals = metrics.totals(outcomes, 4.0, goals)
    assert totals.request_goodput == (good / 4.0 if goals else None)
    looser = metrics.totals(outcomes, 4.0, {name: 2 * limit for name, limit in goals.items()})
    assert (looser.request_goodput or 0) >= (totals.request_goodput or 0)
    assert (totals.request_goodput or 0) <= totals.request_throughput


@given(st.lists(SECONDS, min_size=1), st.lists(st.floats(0, 100), min_size=1))
def test_percentiles_lie_between_the_values_and_in_order(values: list[float], percents: list[float]) -> None:
    results = metrics.latency_stats(values, percents).percentiles
    ordered = [results[percent] for percent in sorted(results)]
    rounded = 1e-9 * max(values) * 1000
    assert all(after >= before - rounded for before, after in itertools.pairwise(ordered))
    assert min(values) * 1000 - rounded <= ordered[0]
    assert ordered[-1] <= max(values) * 1000 + rounded


@given(outcomes())
def test_the_timeline_holds_every_piece_once(outcomes: list[Outcome]) -> None:
    whole = [one for one in outcomes if one.ok]
    timeline = metrics.Timeline(whole)
    assert sum(timeline.pieces) == sum(1 + len(one.itls) for one in whole)
    assert max(timeline.running, default=0) <= len(whole)
    assert len(timeline.running) == len(timeline.pieces)


KEYS = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
    "mean_ttft_ms",
    "median_ttft_ms",
    "std_ttft_ms",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p50_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "std_itl_ms",
    "p50_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
    "median_e2el_ms",
    "std_e2el_ms",
    "p50_e2el_ms",
    "p99_e2el_ms",
]
"""The keys in a file of `vllm bench serve` 0.32.0, in order.

Its flags were --save-detailed --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99.
"""

DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


def test_the_file_has_vllms_keys_in_its_order() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5)
    names = ["ttft", "tpot", "itl", "e2el"]
    results = summarize(Run(THREE, 2.0, now), None, math.inf, names, [50.0, 99.0], {})
    labels = {"model": "m", "tokenizer": "t", "metadata": {}, "now": now}
    detailed = make_record(ServeOptions(save_result=True, save_detailed=True), results, **labels)
    assert list(detailed) == KEYS
    assert (detailed["date"], detailed["request_rate"]) == ("20260102-030405", "inf")
    assert detailed["output_lens"] == [5, 0, 1]
    assert detailed["p50_itl_ms"] == pytest.approx(200.0)
    assert list(make_record(ServeOptions(), results, **labels)) == [key for key in KEYS if key not in DETAILS]


def test_waiting_in_the_client_is_told_of_where_it_exists() -> None:
    def told(concurrency: int | None, rate: float) -> list[str]:
        names = ["client_queue_time", "e2el_including_client_queue"]
        return list(summarize(Run(THREE, 2.0, datetime.now()), concurrency, rate, names, [99.5], {}).latencies)

    assert told(None, 5.0) == []
    assert told(2, math.inf) == ["client_queue_time"]
    assert told(2, 5.0) == ["client_queue_time", "e2el_including_client_queue"]


def test_the_block_names_what_was_measured() -> None:
    results = summarize(Run(THREE, 2.0, datetime.now()), 2, 4.0, ["ttft"], [99.9], {"ttft": 0.3})
    lines = format_report(results, 4.0).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    values = dict(line.split(":") for line in lines if ":" in line)
    assert {name: value.strip() for name, value in values.items()} == {
        "Successful requests": "2",
        "Failed requests": "1",
        "Maximum request concurrency": "2",
        "Request rate configured (RPS)": "4.00",
        "Benchmark duration (s)": "2.00",
        "Total input tokens": "12",
        "Total generated tokens": "6",
        "Request throughput (req/s)": "1.00",
        "Request goodput (req/s)": "0.50",
        "Output token throughput (tok/s)": "3.00",
        "Peak output token throughput (tok/s)": "4.00",
        "Peak concurrent requests": "2.00",
        "Total token throughput (tok/s)": "9.00",
        "Mean TTFT (ms)": "300.00",
        "Median TTFT (ms)": "300.00",
        "P99.9 TTFT (ms)": f"{float(np.percentile([200, 400], 99.9)):.2f}",
    }
