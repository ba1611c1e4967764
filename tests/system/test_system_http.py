"""The whole way, from HTTP to a scripted worker, in real processes; what clients see when some of them die."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.backend import Backend
from tests.scripted import CHAIN, Misdeed, Script
from tests.system.running import Engine, Gateway, gateway, rest, server, until
from tests.text.vocabulary import make_tokenizer

VOCAB = make_tokenizer().vocab_size
POISON = VOCAB - 1
TOKENS = 50
SLOW = Script(vocab_size=VOCAB, delay=0.01)
ENDLESS = 1500


class Site:
    """A gateway before an engine, and a client of it."""

    def __init__(self, made: Engine, front: Gateway, session: aiohttp.ClientSession) -> None:
        self.engine, self.gateway, self.session = made, front, session
        self.healthy, self.unhealthy = front.healthy, front.unhealthy

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def metric(self, name: str) -> float:
        """Of the only engine."""
        async with self.session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        families = text_string_to_metric_families(text)
        (found,) = [one.value for family in families for one in family.samples if one.name == name]
        return float(found)

    async def at_rest(self) -> bool:
        running = await self.metric("vllm:num_requests_running") + await self.metric("vllm:num_requests_waiting")
        return not running and await self.metric("vllm:kv_cache_usage_perc") == 0

    async def complete(self, prompt: list[int], count: int = TOKENS) -> str:
        """The text of an answer that is not streamed."""
        async with self.session.post(f"{self.url}/v1/completions", json=body(prompt, count)) as response:
            found = await response.json()
            assert response.status == 200, found
            assert found["usage"]["completion_tokens"] == count
            return str(found["choices"][0]["text"])

    async def stream(self, prompt: list[int], count: int = TOKENS, begun: asyncio.Event | None = None) -> str:
        """The text of an answer that is. Raises RuntimeError for an error event."""
        text, ended = "", False
        async with self.session.post(f"{self.url}/v1/completions", json=body(prompt, count, stream=True)) as response:
            assert response.status == 200
            async for line in response.content:
                kind, _, event = line.decode().strip().partition(": ")
                if event == "[DONE]":
                    ended = True
                elif kind == "data":  # and not a comment, which keeps the connection alive
                    found = json.loads(event)
                    if "error" in found:
                        raise RuntimeError(found["error"]["message"])
                    text += found["choices"][0]["text"]
                    if begun is not None:
                        begun.set()
        assert ended
        return text


def body(prompt: list[int], count: int, **fields: object) -> dict[str, object]:
    plain = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    return plain | fields


@asynccontextmanager
async def site(script: Script = SLOW, *flags: str) -> AsyncIterator[Site]:
    async with server(script, *flags) as made, aiohttp.ClientSession() as session:
        yield Site(made.engine, made.gateway, session)


def prompts(count: int) -> list[list[int]]:
    return [[CHAIN, 10 + at] for at in range(count)]


async def undisturbed(found: Site, count: int) -> list[str]:
    return list(await asyncio.gather(*(found.complete(prompt) for prompt in prompts(count))))


async def streams(found: Site, count: int) -> list["asyncio.Task[str]"]:
    """Running streams, each of which has said something."""
    begun = [asyncio.Event() for _ in range(count)]
    pairs = zip(prompts(count), begun, strict=True)
    tasks = [asyncio.create_task(found.stream(prompt, begun=event)) for prompt, event in pairs]
    await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def test_sixteen_streams_go_on_over_the_worker_s_death() -> None:
    async with site() as found:
        wanted = await undisturbed(found, 16)
        tasks = await streams(found, 16)
        found.engine.worker.signal(signal.SIGKILL)
        await until(found.unhealthy)
        assert await asyncio.gather(*tasks) == wanted
        await until(found.healthy)
        await until(found.at_rest)
        assert await found.metric("quire:worker_losses_total") == 1


async def test_streams_go_on_over_a_worker_that_is_stopped() -> None:
    async with site(SLOW, "--worker-timeout=1") as found:
        wanted = await undisturbed(found, 4)
        tasks = await streams(found, 4)
        found.engine.worker.signal(signal.SIGSTOP)
        await until(found.unhealthy)
        assert await asyncio.gather(*tasks) == wanted


async def test_a_step_that_raises_is_a_pause_for_all() -> None:
    script = Script(vocab_size=VOCAB, delay=0.01, misdeeds=[Misdeed(POISON, "raise", lives=1)])
    async with site(script) as found:
        wanted = await undisturbed(found, 3)
        tasks = await streams(found, 3)
        assert await found.complete([CHAIN, POISON]) != ""
        assert await asyncio.gather(*tasks) == wanted
        assert "RuntimeError: scripted failure" in found.engine.scheduler.log


async def test_a_request_that_kills_every_worker_is_told_so_and_the_others_end_well() -> None:
    script = Script(vocab_size=VOCAB, delay=0.01, misdeeds=[Misdeed(POISON, "raise")])
    async with site(script) as found:
        wanted = await undisturbed(found, 3)
        tasks = await streams(found, 3)
        with pytest.raises(RuntimeError, match="the worker died"):
            await found.stream([CHAIN, POISON])
        assert await asyncio.gather(*tasks) == wanted


async def test_the_scheduler_s_death_ends_streams_with_an_error_and_the_next_ones_are_served() -> None:
    async with site() as found:
        wanted = await undisturbed(found, 4)
        tasks = await streams(found, 4)
        found.engine.scheduler.signal(signal.SIGKILL)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, RuntimeError)
            assert "the engine was lost" in str(outcome)
        await until(found.healthy)
        assert await undisturbed(found, 4) == wanted
        assert found.engine.worker.lives == 1


async def test_a_killed_gateway_leaves_nothing_behind_and_comes_back() -> None:
    async with site() as found, Backend([found.engine.address]) as other:
        await until(other.ready)
        tasks = [asyncio.create_task(found.stream(prompt, ENDLESS)) for prompt in prompts(4)]
        await until(lambda: any(status.snapshot.running == 4 for status in other.statuses().values()))
        found.gateway.signal(signal.SIGKILL)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, aiohttp.ClientError)
        assert (await rest(other)).finished_abort == 4
        await until(found.healthy)
        assert await found.complete([CHAIN]) == await found.complete([CHAIN])


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_leave_free_what_they_held(stream: bool) -> None:
    async with site() as found:
        for prompt in prompts(5):
            request = found.session.post(f"{found.url}/v1/completions", json=body(prompt, ENDLESS, stream=stream))
            task = asyncio.create_task(request.__aenter__())
            await until(lambda: task_runs(found))
            if stream:
                response = await task
                await response.content.readline()
                response.close()
            else:
                task.cancel()
            await until(found.at_rest)
        assert await found.metric("vllm:generation_tokens_total") < 5 * ENDLESS / 2
        assert "Traceback" not in found.gateway.log


async def task_runs(found: Site) -> bool:
    return await found.metric("vllm:num_requests_running") == 1


async def test_too_many_are_told_to_come_back() -> None:
    async with site(SLOW, "--max-num-seqs=1", "--max-num-queued-reqs=1") as found:
        statuses, retries = [], []

        async def ask() -> None:
            async with found.session.post(f"{found.url}/v1/completions", json=body([CHAIN], 30)) as response:
                statuses.append(response.status)
                retries.append(response.headers.get("Retry-After"))

        await asyncio.gather(*(ask() for _ in range(8)))
        assert set(statuses) == {200, 429}
        assert all((status == 429) == (retry is not None) for status, retry in zip(statuses, retries, strict=True))


async def test_two_gateways_before_one_engine() -> None:
    async with site() as found, gateway(found.engine, name="second") as front:
        second = Site(found.engine, front, found.session)
        wanted = await undisturbed(found, 8)
        assert await undisturbed(second, 8) == wanted
        both = [side.stream(prompt) for prompt in prompts(8) for side in (found, second)]
        assert await asyncio.gather(*both) == [text for text in wanted for _ in range(2)]
