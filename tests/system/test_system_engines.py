"""Tests several engines behind one gateway: one dies or hangs, and others come and go, under streams."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import Counter

from services.gateway import backend as backend_module
from services.gateway import engine_connection
from services.gateway.backend import Backend
from shared.errors import InvalidRequest
from shared.protocol import Snapshot
from tests.scripted_worker import CHAIN, Script
from tests.scripted_worker import expected_chain as expected
from tests.system.processes import Engine, complete, engine
from tests.waiting import PATIENCE, until

SCRIPT = Script()
TOKENS = 200
NAMES = "abc"


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[Sequence[Engine]]:
    """Run engines named a, b, ... for the block."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(engine(SCRIPT, f"--engine={name}")) for name in NAMES[:count]]


@asynccontextmanager
async def streams(engines: Sequence[Engine], backend: Backend, count: int = 16) -> AsyncIterator[None]:
    """Run `count` requests. Every engine has begun to answer when the block starts, and not ended when it does."""
    prompts = [[CHAIN, 10 + at] for at in range(count)]
    begun = {name: one.generation_tokens for name, one in snapshots(backend).items()}
    async with asyncio.TaskGroup() as tasks:
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.slowed())
            running = [tasks.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts]
            await until(lambda: all(one.generation_tokens > begun[name] for name, one in snapshots(backend).items()))
            yield
            assert not all(task.done() for task in running)
    assert [task.result().tokens for task in running] == [expected(prompt, TOKENS) for prompt in prompts]


def snapshots(backend: Backend) -> dict[str, Snapshot]:
    return {name: status.snapshot for name, status in backend.statuses().items()}


def count(counter: Counter) -> int:
    return int(next(iter(counter.collect())).samples[0].value)


@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
async def test_requests_of_an_engine_that_is_lost_go_on_at_the_other_at_once(frozen: bool) -> None:
    """The lost scheduler does not come back before all streams have ended."""
    async with engines(2) as (first, second), Backend([first.address, second.address]) as backend:
        await until(lambda: backend.ready(2))
        first.scheduler.restart = False
        async with streams((first, second), backend):
            first.scheduler.signal(signal.SIGSTOP if frozen else signal.SIGKILL)
            await until(lambda: count(backend.losses.resumed) == 8)
        assert count(backend.losses.inexact) == 0
        await until(lambda: snapshots(backend)["b"].finished_length == 16)
        assert list(snapshots(backend)) == ["b"]
        if frozen:
            first.scheduler.signal(signal.SIGCONT)
            await until(lambda: backend.ready(2))


async def test_requests_of_an_engine_whose_worker_stays_away_go_on_at_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_connection, "WORKER_ABSENCE", 0.5)
    async with engines(2) as (first, second), Backend([first.address, second.address]) as backend:
        await until(lambda: backend.ready(2))
        first.worker.restart = False
        async with streams((first, second), backend):
            first.worker.signal(signal.SIGKILL)
            await until(lambda: count(backend.losses.resumed) == 8)
        assert count(backend.losses.inexact) == 0
        await until(lambda: snapshots(backend)["a"].running == snapshots(backend)["a"].waiting == 0)


async def test_requests_of_an_engine_whose_worker_comes_back_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_connection, "WORKER_ABSENCE", 2 * PATIENCE)
    async with engines(2) as (first, second), Backend([first.address, second.address]) as backend:
        await until(lambda: backend.ready(2))
        async with streams((first, second), backend):
            first.worker.signal(signal.SIGKILL)
        assert count(backend.losses.resumed) == 0
        await until(lambda: snapshots(backend)["a"].finished_length == 8)


async def test_engines_of_a_file_join_and_leave_under_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that leaves gets no new requests, and its running ones end there."""
    monkeypatch.setattr(backend_module, "DISCOVERY_INTERVAL", 0.05)
    file = tmp_path / "engines"
    async with engines(2) as (first, second), Backend([f"file://{file}"]) as backend:
        early = asyncio.create_task(complete(backend, [CHAIN, 9], 9))  # it waits for an engine
        await asyncio.sleep(0.2)
        file.write_text(first.address)
        assert (await early).tokens == expected([CHAIN, 9], 9)
        async with streams([first], backend, 8):
            file.write_text(f"{first.address}\n{second.address}\n")
            await until(lambda: backend.ready(2))
            async with streams([first, second], backend, 8):
                file.write_text(second.address)
                await until(lambda: not backend.ready(2))
                before = snapshots(backend)["a"].accepted
                assert snapshots(backend)["a"].running == 8
                await asyncio.gather(*(complete(backend, [CHAIN, at], 2) for at in range(8)))
                assert snapshots(backend)["a"].accepted == before
        await until(lambda: list(snapshots(backend)) == ["b"])
        assert count(backend.losses.resumed) == 0, "no request has moved"
        assert len(backend._heartbeats.watchers) == 1
        await until(lambda: "gateway" in first.scheduler.log and "its connection ended" in first.scheduler.log)
        file.write_text(f"{second.address}\n{first.address}")
        await until(lambda: backend.ready(2))
        assert len(backend._heartbeats.watchers) == 2


async def test_engines_are_found_by_name() -> None:
    async with engine(SCRIPT, tcp=True) as found:
        port = found.address.rpartition(":")[2]
        async with Backend([f"dns://localhost:{port}"]) as backend:
            assert (await complete(backend, [CHAIN], 9)).tokens == expected([CHAIN], 9)


async def test_an_engine_that_leaves_and_dies_gives_its_requests_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "DISCOVERY_INTERVAL", 0.05)
    file = tmp_path / "engines"
    async with engines(2) as (first, second):
        file.write_text(f"{first.address}\n{second.address}\n")
        async with Backend([f"file://{file}"]) as backend:
            await until(lambda: backend.ready(2))
            async with streams((first, second), backend):
                file.write_text(second.address)
                await until(lambda: not backend.ready(2))
                first.scheduler.signal(signal.SIGKILL)
            assert count(backend.losses.resumed) == 8
            assert list(snapshots(backend)) == ["b"]


async def test_a_chat_stays_where_its_beginning_is_cached() -> None:
    """Chats of several turns are spread over the engines, and each turn finds all full blocks of the one before."""
    chats, expected_hits = [[CHAIN, *range(10 + at, 50 + at)] for at in range(3)], 0
    async with engines(2) as (first, second), Backend([first.address, second.address]) as backend:
        await until(lambda: backend.ready(2))
        for turn in range(3):
            for chat in chats:
                expected_hits += (len(chat) - 3) // 16 * 16 if turn else 0  # without the question and the last token
                chat += (await complete(backend, chat, 9)).tokens
                chat += [7, 8]
        await until(lambda: sum(one.prefix_hits for one in snapshots(backend).values()) == expected_hits)
        await until(lambda: sorted(one.accepted for one in snapshots(backend).values()) == [3, 6])


async def test_a_request_goes_where_it_fits() -> None:
    """It waits for that engine when it has died, although another one is ready, which would refuse it."""
    async with (
        engine(SCRIPT, "--engine=a", f"--max-model-len={TOKENS + 4}") as short,
        engine(SCRIPT, "--engine=b") as long,
        Backend([short.address, long.address]) as backend,
    ):
        await until(lambda: backend.ready(2))
        assert backend.welcome is not None
        assert backend.welcome.max_model_len == SCRIPT.max_positions
        prompt = [CHAIN] * 5
        with long.slowed():
            running = asyncio.create_task(complete(backend, prompt, TOKENS))
            await until(lambda: snapshots(backend)["b"].generation_tokens > 3)
            long.scheduler.signal(signal.SIGKILL)
        assert (await running).tokens == expected(prompt, TOKENS)
        assert count(backend.losses.resumed) == 1
        with pytest.raises(InvalidRequest, match="more than the 2048 of the context"):
            await complete(backend, prompt, SCRIPT.max_positions)


async def test_requests_go_on_where_the_tokens_are_the_same() -> None:
    """The engine that may compute other tokens gets none of those that were lost, although it is as little loaded."""
    async with (
        engine(SCRIPT, "--engine=a") as first,
        engine(replace(SCRIPT, fingerprint="other"), "--engine=b") as other,
        engine(SCRIPT, "--engine=c") as third,
        Backend([first.address, other.address, third.address]) as backend,
    ):
        await until(lambda: backend.ready(3))
        first.scheduler.restart = False
        async with streams([first, other, third], backend, 12):
            first.scheduler.signal(signal.SIGKILL)
            await until(lambda: count(backend.losses.resumed) == 4)
        assert count(backend.losses.inexact) == 0
        assert snapshots(backend)["b"].accepted == 4


async def test_a_prompt_counts_as_cached_with_its_first_token() -> None:
    """The request that comes next finds it, while the first one still runs and its engine has more to do."""
    prompt = [CHAIN, *range(10, 800)]
    async with engines(2) as (first, second), Backend([first.address, second.address]) as backend:
        await until(lambda: backend.ready(2))
        with first.slowed():
            running = asyncio.create_task(complete(backend, prompt, TOKENS))
            await until(lambda: snapshots(backend)["a"].generation_tokens > 0)
            assert (await complete(backend, prompt, 2)).tokens == expected(prompt, 2)
            assert not running.done()
        assert (await running).tokens == expected(prompt, TOKENS)
        await until(lambda: snapshots(backend)["a"].accepted == 2)
        await until(lambda: snapshots(backend)["a"].prefix_hits == len(prompt) // 16 * 16)
