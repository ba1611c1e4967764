"""Tests whole servers under overload: bursts, full queues, a gateway that stands still, long outputs."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import openai
import psutil
import pytest
import pytest_asyncio

from tests.gateway.fakes import ends, events, texts
from tests.scripted_worker import CHAIN
from tests.system.http_client import (
    ENDLESS,
    MODEL,
    SEQUENCES,
    chained,
    client,
    complete,
    ended,
    figures,
    says,
    settled,
    streaming,
    talk,
)
from tests.system.processes import FAULT_INJECTION_PATH, Server
from tests.system.processes import server as serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BURST = 500
REQUESTS = int(os.environ.get("QUIRE_TEST_REQUESTS", "4000"))
SLACK = 2 * 2**20  # bytes by which a process that leaks nothing may grow, since its allocator keeps some


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(
        talk(delay=0.001), "--max-num-seqs=16", "--max-num-queued-reqs=5000", "--max-model-len=128"
    ) as system:
        yield system


def mixed(at: int) -> tuple[list[int], int]:
    """Return prompt and length of the request with this number."""
    return [CHAIN, 4 + at % 250, 4 + at // 250, *[9] * (at % 40)], 1 + at % 12


async def burst(server: Server) -> list[int]:
    """Send all requests at once and return their statuses. Check the text of those that were served."""
    requests = [mixed(at) for at in range(BURST)]
    answers = await asyncio.gather(*(complete(server, prompt, length) for prompt, length in requests))
    for answer, (prompt, length) in zip(answers, requests, strict=True):
        if answer.status == 200:
            assert answer.json["choices"][0]["text"] == chained(prompt, length)
        else:
            assert answer.error["type"] == "RateLimitError"
            assert int(answer.headers["retry-after"]) >= 1
    return [answer.status for answer in answers]


async def test_a_burst_at_a_cold_server_is_served(server: Server) -> None:
    """SCH-12."""
    assert Counter(await burst(server)) == {200: BURST}
    grown = await settled(server)
    assert ended(grown, SEQUENCES) == {"length": BURST}
    assert grown["vllm:num_preemptions_total"] == 0


async def test_beyond_a_limit_the_burst_is_turned_away_at_once() -> None:
    """SCH-12."""
    async with serving(talk(delay=0.01), "--max-num-seqs=4", "--max-num-queued-reqs=20") as server:
        result = Counter(await burst(server))
        assert set(result) == {200, 429}
        assert result[200] >= 20
        grown = await settled(server)
        assert grown["quire:requests_accepted_total"] == result[200]
        assert grown["quire:requests_refused_total"] == grown["quire:http_responses_total:429"] == result[429]
        await official_clients_wait_for_their_turn(server)


async def official_clients_wait_for_their_turn(server: Server) -> None:
    async with client(server) as official:
        chat, fill = official.chat.completions.create, []
        for figure, count in (("running", 4), ("waiting", 20)):  # all at once would find the queue full
            fill += [asyncio.create_task(complete(server, [ENDLESS], 2000)) for _ in range(count)]
            await until(partial(shows, server, f"vllm:num_requests_{figure}", count))
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await chat(model=MODEL, messages=says("port"), stream=stream)
            assert int(caught.value.response.headers["Retry-After"]) >= 1
        patient = official.with_options(max_retries=10).chat.completions
        answer = asyncio.create_task(patient.create(model=MODEL, messages=says("port")))
        for task in fill:
            task.cancel()
        await asyncio.wait(fill)
        assert (await answer).choices[0].message.content == "one two three"


async def shows(server: Server, figure: str, count: int) -> bool:
    return (await figures(server))[figure] == count


async def test_a_gateway_that_stands_still_loses_nothing(server: Server) -> None:
    """PRC-06: the steps go on meanwhile, and what the gateway cannot read waits for it."""
    before = await settled(server)
    await stand_still(server, 300)
    assert (await settled(server, before, 300))["vllm:generation_tokens_total"] == 300 * 40


async def test_with_room_for_ten_messages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """PRC-06."""
    monkeypatch.setenv("PYTHONPATH", FAULT_INJECTION_PATH)
    monkeypatch.setenv("HIGH_WATER", "10")
    async with serving(talk(delay=0.005), "--max-num-seqs=16") as narrow:
        await stand_still(narrow, 100, logprobs=5)  # large messages, since the socket would have room for small ones


async def stand_still(server: Server, count: int, **fields: Any) -> None:
    """Stop the gateway for two seconds while streams run. Check the text of all of them."""
    prompts = [[CHAIN, 4 + at % 250, 4 + at // 250] for at in range(count)]
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    *others, last = prompts
    running = [asyncio.create_task(complete(server, prompt, 40, **fields)) for prompt in others]
    async with streaming(server, last, 40, **fields) as stream:  # so all requests have reached the engine
        server.gateway.signal(signal.SIGSTOP)
        await asyncio.sleep(2.0)  # the point
        server.gateway.signal(signal.SIGCONT)
        result = [*[answer.text for answer in await asyncio.gather(*running)], await stream.rest()]
    for prompt, text in zip(prompts, result, strict=True):
        chunks = events(text)
        assert texts(chunks) == {0: chained(prompt, 40)}
        assert ends(chunks) == {0: ["length"]}
        assert chunks[-1]["usage"]["completion_tokens"] == 40
    assert (server.gateway.lives, server.engine.scheduler.lives) == (1, 1)


@pytest.mark.timeout(0 if REQUESTS > 4000 else 300)
async def test_thousands_of_tiny_requests_leave_no_memory(server: Server) -> None:
    """MEM-01: each has a block of its own, which the prefix cache takes and later gives up."""
    children = (server.gateway, server.engine.scheduler, server.engine.worker)
    processes = [psutil.Process(child.pid) for child in children]
    half = REQUESTS // 2
    await tiny_requests(server, range(half))
    since, sizes = await settled(server), [memory(process) for process in processes]
    await tiny_requests(server, range(half, 2 * half))
    grown = await settled(server, since, half)
    assert grown["vllm:prompt_tokens_total"] == half * 20
    growth = [memory(process) - size for process, size in zip(processes, sizes, strict=True)]
    print(f"bytes that the processes grew by in {half} requests: {growth}")
    assert max(growth) < SLACK + 16 * half
    assert [child.lives for child in children] == [1, 1, 1]


async def tiny_requests(server: Server, numbers: range) -> None:
    """Send a request of its own prompt for each number, 32 at a time."""
    waiting = iter(numbers)

    async def one_after_another() -> None:
        for number in waiting:
            digits = [10 + number // 200**place % 200 for place in range(4)]
            answer = await complete(server, [CHAIN, *digits, *[9] * 15], 1)
            assert answer.status == 200

    await asyncio.gather(*(one_after_another() for _ in range(32)))


def memory(process: psutil.Process) -> int:
    """Return a process's own bytes, those that were swapped out included."""
    full = process.memory_full_info()
    return int(full.uss + full.swap)


async def test_without_a_limit_outputs_fill_the_context_exactly(server: Server) -> None:
    """LIM-13."""
    before = await settled(server)
    async with client(server) as official:
        create, endless = official.chat.completions.create, {"ignore_eos": True}
        words = ("hello", "view", "port", "one two")
        answers = await asyncio.gather(
            *(create(model=MODEL, messages=says(word), extra_body=endless) for word in words)
        )
    for answer in answers:
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 128
    grown = await settled(server, before, 4)
    assert ended(grown, SEQUENCES) == {"length": 4}
    assert grown["vllm:prompt_tokens_total"] + grown["vllm:generation_tokens_total"] == 4 * 128
