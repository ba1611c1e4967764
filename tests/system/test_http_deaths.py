"""What HTTP clients see when processes behind or beside them die. A worker's death is a pause and nothing else."""

import asyncio
import json
import signal

import pytest

from tests.gateway.fakes import events, texts
from tests.scripted import CHAIN, Misdeed
from tests.system.asking import (
    ENDLESS,
    SEQUENCES,
    Answer,
    ask,
    chained,
    complete,
    ended,
    figures,
    idle,
    settled,
    streaming,
    talk,
)
from tests.system.running import Gateway, Server, gateway, until
from tests.system.running import server as serving

TOKENS = 40
LOADING = 0.4  # seconds, so that a worker's absence can be seen
POISON = {kind: 200 + at for at, kind in enumerate(("raise", "memory", "garbage"))}


async def stream_text(at: Gateway | Server, prompt: list[int]) -> str:
    async with streaming(at, prompt, TOKENS) as stream:
        return texts(events(await stream.rest()))[0]


async def plain_text(at: Gateway | Server, prompt: list[int]) -> str:
    text: str = (await complete(at, prompt, TOKENS)).json["choices"][0]["text"]
    return text


async def health(at: Gateway | Server) -> Answer:
    return await ask(at, "/health")


async def test_prc_02_a_worker_killed_while_idle_makes_the_server_unhealthy_for_a_while() -> None:
    async with serving(talk(start_delay=LOADING)) as server:
        server.engine.worker.signal(signal.SIGKILL)
        await until(server.gateway.unhealthy, 2.0)
        assert (await health(server)).error["type"] == "ServiceUnavailableError"
        assert await plain_text(server, [CHAIN]) == chained([CHAIN], TOKENS)  # by our rule new ones wait
        await until(server.gateway.healthy)
        assert (await settled(server))["quire:worker_losses_total"] == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_prc_02_streams_and_queued_requests_outlive_their_worker(number: signal.Signals) -> None:
    script = talk(start_delay=LOADING, delay=0.01)
    async with serving(script, "--max-num-seqs=8", "--worker-timeout=1") as server:
        prompts = [[CHAIN, 10 + at] for at in range(28)]
        running = [asyncio.create_task(stream_text(server, prompt)) for prompt in prompts[:8]]
        await until(lambda: generated(server, 40))
        queued = [asyncio.create_task(plain_text(server, prompt)) for prompt in prompts[8:]]
        server.engine.worker.signal(number)
        await until(server.gateway.unhealthy, 5.0)
        assert not any(task.done() for task in running)
        await until(server.gateway.healthy)
        assert await asyncio.gather(*running, *queued) == [chained(prompt, TOKENS) for prompt in prompts]
        grown = await settled(server)
        assert grown["quire:worker_losses_total"] == 1
        assert grown["vllm:generation_tokens_total"] == len(prompts) * TOKENS
        assert (server.engine.scheduler.lives, server.gateway.lives) == (1, 1)


async def generated(server: Server, tokens: int) -> bool:
    return (await figures(server))["vllm:generation_tokens_total"] >= tokens


async def test_prc_03_a_request_that_breaks_every_step_fails_alone() -> None:
    """A step that raises, one without memory, and a result that is no message; each with two innocent neighbours."""
    script = talk(delay=0.005, misdeeds=[Misdeed(token, kind) for kind, token in POISON.items()])
    async with serving(script) as server:
        for kind, token in POISON.items():
            prompts = [[CHAIN, 10], [CHAIN, 11]]
            innocent = [asyncio.create_task(stream_text(server, prompt)) for prompt in prompts]
            failed = await complete(server, [CHAIN, token], 9)
            assert failed.status == 500, kind
            assert "the worker died" in failed.error["message"]
            assert await asyncio.gather(*innocent) == [chained(prompt, TOKENS) for prompt in prompts]
        assert await broken_stream(server, [CHAIN, POISON["raise"]]) == 500
        grown = await settled(server)
        assert ended(grown, SEQUENCES) == {"length": 6, "error": 4}
        for said in ("RuntimeError: scripted failure", "MemoryError: scripted", "not a message", "in _misbehave"):
            assert said in server.engine.scheduler.log
        assert "Traceback" not in server.gateway.log


async def broken_stream(at: Gateway | Server, prompt: list[int]) -> int:
    """The code of the error in which a stream ends; its shape is checked."""
    answer = await complete(at, prompt, TOKENS, stream=True)
    if answer.status != 200:  # it failed before its headers were sent
        return int(answer.error["code"])
    *_, last, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert answer.text.count('data: {"error"') == answer.text.count("[DONE]") == 1
    error = json.loads(last.removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(error["code"])


async def test_a_killed_scheduler_ends_its_streams_with_an_error_and_service_resumes() -> None:
    async with serving(talk(delay=0.02)) as server:
        streams = [asyncio.create_task(broken_stream(server, [ENDLESS])) for _ in range(8)]
        plain = [asyncio.create_task(complete(server, [ENDLESS], TOKENS)) for _ in range(4)]
        await until(lambda: generated(server, 40))
        server.engine.scheduler.signal(signal.SIGKILL)
        assert await asyncio.gather(*streams) == [500] * 8
        assert [answer.error["type"] for answer in await asyncio.gather(*plain)] == ["InternalServerError"] * 4
        await until(server.gateway.healthy)
        assert await stream_text(server, [CHAIN]) == chained([CHAIN], TOKENS)
        now = await figures(server)
        assert ended(now, "vllm:request_success_total") == {"error": 12, "length": 1}
        assert (server.engine.scheduler.lives, server.engine.worker.lives) == (2, 1)
        assert "Traceback" not in server.gateway.log


async def test_two_gateways_serve_and_the_death_of_one_frees_what_it_had() -> None:
    async with serving(talk(delay=0.005)) as server, gateway(server.engine, name="second") as second:
        assert await plain_text(server, [CHAIN]) == await plain_text(second, [CHAIN]) == chained([CHAIN], TOKENS)
        staying = asyncio.create_task(stream_text(server, [CHAIN, 5]))
        leaving = [asyncio.create_task(broken_off(second)) for _ in range(6)]
        await until(lambda: running(server, 7))
        second.restart = False
        second.signal(signal.SIGKILL)
        await asyncio.gather(*leaving)
        assert await staying == chained([CHAIN, 5], TOKENS)
        await until(lambda: at_rest(server))
        assert ended(await figures(server), SEQUENCES) == {"length": 3, "abort": 6}
        assert await server.gateway.healthy()


async def broken_off(at: Gateway) -> None:
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
        await complete(at, [ENDLESS], 2000, stream=True)


async def running(server: Server, count: int) -> bool:
    return (await figures(server))["vllm:num_requests_running"] == count


async def at_rest(server: Server) -> bool:
    return idle(await figures(server))
