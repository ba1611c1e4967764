"""Tests how a whole server stops when it is asked to, as its clients see it."""

import asyncio
import json
import signal

import openai
import pytest

from tests.ports import free_ports
from tests.scripted_worker import CHAIN
from tests.system.http_client import (
    ENDLESS,
    MODEL,
    Answer,
    chained,
    client,
    complete,
    figures,
    post_drain,
    talk,
    text_of,
)
from tests.system.processes import Child, Server
from tests.system.processes import server as serving
from tests.waiting import until

STREAMS = PLAIN = 10
TOKENS = 200


async def begin(server: Server, prompt: list[int], tokens: int) -> list["asyncio.Task[Answer]"]:
    """Start streams and plain requests. Return when all of them run and the streams have sent something."""
    kinds = [True] * STREAMS + [False] * PLAIN
    answers = [complete(server, [*prompt, 20 + at], tokens, stream=kind) for at, kind in enumerate(kinds)]
    tasks = [asyncio.create_task(answer) for answer in answers]

    async def under_way() -> bool:
        now = await figures(server)
        return now["vllm:num_requests_running"] == len(tasks) and now["vllm:generation_tokens_total"] > 5 * len(tasks)

    await until(under_way)
    return tasks


@pytest.mark.parametrize("who", ["gateway", "scheduler"])
async def test_a_drain_lets_all_finish_and_takes_nothing_new(who: str) -> None:
    """PRC-10."""
    front = ["--drain-timeout=30", "--engine-loss-timeout=0.3"]
    async with serving(talk(), "--drain-timeout=30", front=front) as server:
        asked: Child = server.gateway if who == "gateway" else server.engine.scheduler
        asked.restart = False
        with server.engine.slowed():
            running = await begin(server, [CHAIN], TOKENS)
            asked.signal(signal.SIGTERM)
            await until(server.gateway.unhealthy)
            async with client(server) as official:
                with pytest.raises(openai.InternalServerError) as caught:
                    await official.completions.create(model=MODEL, prompt="port")
            assert caught.value.status_code == 503
            assert caught.value.response.headers["Retry-After"]
            assert not any(task.done() for task in running)
        for at, answer in enumerate(await asyncio.gather(*running)):
            assert answer.status == 200
            assert text_of(answer) == chained([CHAIN, 20 + at], TOKENS)
        assert await asked.ended() == 0


@pytest.mark.parametrize("signalled", [False, True], ids=["post", "post, then SIGTERM"])
@pytest.mark.parametrize("who", ["gateway", "scheduler"])
async def test_a_drain_by_post_ends_nothing_and_sigterm_after_it_cuts_nothing(who: str, signalled: bool) -> None:
    (port,) = free_ports(1)
    flags = [f"--admin-port={port}"]
    of_gateway, of_scheduler = (flags, []) if who == "gateway" else ([], flags)
    async with serving(talk(), *of_scheduler, front=[*of_gateway, "--engine-loss-timeout=0.3"]) as server:
        asked: Child = server.gateway if who == "gateway" else server.engine.scheduler
        asked.restart = False
        with server.engine.slowed():
            running = await begin(server, [CHAIN], TOKENS)
            hook = asyncio.create_task(post_drain(port))
            await until(server.gateway.unhealthy)
            assert (await complete(server, [CHAIN], 1)).status == 503
            if signalled:
                asked.signal(signal.SIGTERM)
            assert not hook.done()
            assert not any(task.done() for task in running)
        for at, answer in enumerate(await asyncio.gather(*running)):
            assert text_of(answer) == chained([CHAIN, 20 + at], TOKENS)
        if signalled:
            await asyncio.gather(hook, return_exceptions=True)  # the process may end before it answers
        else:
            assert await hook == 200
            await asyncio.sleep(0.5)
            assert asked.running
            asked.signal(signal.SIGTERM)
        assert await asked.ended() == 0


@pytest.mark.parametrize("who", ["gateway", "scheduler"])
async def test_without_a_drain_every_client_is_told(who: str) -> None:
    """PRC-10. A scheduler's requests wait for another one so long."""
    front = ["--drain-timeout=0", "--engine-loss-timeout=0.3"]
    status, kind = (503, "ServiceUnavailableError") if who == "gateway" else (500, "InternalServerError")
    async with serving(talk(delay=0.02), "--drain-timeout=0", front=front) as server:
        running = await begin(server, [ENDLESS], 1500)
        asked: Child = server.gateway if who == "gateway" else server.engine.scheduler
        asked.restart = False
        asked.signal(signal.SIGTERM)
        answers = await asyncio.gather(*running)
        for answer in answers[:STREAMS]:
            *_, last, done, nothing = answer.text.split("\n\n")
            assert (done, nothing) == ("data: [DONE]", "")
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == status
        for answer in answers[STREAMS:]:
            assert (answer.status, answer.error["type"]) == (status, kind)
        assert await asked.ended() == 0
