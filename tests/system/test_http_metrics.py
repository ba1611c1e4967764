"""Tests that a whole server's metrics agree with what happened, and that they cannot harm the server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import Struct

from tests.gateway.fakes import events, texts
from tests.ports import free_ports
from tests.scripted_worker import CHAIN, ScriptedFailure
from tests.system.http_client import (
    BRIEF,
    ENDLESS,
    MODEL,
    SAMPLES,
    SEQUENCES,
    Exchange,
    Figures,
    Listening,
    ask,
    chained,
    change,
    client,
    complete,
    ended,
    figures,
    idle,
    settled,
    streaming,
    talk,
    wire,
)
from tests.system.processes import FAULT_INJECTION_PATH, Server
from tests.system.processes import server as serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

POISON = 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    script = talk(delay=0.005, failures=[ScriptedFailure(POISON, "raise")])
    async with serving(script, "--max-num-seqs=32", "--max-num-batched-tokens=64") as system:
        yield system


async def first_text(stream: Exchange) -> str:
    """Return the first event that is not a comment."""
    while (event := await stream.event()).startswith(":"):
        pass
    return event


async def leave_after_first_text(at: Listening, prompt: list[int]) -> None:
    async with streaming(at, prompt, 900) as stream:
        assert await first_text(stream)
        await stream.reset()


async def test_figures_are_back_at_idle_soon_after_all_have_left(server: Server) -> None:
    """MET-01."""
    before = await settled(server)
    removed = asyncio.Event()

    async def one() -> None:
        async with streaming(server, [ENDLESS], 2000) as stream:
            await first_text(stream)
            await removed.wait()
            await stream.reset()

    clients = [asyncio.create_task(one()) for _ in range(20)]
    await until(lambda: running(server, 20))
    removed.set()
    await asyncio.gather(*clients)
    await until(lambda: at_rest(server))
    grown = await settled(server, before, 20)
    assert ended(grown, SAMPLES) == ended(grown, SEQUENCES) == {"abort": 20}


async def running(server: Server, count: int) -> bool:
    return (await figures(server))["vllm:num_requests_running"] == count


async def at_rest(server: Server) -> bool:
    return idle(await figures(server))


async def test_ends_are_counted_by_reason_and_add_up_to_what_was_taken_in(server: Server) -> None:
    """MET-02."""
    before = await settled(server)
    mix = [
        *(complete(server, [BRIEF], 9) for _ in range(5)),
        *(complete(server, [ENDLESS], 3) for _ in range(4)),
        *(ask(server, "/v1/completions", prompt="x", temperature=-1) for _ in range(2)),
    ]
    statuses = [answer.status for answer in await asyncio.gather(*mix)]
    assert statuses == [200] * 9 + [400] * 2
    for _ in range(3):
        await leave_after_first_text(server, [ENDLESS])
    assert (await complete(server, [CHAIN, POISON], 9)).status == 500
    grown = await settled(server, before, 13)
    assert ended(grown, SAMPLES) == ended(grown, SEQUENCES) == {"stop": 5, "length": 4, "abort": 3, "error": 1}
    assert grown["quire:requests_accepted_total"] == grown["vllm:e2e_request_latency_seconds_count"] == 13
    answered = ended(grown, "quire:http_responses_total")
    assert {code: count for code, count in answered.items() if code != "200"} == {"400": 2, "499": 3, "500": 1}


async def test_totals_and_sums_reconcile_with_streams_that_were_cut(server: Server) -> None:
    """MET-03.

    Every figure includes them. Tokens that were generated after the client left are in the totals only.
    """
    before = await settled(server)
    for at in range(5):
        await leave_after_first_text(server, [ENDLESS, 10 + at, *[9] * 998])
    cut = await settled(server, before, 5)
    for _ in range(3):
        assert (await complete(server, [BRIEF], 3)).status == 200
    grown = await settled(server, before, 8)
    assert grown["vllm:request_prompt_tokens_sum"] == grown["vllm:prompt_tokens_total"] == 5 * 1000 + 3
    assert grown["vllm:request_prompt_tokens_count"] == grown["vllm:request_generation_tokens_count"] == 8
    first, later = grown["vllm:time_to_first_token_seconds_count"], grown["vllm:inter_token_latency_seconds_count"]
    assert grown["vllm:request_generation_tokens_sum"] == first + later
    assert first == grown["vllm:e2e_request_latency_seconds_count"] == 8
    assert 5 <= cut["vllm:request_generation_tokens_sum"] <= cut["vllm:generation_tokens_total"] < 5 * 500
    whole = change(cut, grown)
    assert whole["vllm:request_generation_tokens_sum"] == whole["vllm:generation_tokens_total"] == 3 * 3


async def test_each_samples_time_is_split_by_the_engines_word(server: Server) -> None:
    """API-04: with more requests than slots some wait, and the metrics say for how long."""
    before = await settled(server)
    await asyncio.gather(*(complete(server, [CHAIN, at], 20) for at in range(64)))  # twice as many as may run
    grown = await settled(server, before, 64)
    names = ("queue_time_seconds", "prefill_time_seconds", "inference_time_seconds", "num_preemptions")
    assert [grown[f"vllm:request_{name}_count"] for name in names] == [64] * 4
    queue, prefill, inference = (grown[f"vllm:request_{name}_sum"] for name in names[:3])
    whole, first = grown["vllm:e2e_request_latency_seconds_sum"], grown["vllm:time_to_first_token_seconds_sum"]
    assert 16 * 20 * 0.005 < queue < queue + prefill <= first, "half of them wait for about 20 steps of 5 ms"
    assert queue + inference <= whole
    assert inference == pytest.approx(prefill + grown["vllm:request_decode_time_seconds_sum"], rel=0.01)
    assert grown["vllm:iteration_tokens_total_count"] == grown["quire:steps_total"]
    tokens = grown["vllm:prompt_tokens_total"] + grown["vllm:generation_tokens_total"] - 64  # no last token is computed
    assert 0 <= grown["vllm:iteration_tokens_total_sum"] - tokens <= 64, "and some rows behind an end are for nothing"


async def test_the_engines_figures_are_right_as_soon_as_the_last_answer_has_come(server: Server) -> None:
    """vLLM's tests read them at once. Between answers they are as old as the scheduler's last message."""
    last = await settled(server)
    for _ in range(5):
        assert (await complete(server, [ENDLESS], 4)).status == 200
        now = await figures(server)
        assert now["vllm:generation_tokens_total"] == last["vllm:generation_tokens_total"] + 4
        assert idle(now)
        last = now


async def test_throughput_is_the_rate_of_tokens_now_and_nothing_at_rest(server: Server) -> None:
    """API-04: this is vllm:request_throughput_tok_per_second."""
    async with streaming(server, [ENDLESS], 1500) as stream:
        await first_text(stream)
        await until(lambda: above(server, "vllm:request_throughput_tok_per_second", 1.0))
        await stream.reset()
    result = await figures(server)
    assert result["vllm:generation_token_count"] == result["vllm:generation_tokens_total"] > 0
    assert result["vllm:cache_config_info"] == 1


async def above(server: Server, name: str, bound: float) -> bool:
    return (await figures(server))[name] > bound


class Port(Struct):
    """The port of the scheduler's own metrics."""

    port: int


async def test_counters_never_fall_and_failing_metrics_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MET-04: the wall clock of all processes goes back at every look."""
    broken, port = tmp_path / "broken", Port(*free_ports(1))
    monkeypatch.setenv("PYTHONPATH", FAULT_INJECTION_PATH)
    monkeypatch.setenv("FAIL_METRICS", str(broken))
    flags = ("--max-num-seqs=8", "--max-num-batched-tokens=64", f"--metrics-port={port.port}")
    async with serving(talk(delay=0.002, blocks=24), *flags) as server:
        scraper = asyncio.create_task(scrape(server))
        await work(server)
        scraper.cancel()
        with pytest.raises(asyncio.CancelledError):  # and no other error
            await scraper
        broken.touch()
        for at in (server, port):
            assert (await ask(at, "/metrics")).status == 500
        await work(server)
        broken.unlink()
        await until(lambda: agree(server, port))
        here, there = await settled(server), await figures(port)
        assert there["vllm:num_preemptions_total"] == here["vllm:num_preemptions_total"] > 0
        assert ended(here, SAMPLES)["length"] >= 2 * 11
        seconds = {name: value for name, value in here.items() if name.endswith("seconds_sum")}
        assert all(0 <= value < 3600 for value in seconds.values()), seconds
        assert "Traceback" not in server.engine.worker.log
        assert (server.engine.scheduler.lives, server.engine.worker.lives, server.gateway.lives) == (1, 1, 1)


async def agree(server: Server, scheduler: Listening) -> bool:
    """Return whether gateway and scheduler count the same ends. The client of the last request of `work` has left."""
    return ended(await figures(scheduler), SEQUENCES) == ended(await figures(server), SAMPLES)


async def scrape(at: Listening) -> None:
    """Read the metrics until cancelled. Fail if a counter falls."""
    last = Figures(float)
    while True:
        now = await figures(at)
        fallen = {name: grown for name, grown in change(last, now).items() if grown < 0 and counts(name)}
        assert not fallen
        last = now
        await asyncio.sleep(0.02)


def counts(name: str) -> bool:
    return any(ending in name for ending in ("_total", "_count", "_sum", "_bucket"))


async def work(at: Listening) -> None:
    """Send requests with equal ids, preemption, a prompt in chunks, and one whose client leaves: 12 ends in all."""
    async with client(at) as official:
        create, headers = official.completions.create, {"X-Request-Id": "same"}
        pair = (create(model=MODEL, prompt="view", max_tokens=9, extra_headers=headers) for _ in range(2))
        same = await asyncio.gather(*pair)
        assert [answer.id for answer in same] == ["cmpl-same"] * 2
    prompts = [[CHAIN, 10 + one, *[9] * 38] for one in range(8)]
    answers = await asyncio.gather(*(complete(at, prompt, 60, stream=True) for prompt in prompts))
    assert [texts(events(answer.text))[0] for answer in answers] == [chained(prompt, 60) for prompt in prompts]
    long = [CHAIN, 9, *[8] * 298]
    assert (await complete(at, long, 4)).json["choices"][0]["text"] == chained(long, 4)
    async with wire(at, "/v1/completions", {"prompt": [ENDLESS, *[8] * 300], "stream": True}) as stream:
        await asyncio.sleep(0.01)
        await stream.reset()
