"""Tests clients that leave a whole server, in every phase: their requests end, and nothing of them stays.

That the gateway cancels its handlers is a setting of the real process; a server made for tests would do it anyway.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence

import openai
import psutil
import pytest
import pytest_asyncio

from tests.scripted_worker import CHAIN
from tests.system.http_client import (
    BRIEF,
    ENDLESS,
    MODEL,
    SAMPLES,
    SEQUENCES,
    Exchange,
    chained,
    client,
    complete,
    ended,
    figures,
    says,
    settled,
    streaming,
    talk,
    wire,
)
from tests.system.processes import Server
from tests.system.processes import server as serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAST = talk(delay=0.005)
SLOW = talk(delay=0.1)
LATE = 4  # steps: two in flight, and two until a busy machine notices that the client has left
LONG = 0.5  # seconds of a step in which a client leaves


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(FAST, "--max-num-seqs=32") as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow() -> AsyncIterator[Server]:
    """Yield a server that runs one sequence at a time, in steps slow enough to count."""
    async with serving(SLOW, "--max-num-seqs=1", "--max-num-batched-tokens=64") as system:
        yield system


async def go(exchange: Exchange, how: str) -> None:
    await (exchange.reset() if how == "rst" else exchange.leave())


@pytest.mark.parametrize("how", ["rst", "fin"])
async def test_streams_that_are_left_one_after_another(server: Server, how: str) -> None:
    """ABT-01."""
    since = await settled(server)
    for _ in range(20):
        async with streaming(server, [ENDLESS], 2000, ignore_eos=True) as stream:
            for _ in range(5):
                assert ' two"' in await stream.event()
            await go(stream, how)
    grown = await settled(server, since, 20)
    assert ended(grown, SAMPLES) == ended(grown, SEQUENCES) == {"abort": 20}
    assert grown["vllm:generation_tokens_total"] < 20 * 500


async def test_clients_that_do_not_wait_for_a_whole_answer(server: Server) -> None:
    """ABT-02."""
    since = await settled(server)
    async with client(server, timeout=2.0) as official:  # a fifth of what an answer takes
        chats = [
            official.chat.completions.create(model=MODEL, messages=says("view"), max_tokens=2000) for _ in range(10)
        ]
        texts = [official.completions.create(model=MODEL, prompt="view", max_tokens=2000) for _ in range(10)]
        for one in await asyncio.gather(*chats, *texts, return_exceptions=True):
            assert isinstance(one, openai.APITimeoutError)
        grown = await settled(server, since, 20)
    assert ended(grown, SAMPLES) == {"abort": 20}
    assert grown["quire:http_responses_total:499"] == 20
    assert "Traceback" not in server.gateway.log + server.engine.scheduler.log


async def test_hundreds_of_streams_left_anywhere_leave_nothing() -> None:
    """ABT-03."""
    async with serving(FAST, "--max-num-seqs=24", "--max-num-batched-tokens=64") as server:
        processes = [psutil.Process(child.pid) for child in (server.gateway, server.engine.scheduler)]
        first = await complete(server, [CHAIN], 8)
        since, descriptors = await settled(server), await steady_descriptors(processes)
        chance, places = random.Random(3), asyncio.Semaphore(32)

        async def one(at: int) -> None:
            async with places:
                await leave_somewhere(server, at, chance)

        await asyncio.gather(*(one(at) for at in range(300)))
        grown = await settled(server, since, 150)
        assert set(ended(grown, SAMPLES)) <= {"abort", "length", "stop", "error"}
        assert grown["vllm:request_success_total:error"] == 0
        await until(lambda: not any(now > before for now, before in zip(num_fds(processes), descriptors, strict=True)))
        answers = await asyncio.gather(*(complete(server, [CHAIN], 8) for _ in range(24)))
        assert {answer.text.split('"choices"')[1].split('"usage"')[0] for answer in answers} == {
            first.text.split('"choices"')[1].split('"usage"')[0]
        }
        await settled(server, since, 174)
        server.engine.scheduler.signal(signal.SIGTERM)  # both now report how many requests they know
        await until(lambda: "its connection ended (0 requests)" in server.gateway.log)
        assert "draining: 0 requests are unfinished" in server.engine.scheduler.log
        server.gateway.restart = False
        server.gateway.signal(signal.SIGTERM)  # waits for handlers that have not ended
        assert await server.gateway.ended() == 0
        assert "Traceback" not in server.gateway.log + server.engine.scheduler.log


def num_fds(processes: Sequence[psutil.Process]) -> list[int]:
    return [process.num_fds() for process in processes]


async def steady_descriptors(processes: Sequence[psutil.Process]) -> list[int]:
    """Return how many descriptors processes have once none is added for a second, as those of their heartbeats are."""
    before: list[int] = []
    while before != (now := num_fds(processes)):
        before = now
        await asyncio.sleep(1.0)
    return now


async def leave_somewhere(server: Server, at: int, chance: random.Random) -> None:
    """Start a stream, and leave it before the headers, in the prompt, in the output, or at its last token."""
    how, few = chance.choice(["rst", "fin"]), chance.randrange(1, 9)
    fields = {"max_tokens": 8, "stream": True, "prompt": [CHAIN, 4 + at % 250, 5 + at // 250]}
    match chance.choice(["sent", "prompt", "output", "end"]):
        case "sent":
            async with wire(server, "/v1/completions", fields) as stream:
                await go(stream, "rst")
        case "prompt":
            fields["prompt"] = [*fields["prompt"], *[9] * 700]  # type: ignore[misc]
            async with wire(server, "/v1/completions", fields) as stream:
                await asyncio.sleep(chance.random() * 0.05)
                await go(stream, how)
        case "output":
            async with streaming(server, [ENDLESS]) as stream:
                for _ in range(few):
                    await stream.event()
                await go(stream, how)
        case "end":
            async with streaming(server, [ENDLESS], few) as stream:
                while '"finish_reason":"length"' not in await stream.event():
                    pass
                await go(stream, how)


async def test_what_leaves_the_queue_is_never_computed(narrow: Server) -> None:
    """ABT-04."""
    since = await settled(narrow)
    async with streaming(narrow, [ENDLESS], 12) as long:
        with narrow.engine.slowed(LONG):
            await long.event()
            queued = [asyncio.create_task(complete(narrow, [CHAIN, *[9] * 100], 5)) for _ in range(10)]
            await until(lambda: waiting(narrow, 10))
            for task in queued:
                task.cancel()
            await asyncio.wait(queued)
            await until(lambda: waiting(narrow, 0))
        assert (await complete(narrow, [CHAIN, 7], 3)).json["choices"][0]["text"] == chained([CHAIN, 7], 3)
        assert '"finish_reason":"length"' in await long.rest()
    grown = await settled(narrow, since, 12)
    assert ended(grown, SAMPLES) == {"length": 2, "abort": 10}
    assert grown["vllm:prompt_tokens_total"] == 1 + 2
    assert grown["quire:steps_total"] <= 12 + 3 + LATE


async def waiting(server: Server, count: int) -> bool:
    return (await figures(server))["vllm:num_requests_waiting"] == count


async def test_a_second_request_of_the_same_pool_is_not_hurt(server: Server) -> None:
    """ABT-09."""
    since = await settled(server)
    async with client(server) as official:
        await asyncio.gather(*(break_off_the_first(official, 25) for _ in range(4)))
    grown = await settled(server, since, 200)
    assert ended(grown, SAMPLES) == {"stop": 100, "abort": 100}
    assert not [name for name, count in grown.items() if count and name.startswith("quire:http_responses_total:5")]


async def break_off_the_first(official: openai.AsyncOpenAI, times: int) -> None:
    """Send two requests, and leave the first at its first byte."""
    for _ in range(times):
        first = await official.completions.create(model=MODEL, prompt="view", max_tokens=2000, stream=True)
        second = asyncio.create_task(official.completions.create(model=MODEL, prompt="port"))
        async for chunk in first:
            assert chunk.choices[0].text
            break
        await first.close()
        assert (await second).choices[0].text == "one two three"


async def test_leaving_in_the_output_ends_it_within_two_steps(narrow: Server) -> None:
    since = await settled(narrow)
    async with streaming(narrow, [ENDLESS]) as stream:
        with narrow.engine.slowed(LONG):
            for _ in range(3):
                await stream.event()
            await stream.reset()
            assert (await settled(narrow, since, 1))["quire:steps_total"] <= 3 + LATE


async def test_leaving_in_the_prompt_ends_it_within_two_steps(narrow: Server) -> None:
    since = await settled(narrow)
    with narrow.engine.slowed(LONG):
        async with streaming(narrow, [CHAIN, 8, *[9] * 1498], 9) as stream:  # 24 steps
            began = (await figures(narrow))["quire:steps_total"] - since["quire:steps_total"]
            await stream.reset()
        grown = await settled(narrow, since, 1)
    assert grown["quire:steps_total"] <= began + 1 + LATE  # the figures may be a step old
    assert grown["vllm:prompt_tokens_total"] < 1500
    assert grown["vllm:generation_tokens_total"] == 0


async def test_leaving_the_queue_lets_the_running_one_go_on(narrow: Server) -> None:
    since = await settled(narrow)
    async with streaming(narrow, [ENDLESS]) as running:
        await running.event()
        async with streaming(narrow, [CHAIN, *[9] * 100]) as queued:
            await until(lambda: waiting(narrow, 1))
            await queued.reset()
        await until(lambda: waiting(narrow, 0))
        assert ' two"' in await running.event()
        await running.reset()
    grown = await settled(narrow, since, 2)
    assert ended(grown, SEQUENCES) == {"abort": 2}
    assert grown["vllm:prompt_tokens_total"] == 1


async def test_a_whole_answer_is_given_up_too_when_its_client_leaves(narrow: Server) -> None:
    since = await settled(narrow)
    async with wire(narrow, "/v1/completions", {"prompt": [BRIEF, ENDLESS], "max_tokens": 900}) as exchange:
        await until(lambda: running_now(narrow))
        await exchange.leave()
    grown = await settled(narrow, since, 1)
    assert ended(grown, SEQUENCES) == {"abort": 1}


async def running_now(server: Server) -> bool:
    return (await figures(server))["vllm:num_requests_running"] == 1
