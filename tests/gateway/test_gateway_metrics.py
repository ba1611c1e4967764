"""Tests that /metrics agrees with what happened."""

import asyncio
from typing import Any

import pytest
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.engine_request import Interruption
from services.gateway.metrics import FLUSH_INTERVAL, _TokenHistogram
from shared.errors import EngineFailure, Overloaded
from shared.protocol import SchedulingInfo
from tests.gateway.fakes import Client, FakeBackend, endless, says, serve

LABELS = {"model_name": "tiny", "engine": "0"}


async def figures(client: Client) -> Any:
    """Return a function from name and labels to a metric's value, which is None if it is missing."""
    async with client.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return lambda name, **labels: samples.get((name, frozenset(labels.items())))


async def disconnect(client: Client, backend: FakeBackend, **fields: Any) -> int:
    """Start a stream and leave it after its first bytes. Return how many tokens had come by then."""
    backend.pause_at = 2
    response = await client.post("/v1/completions", json={"prompt": "hi", "stream": True} | fields)
    await response.content.readuntil(b"\n\n")
    response.close()
    await backend.requests[-1].left.wait()
    backend.pause_at = -1
    return 2


async def test_requests_are_counted_by_their_ends() -> None:
    """MET-02."""
    backend = FakeBackend(says("one two three"))
    async with serve(backend) as client:
        for _ in range(5):
            await client.complete(prompt="hi")
        for _ in range(4):
            await client.chat(max_tokens=2)
        for _ in range(3):
            await disconnect(client, backend)
        for _ in range(2):
            await client.refused("/v1/completions", {"prompt": ""})
        backend.fail_at, backend.failure = 1, EngineFailure("gone")
        assert (await client.refused("/v1/completions", {"prompt": "hi"}))[0] == 500
        value = await figures(client)
    counts = {
        reason: value("vllm:request_success_total", finished_reason=reason, **LABELS)
        for reason in ("stop", "length", "abort", "error")
    }
    assert counts == {"stop": 5, "length": 4, "abort": 3, "error": 1}
    assert value("vllm:e2e_request_latency_seconds_count", **LABELS) == len(backend.requests) == 13
    assert value("quire:http_responses_total", handler="/v1/completions", code="400") == 2
    assert value("quire:http_responses_total", handler="/v1/completions", code="500") == 1
    assert value("quire:http_responses_total", handler="/v1/completions", code="499") == 3


async def test_sums_include_the_requests_that_were_cut() -> None:
    """MET-03."""
    backend = FakeBackend(endless)
    async with serve(backend) as client:
        tokens = sum([await disconnect(client, backend) for _ in range(5)])
        tokens += (await client.complete(prompt="hi", n=3, max_tokens=4))["usage"]["completion_tokens"]
        value = await figures(client)
    assert value("vllm:request_generation_tokens_sum", **LABELS) == tokens == 22
    assert value("vllm:request_generation_tokens_count", **LABELS) == 8
    assert value("vllm:request_prompt_tokens_sum", **LABELS) == 8 * len(backend.requests[0].tokens)
    assert value("vllm:time_to_first_token_seconds_count", **LABELS) == 8
    assert value("vllm:inter_token_latency_seconds_count", **LABELS) == tokens - 8
    assert value("vllm:request_decode_time_seconds_count", **LABELS) == 8
    assert value("vllm:request_params_n_count", **LABELS) == 6
    assert value("vllm:request_max_num_generation_tokens_sum", **LABELS) == 5 * 2 + 4
    assert value("vllm:request_params_max_tokens_sum", **LABELS) == 5 * 16 + 4


async def test_figures_of_tokens_are_counted_before_their_stream_has_ended() -> None:
    """Gateways that share a port read each other's figures, so what a scrape of one adds would be missing."""
    histogram = Histogram("name", "doc", ("model",), buckets=(1.0, 2.0), registry=None).labels("tiny")
    tokens, now = _TokenHistogram(histogram), 10.0
    buckets = lambda: [sample.value for sample in histogram._child_samples()][:5]  # noqa: E731
    tokens.observe(0.5, 1, now)
    tokens.observe(1.0, 2, now + FLUSH_INTERVAL / 2)
    assert buckets() == [1, 1, 1, 1, 0.5], "cumulative counts, their number, and the sum"
    tokens.observe(1.5, 1, now + FLUSH_INTERVAL)
    assert buckets() == [3, 4, 4, 4, 4.0]
    tokens.observe(9.0, 3, now + FLUSH_INTERVAL)
    tokens.flush()
    assert buckets() == [3, 4, 7, 7, 31.0]


async def test_refused_requests_are_in_no_figure_of_requests() -> None:
    backend = FakeBackend()
    backend.refusal = Overloaded("full", 1)
    async with serve(backend) as client:
        assert (await client.refused("/v1/completions", {"prompt": "hi"}))[0] == 429
        value = await figures(client)
    assert value("vllm:e2e_request_latency_seconds_count", **LABELS) is None
    assert value("quire:http_responses_total", handler="/v1/completions", code="429") == 1


async def test_requests_that_no_engine_got_are_in_no_figure_of_requests() -> None:
    backend = FakeBackend()
    backend.answers.clear()
    async with serve(backend) as client:
        for engine in ("", "0"):
            backend.submitted.clear()
            asking = asyncio.ensure_future(client.complete(prompt="hi"))
            await backend.submitted.wait()
            backend.requests[-1].engine = engine
            asking.cancel()
            await backend.requests[-1].left.wait()
        value = await figures(client)
    assert value("vllm:request_success_total", model_name="tiny", engine="", finished_reason="abort") is None
    assert value("vllm:request_params_n_count", model_name="tiny", engine="") is None
    assert value("vllm:request_success_total", finished_reason="abort", **LABELS) == 1


async def test_times_are_measured_from_arrival() -> None:
    backend = FakeBackend(says("one two three"))
    backend.burst = 4
    async with serve(backend) as client:
        await client.complete(prompt="hi")
        value = await figures(client)
    first = value("vllm:time_to_first_token_seconds_sum", **LABELS)
    whole = value("vllm:e2e_request_latency_seconds_sum", **LABELS)
    assert 0 < first <= whole
    assert value("vllm:inter_token_latency_seconds_count", **LABELS) == 3
    assert value("vllm:request_time_per_output_token_seconds_count", **LABELS) == 1


async def test_a_requests_time_is_split_where_the_engine_admitted_it() -> None:
    """API-04: the engine reports the time in the queue, and the gateway's clock measures the rest."""
    backend = FakeBackend(says("one two three"))
    backend.admission = SchedulingInfo(0.125, 2)
    backend.cached_tokens = 1
    backend.pause_at = 0
    async with serve(backend) as client:
        asking = asyncio.ensure_future(client.complete(prompt="hello six", n=2))
        await backend.submitted.wait()
        await asyncio.sleep(0.3)  # longer than the time that the engine reports
        backend.go_on.set()
        await asking
        value = await figures(client)
    assert value("vllm:request_queue_time_seconds_sum", **LABELS) == 0.25
    assert value("vllm:request_num_preemptions_sum", **LABELS) == 4
    assert value("vllm:request_num_preemptions_bucket", le="1.0", **LABELS) == 0
    assert value("vllm:request_num_preemptions_bucket", le="2.0", **LABELS) == 2
    prefill = value("vllm:request_prefill_time_seconds_sum", **LABELS)
    inference = value("vllm:request_inference_time_seconds_sum", **LABELS)
    first = value("vllm:time_to_first_token_seconds_sum", **LABELS)
    decode = value("vllm:request_decode_time_seconds_sum", **LABELS)
    assert 2 * 0.17 < prefill <= first - 0.25, "from the admission, which was 0.125 s after the submission"
    assert inference == pytest.approx(prefill + decode)
    assert value("vllm:request_prefill_time_seconds_count", **LABELS) == 2
    assert value("vllm:request_inference_time_seconds_bucket", le="60.0", **LABELS) == 2
    tokens = len(backend.requests[0].tokens)
    assert value("vllm:request_prefill_kv_computed_tokens_sum", **LABELS) == tokens - 1, "once for all samples"


async def test_recoveries_are_figures_of_the_engine_that_was_lost() -> None:
    backend = FakeBackend()
    backend.pause_at = 1
    async with serve(backend) as client:
        asking = asyncio.ensure_future(client.complete(prompt="hi"))
        await backend.submitted.wait()
        for began, ended in ((1.0, 1.5), (2.0, 2.25)):
            backend.requests[0].recoveries.append(Interruption("east", "", [0], began, began, "0", ended))
        backend.go_on.set()
        await asking
        value = await figures(client)
    labels = {"model_name": "tiny", "engine": "east"}
    assert value("quire:request_recovery_seconds_count", **labels) == 2
    assert value("quire:request_recovery_seconds_sum", **labels) == 0.75
    assert value("quire:request_recovery_seconds_bucket", le="0.25", **labels) == 1


async def test_a_request_that_left_the_queue_has_no_time_in_it() -> None:
    """API-04: only what the engine reported is counted."""
    backend = FakeBackend()
    backend.pause_at = 0
    async with serve(backend) as client:
        asking = asyncio.ensure_future(client.complete(prompt="hi"))
        await backend.submitted.wait()
        asking.cancel()
        await backend.requests[0].left.wait()
        value = await figures(client)
    assert value("vllm:e2e_request_latency_seconds_count", **LABELS) == 1
    assert value("vllm:request_queue_time_seconds_count", **LABELS) == 0
    assert value("vllm:request_inference_time_seconds_count", **LABELS) == 0
    assert value("vllm:request_prefill_kv_computed_tokens_count", **LABELS) == 0


async def test_engines_states_are_shown_under_vllms_names() -> None:
    async with serve() as client:
        value = await figures(client)
    assert value("vllm:num_requests_running", **LABELS) == 3
    assert value("vllm:kv_cache_usage_perc", **LABELS) == 0.5
    assert value("vllm:prompt_tokens_total", **LABELS) == 7
    assert value("process_start_time_seconds") is not None


@pytest.mark.parametrize("version", ["1.0.0", "1..0", "x"])
async def test_names_keep_their_colons_whatever_format_a_scraper_prefers(version: str) -> None:
    accept = f"application/openmetrics-text;version={version};escaping=allow-utf-8;q=0.6,text/plain;q=0.2"
    async with serve() as client, client.get("/metrics", headers={"Accept": accept}) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "\nvllm:num_requests_running{" in await response.text()


async def test_paths_that_do_not_exist_are_one_label() -> None:
    async with serve() as client:
        await asyncio.gather(*(client.get(f"/nowhere/{at}") for at in range(3)))
        assert (await figures(client))("quire:http_responses_total", handler="none", code="404") == 3
