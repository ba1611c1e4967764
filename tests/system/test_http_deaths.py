"""Tests what HTTP clients see when processes die. A worker's death is a pause and nothing else."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio

from tests.gateway.fakes import events, texts
from tests.scripted_worker import CHAIN, ScriptedFailure
from tests.system.http_client import (
    ENDLESS,
    SAMPLES,
    SEQUENCES,
    Listening,
    ask,
    chained,
    change,
    complete,
    ended,
    figures,
    idle,
    settled,
    streaming,
    talk,
)
from tests.system.processes import Engine, Gateway, Server, engine, gateway
from tests.system.processes import server as serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 200
POISON = {kind: 200 + at for at, kind in enumerate(("raise", "memory", "garbage"))}
SCRIPT = talk(failures=[ScriptedFailure(token, kind) for kind, token in POISON.items()])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving(SCRIPT, "--max-num-seqs=8", "--worker-timeout=1") as system:
        yield system


async def stream_text(at: Listening, prompt: list[int]) -> str:
    async with streaming(at, prompt, TOKENS) as stream:
        return texts(events(await stream.rest()))[0]


async def plain_text(at: Listening, prompt: list[int], tokens: int = TOKENS) -> str:
    text: str = (await complete(at, prompt, tokens)).json["choices"][0]["text"]
    return text


async def test_a_worker_killed_while_idle_makes_the_server_unhealthy_for_a_while(server: Server) -> None:
    """PRC-02."""
    before = await settled(server)
    async with server.engine.worker.absent():
        await until(server.gateway.unhealthy)
        assert (await ask(server, "/health")).error["type"] == "ServiceUnavailableError"
        waiting = asyncio.create_task(plain_text(server, [CHAIN], 5))
        await until(lambda: shows(server, "vllm:num_requests_waiting", 1))
    assert await waiting == chained([CHAIN], 5)
    await until(server.gateway.healthy)
    assert (await settled(server, before, 1))["quire:worker_losses_total"] == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_and_queued_requests_outlive_their_worker(server: Server, number: signal.Signals) -> None:
    """PRC-02."""
    before, prompts = await settled(server), [[CHAIN, 10 + at] for at in range(28)]
    async with AsyncExitStack() as stack:
        with server.engine.slowed():
            streams = [await stack.enter_async_context(streaming(server, prompt, TOKENS)) for prompt in prompts[:8]]
            begun = [await stream.event() for stream in streams]
            queued = [asyncio.create_task(plain_text(server, prompt, 9)) for prompt in prompts[8:]]
            await until(lambda: shows(server, "vllm:num_requests_waiting", 20))
            async with server.engine.worker.absent(number):
                await until(server.gateway.unhealthy)
        await until(server.gateway.healthy)
        whole = [first + "\n\n" + await stream.rest() for first, stream in zip(begun, streams, strict=True)]
    assert [texts(events(text))[0] for text in whole] == [chained(prompt, TOKENS) for prompt in prompts[:8]]
    assert await asyncio.gather(*queued) == [chained(prompt, 9) for prompt in prompts[8:]]
    grown = await settled(server, before, 28)
    assert grown["quire:worker_losses_total"] == 1
    assert grown["vllm:generation_tokens_total"] == 8 * TOKENS + 20 * 9
    assert (server.engine.scheduler.lives, server.gateway.lives) == (1, 1)


async def generated(server: Server, tokens: int) -> bool:
    return (await figures(server))["vllm:generation_tokens_total"] >= tokens


async def test_a_request_that_breaks_every_step_fails_alone(server: Server) -> None:
    """PRC-03.

    A step raises, runs out of memory, or returns bytes that are not a message; each has two innocent neighbours.
    """
    before, prompts = await settled(server), [[CHAIN, 10], [CHAIN, 11]]
    for kind, token in POISON.items():
        innocent = [asyncio.create_task(stream_text(server, prompt)) for prompt in prompts]
        if kind == "memory":
            assert await broken_stream(server, [CHAIN, token]) == 500
        else:
            failed = await complete(server, [CHAIN, token], 9)
            assert (failed.status, failed.error["type"]) == (500, "InternalServerError")
            assert "the worker died" in failed.error["message"]
        assert await asyncio.gather(*innocent) == [chained(prompt, TOKENS) for prompt in prompts]
    grown = await settled(server, before, 9)
    assert ended(grown, SEQUENCES) == {"length": 6, "error": 3}
    for said in ("RuntimeError: scripted failure", "MemoryError: scripted", "not a message", "in _fail"):
        assert said in server.engine.scheduler.log
    assert "Traceback" not in server.gateway.log


async def broken_stream(at: Listening, prompt: list[int]) -> int:
    """Return the code of the error in which a stream ends, after a check of its shape."""
    answer = await complete(at, prompt, 1500, stream=True)
    if answer.status != 200:  # it failed before its headers were sent
        return int(answer.error["code"])
    *_, last, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert answer.text.count('data: {"error"') == answer.text.count("[DONE]") == 1
    error = json.loads(last.removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(error["code"])


async def test_a_killed_scheduler_is_a_pause() -> None:
    """Streams, plain answers and those in the queue end as if nothing had happened, with their usage."""
    async with serving(talk(), "--max-num-seqs=8") as server:
        prompts = [[CHAIN, 10 + at] for at in range(12)]
        with server.engine.slowed():
            streams = [asyncio.create_task(stream_text(server, prompt)) for prompt in prompts[:8]]
            plain = [asyncio.create_task(complete(server, prompt, TOKENS)) for prompt in prompts[8:]]
            await until(lambda: generated(server, 40))
            await until(lambda: shows(server, "vllm:num_requests_waiting", 4))
            async with server.engine.scheduler.absent():
                await until(server.gateway.unhealthy)
        assert await asyncio.gather(*streams) == [chained(prompt, TOKENS) for prompt in prompts[:8]]
        for prompt, answer in zip(prompts[8:], await asyncio.gather(*plain), strict=True):
            assert answer.json["choices"][0]["text"] == chained(prompt, TOKENS)
            assert answer.json["usage"]["completion_tokens"] == TOKENS
        now = await figures(server)
        assert ended(now, SAMPLES) == {"length": 12}
        assert now["quire:resumed_requests_total"] == 12
        assert (server.engine.scheduler.lives, server.engine.worker.lives) == (2, 1)
        assert "Traceback" not in server.gateway.log


@asynccontextmanager
async def gateway_without_engine(*flags: str) -> AsyncIterator[tuple[Gateway, Engine]]:
    """Run a gateway, and the scheduler of an engine whose worker is not there yet."""
    async with engine(talk(), worker=False) as behind:
        front = Gateway(behind.folder, [behind.address], flags)
        try:
            await front.start()
            await until(lambda: "listening on" in front.log)
            assert not await front.healthy()  # from here on it has its port
            yield front, behind
        finally:
            await front.stop()


async def test_what_comes_before_a_gateway_has_met_an_engine_waits_for_one() -> None:
    """As after a restart of the gateway, which listens before an engine has answered it."""
    async with gateway_without_engine() as (front, behind):
        answer = asyncio.create_task(complete(front, [CHAIN], 5))
        await asyncio.wait([answer], timeout=0.3)
        assert not answer.done()
        await behind.worker.start()
        assert (await answer).json["choices"][0]["text"] == chained([CHAIN], 5)


async def test_but_only_for_so_long() -> None:
    async with gateway_without_engine("--engine-loss-timeout=0.3") as (front, _):
        answer = await complete(front, [CHAIN], 5)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error["message"] == "no engine was ready for 0.3 s (--engine-loss-timeout)"


async def test_two_gateways_serve_and_the_death_of_one_frees_what_it_had(server: Server) -> None:
    before = await settled(server)
    async with gateway(server.engine, name="second") as second:
        for at in (server, second):
            assert await plain_text(at, [CHAIN, 4], 9) == chained([CHAIN, 4], 9)
        leaving = [asyncio.create_task(broken_off(second)) for _ in range(6)]
        await until(lambda: shows(server, "vllm:num_requests_running", 6))
        staying = asyncio.create_task(stream_text(server, [CHAIN, 5]))
        second.signal(signal.SIGKILL)
        await asyncio.gather(*leaving)
        assert await staying == chained([CHAIN, 5], TOKENS)
        await until(lambda: at_rest(server))
        grown = change(before, await figures(server))
        assert ended(grown, SEQUENCES) == {"length": 3, "abort": 6}
        assert ended(grown, SAMPLES) == {"length": 2}
        await until(server.gateway.healthy)
        await until(second.healthy)
        assert await plain_text(second, [CHAIN, 6], 9) == chained([CHAIN, 6], 9)


async def broken_off(at: Gateway) -> None:
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
        await complete(at, [ENDLESS], 2000, stream=True)


async def shows(server: Server, figure: str, count: int) -> bool:
    return (await figures(server))[figure] == count


async def at_rest(server: Server) -> bool:
    return idle(await figures(server))
