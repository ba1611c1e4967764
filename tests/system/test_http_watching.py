"""Tests that traces and metrics tell what happened to requests whose engine was lost, preempted or late."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from tests.gateway.fakes import events, texts
from tests.otlp_collector import Collector, attributes
from tests.scripted_worker import CHAIN
from tests.system.http_client import (
    MODEL,
    Figures,
    chained,
    client,
    complete,
    figures,
    streaming,
    talk,
)
from tests.system.processes import Server
from tests.system.processes import server as serving
from tests.waiting import until

TOKENS = 200
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with Collector().running() as running:
        yield running


async def generated(server: Server, tokens: int) -> bool:
    return (await figures(server))["vllm:generation_tokens_total"] >= tokens


async def lose_scheduler(server: Server, number: signal.Signals) -> None:
    """Kill or freeze the scheduler, and wait until the next one has taken over."""
    server.engine.scheduler.signal(number)
    await until(lambda: "was lost" in server.gateway.log)
    if number is signal.SIGSTOP:
        server.engine.scheduler.signal(signal.SIGKILL)
    await until(server.gateway.healthy)


async def test_a_trace_tells_of_the_engine_that_was_lost(collector: Collector) -> None:
    """The official client's request, with its own trace, outlives the scheduler."""
    async with serving(talk(), front=[f"--otlp-traces-endpoint={collector.url}"]) as server, client(server) as official:
        prompt, headers = [CHAIN, 10], {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        create = official.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=TOKENS, extra_headers=headers)
        with server.engine.slowed():
            asking = asyncio.ensure_future(create)
            await until(lambda: generated(server, 10))
            await lose_scheduler(server, signal.SIGKILL)
        answer = await asking
        assert answer.choices[0].text == chained(prompt, TOKENS)
        await until(lambda: len(collector.spans) == 7)
    *phases, request = collector.spans
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert (request.name, request.parent_span_id.hex()) == ("POST /v1/completions", PARENT)
    assert {span.parent_span_id for span in phases} == {request.span_id}
    assert attributes(request.attributes)["gen_ai.usage.output_tokens"] == 2 * TOKENS
    by_choice = [[span for span in phases if attributes(span.attributes)["quire.choice"] == one] for one in range(2)]
    assert [[span.name for span in spans] for spans in by_choice] == [["queue", "prefill", "decode"]] * 2
    lost, resumed = request.events
    assert (lost.name, resumed.name) == ("engine_lost", "resumed")
    assert attributes(lost.attributes)["quire.choices"] == [0, 1]
    decode = by_choice[0][-1]
    assert decode.start_time_unix_nano < lost.time_unix_nano < resumed.time_unix_nano < decode.end_time_unix_nano
    assert attributes(resumed.attributes)["quire.recovery_seconds"] > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_losses_of_an_engine_are_measured(number: signal.Signals) -> None:
    """A dead process is noticed long before the two seconds after which a silent one counts as dead."""
    async with serving(talk()) as server, AsyncExitStack() as stack:
        prompts = [[CHAIN, 10 + at] for at in range(4)]
        with server.engine.slowed():
            streams = [await stack.enter_async_context(streaming(server, prompt, TOKENS)) for prompt in prompts]
            begun = [await stream.event() for stream in streams]
            await lose_scheduler(server, number)
        whole = [first + "\n\n" + await stream.rest() for first, stream in zip(begun, streams, strict=True)]
        assert [texts(events(text))[0] for text in whole] == [chained(prompt, TOKENS) for prompt in prompts]
        result = await figures(server)
    detection = result["quire:engine_detection_seconds_sum"]
    assert (detection > 2.0) == (number is signal.SIGSTOP)
    assert result["quire:engine_detection_seconds_count"] == result["quire:engine_restarts_total"] == 1
    assert result["quire:request_recovery_seconds_count"] == result["quire:resumed_requests_total"] == 4
    assert result["quire:request_recovery_seconds_sum"] > 0


def assert_times_add_up(grown: Figures, samples: int) -> None:
    """Check that each sample's time is split without gaps: the sums of parts are the sums of wholes."""
    names = ("queue_time", "prefill_time", "decode_time", "inference_time")
    assert [grown[f"vllm:request_{name}_seconds_count"] for name in names] == [samples] * 4
    queue, prefill, decode, inference = (grown[f"vllm:request_{name}_seconds_sum"] for name in names)
    whole, first = grown["vllm:e2e_request_latency_seconds_sum"], grown["vllm:time_to_first_token_seconds_sum"]
    assert inference == pytest.approx(prefill + decode)
    assert first + decode == pytest.approx(whole), "the last token ends a sample"
    assert queue + prefill <= first, "which begins with parsing and tokenizing"


async def test_times_add_up_with_preemptions_and_several_samples() -> None:
    """API-04."""
    flags = ("--max-num-seqs=8", "--max-num-batched-tokens=64")
    async with serving(talk(delay=0.002, blocks=24), *flags) as server:
        prompts = [[CHAIN, 10 + at, *[9] * 38] for at in range(8)]
        answers = await asyncio.gather(*(complete(server, prompt, 60) for prompt in prompts))
        assert [answer.json["choices"][0]["text"] for answer in answers] == [chained(prompt, 60) for prompt in prompts]
        await asyncio.gather(*(complete(server, prompt, 40, n=3) for prompt in prompts[:3]))
        result = await figures(server)
    assert result["vllm:num_preemptions_total"] > 0
    assert result["vllm:request_num_preemptions_sum"] == result["vllm:num_preemptions_total"]
    assert_times_add_up(result, 8 + 9)


async def test_times_add_up_after_a_resumption() -> None:
    """API-04. Half of the samples are queued when the engine is lost, and one comes while there is none."""
    async with serving(talk(delay=0.01), "--max-num-seqs=4") as server:
        prompts = [[CHAIN, 10 + at] for at in range(8)]
        with server.engine.slowed():
            asking = [asyncio.create_task(complete(server, prompt, TOKENS)) for prompt in prompts]
            await until(lambda: generated(server, 20))
            server.engine.scheduler.signal(signal.SIGSTOP)
        await until(lambda: "was lost" in server.gateway.log)
        loop = asyncio.get_running_loop()
        asking.append(asyncio.create_task(complete(server, [CHAIN, 50], TOKENS)))
        began = loop.time()
        await asyncio.sleep(0.5)
        server.engine.scheduler.signal(signal.SIGKILL)
        waited = loop.time() - began
        answers = await asyncio.gather(*asking)
        result = await figures(server)
    texts_of_answers = [answer.json["choices"][0]["text"] for answer in answers]
    assert texts_of_answers == [chained(prompt, TOKENS) for prompt in [*prompts, [CHAIN, 50]]]
    assert result["quire:resumed_requests_total"] == 8
    assert_times_add_up(result, 9)
    assert result["vllm:request_queue_time_seconds_sum"] > 4 * 2.0 + waited, "for those that waited for the engine"
