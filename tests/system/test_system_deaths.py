"""Tests what clients see when processes are killed, stopped, hang or send garbage. Worker deaths must be pauses."""

import asyncio
import signal
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.gateway.backend import Backend
from shared.errors import EngineFailure, Overloaded, Unavailable
from shared.protocol import FinishReason, Sampling
from tests.scripted_worker import CHAIN, Script, ScriptedFailure
from tests.scripted_worker import expected_chain as expected
from tests.system.processes import Engine, complete, engine, rest, serving, snapshot
from tests.waiting import found_dead, until

TOKENS = 200
POISON = 666


@asynccontextmanager
async def streams(system: Engine, backend: Backend, count: int) -> AsyncIterator[None]:
    """Run `count` requests. Some of them have some of their tokens when the block starts, and not all when it ends."""
    prompts = [[CHAIN, 10 + at] for at in range(count)]
    async with asyncio.TaskGroup() as tasks:
        with system.slowed():
            running = [tasks.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts]
            begun = snapshot(backend).generation_tokens
            await until(lambda: snapshot(backend).generation_tokens > begun)
            yield
            assert not all(task.done() for task in running)
    assert [task.result().tokens for task in running] == [expected(prompt, TOKENS) for prompt in prompts]


async def assert_recovered(system: Engine, backend: Backend, *, losses: int = 1) -> None:
    result = await rest(backend)
    assert result.worker_losses == losses
    assert system.worker.lives == losses + 1
    assert system.scheduler.lives == 1


async def test_killing_the_worker_under_sixteen_streams_loses_and_doubles_no_token() -> None:
    async with serving() as (system, backend):
        async with streams(system, backend, 16):
            system.worker.signal(signal.SIGKILL)
        await assert_recovered(system, backend)


async def test_killing_the_worker_again_and_again() -> None:
    async with serving(None, "--max-num-seqs=4") as (system, backend):
        async with streams(system, backend, 16):
            for life in range(3):
                await until(lambda life=life: backend.ready() and snapshot(backend).worker_losses == life)
                steps = snapshot(backend).steps
                await until(lambda steps=steps: snapshot(backend).steps > steps)
                system.worker.signal(signal.SIGKILL)
        await assert_recovered(system, backend, losses=3)


async def test_killing_an_idle_worker_makes_the_engine_unready_for_a_while() -> None:
    async with serving() as (system, backend):
        async with system.worker.absent():
            await until(lambda: not backend.ready())
            queued = asyncio.create_task(complete(backend, [CHAIN], 9))
            await until(lambda: snapshot(backend).waiting == 1)
        assert (await queued).tokens == expected([CHAIN], 9)
        await until(backend.ready)
        await assert_recovered(system, backend)


async def test_a_worker_that_is_stopped_in_its_steps_is_replaced() -> None:
    async with serving(None, "--worker-timeout=1") as (system, backend):
        async with streams(system, backend, 8):
            system.worker.signal(signal.SIGSTOP)
        assert found_dead(system.scheduler.log, "(?:silent|busy with one step)", 1)
        await assert_recovered(system, backend)


async def test_a_worker_that_is_stopped_while_idle_is_replaced() -> None:
    async with serving(None, "--worker-timeout=1") as (system, backend):
        system.worker.signal(signal.SIGSTOP)
        await until(lambda: system.worker.lives == 2)
        assert "silent for" in system.scheduler.log
        await until(backend.ready)
        await assert_recovered(system, backend)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raise", "RuntimeError: scripted failure"),
        ("memory", "MemoryError: scripted lack of memory"),
        ("exit", "its connection ended"),
        ("garbage", "it sent something that is not a message"),
        ("missing", "its result has no token for it"),
    ],
)
async def test_a_step_that_goes_wrong_once_is_done_again(kind: str, said: str) -> None:
    failure = ScriptedFailure(POISON, kind, lives=1)
    async with serving(Script(failures=[failure])) as (system, backend):
        async with streams(system, backend, 3):
            assert (await complete(backend, [CHAIN, POISON], 9)).tokens == expected([CHAIN, POISON], 9)
        assert said in system.scheduler.log
        await assert_recovered(system, backend)


@pytest.mark.parametrize("kind", ["raise", "exit"])
async def test_a_request_that_kills_each_worker_fails_alone(kind: str) -> None:
    async with serving(Script(failures=[ScriptedFailure(POISON, kind)])) as (system, backend):
        async with streams(system, backend, 3):
            output = await complete(backend, [CHAIN, POISON], 9)
        assert output.finish is FinishReason.ERROR
        assert "the worker died" in output.detail
        result = await rest(backend)
        assert (result.finished_error, result.finished_length) == (1, 3)
        assert system.worker.lives == result.worker_losses + 1 <= 7


async def test_a_hung_step_ends_the_worker_and_the_stream_goes_on() -> None:
    script = Script(failures=[ScriptedFailure(POISON, "hang", lives=1)])
    async with serving(script, "--worker-timeout=1") as (system, backend):
        async with streams(system, backend, 3):  # and so the epoch's first step, which has more time, is over
            assert (await complete(backend, [CHAIN, POISON], 9)).tokens == expected([CHAIN, POISON], 9)
        await assert_recovered(system, backend)


def num_resumed(backend: Backend) -> int:
    return int(next(iter(backend.losses.resumed.collect())).samples[0].value)


@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
async def test_a_schedulers_death_loses_and_doubles_no_token(frozen: bool) -> None:
    """A frozen one is given up after two seconds; here it is killed then."""
    async with serving(None, "--max-num-seqs=8") as (system, backend):
        async with streams(system, backend, 16):  # half of them are queued
            worker = system.worker.pid
            system.scheduler.signal(signal.SIGSTOP if frozen else signal.SIGKILL)
            if frozen:
                await until(lambda: not backend.ready())
                system.scheduler.signal(signal.SIGKILL)
            await until(lambda: system.scheduler.lives == 2)
        assert (system.worker.pid, system.worker.lives) == (worker, 1)  # the weights were kept
        assert (await rest(backend)).finished_length == num_resumed(backend) == 16


async def test_killing_the_scheduler_again_and_again_and_the_worker_with_it() -> None:
    async with serving() as (system, backend):
        async with streams(system, backend, 8):
            for life in range(1, 4):
                await until(lambda: backend.ready() and snapshot(backend).generation_tokens > 0)
                if life == 2:
                    system.worker.signal(signal.SIGKILL)
                async with system.scheduler.absent():
                    await until(lambda: not backend.ready())
                assert system.scheduler.lives == life + 1
        await rest(backend)


async def test_an_engine_that_drains_hands_its_streams_to_another() -> None:
    """They go on at once, so the engine ends long before they would have."""
    async with (
        engine(None, "--engine=first") as first,
        engine(None, "--engine=second") as second,
        Backend([first.address, second.address]) as backend,
    ):
        await until(lambda: len(backend.statuses()) == 2 and all(one.ready for one in backend.statuses().values()))
        prompts = [[CHAIN, 10 + at] for at in range(8)]
        with first.slowed(), second.slowed():
            running = [asyncio.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts]
            await until(lambda: all(one.snapshot.generation_tokens > 20 for one in backend.statuses().values()))
            first.scheduler.restart = False
            first.scheduler.signal(signal.SIGTERM)
            assert await first.scheduler.ended() == 0
            assert not any(task.done() for task in running)
        outputs = await asyncio.gather(*running)
        assert [output.tokens for output in outputs] == [expected(prompt, TOKENS) for prompt in prompts]
        assert num_resumed(backend) == 4
        await until(lambda: backend.statuses()["second"].snapshot.finished_length == 8)


async def test_a_request_that_comes_while_there_is_no_scheduler_waits_for_it() -> None:
    async with serving() as (system, backend):
        async with system.scheduler.absent():
            await until(lambda: not backend.ready())
            waiting = asyncio.create_task(complete(backend, [CHAIN], 9))
        assert (await waiting).tokens == expected([CHAIN], 9)
        assert num_resumed(backend) == 0


async def test_a_bounded_number_of_requests_waits_for_the_first_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.backend.MAX_WAITING", 2)
    async with Backend(["ipc:///tmp/there-is-no-engine.sock"]) as backend:
        waiting = [asyncio.create_task(backend.first_welcome()) for _ in range(2)]
        await asyncio.wait(waiting, timeout=0.05)
        with pytest.raises(Overloaded, match="requests wait for an engine already"):
            await backend.first_welcome()
        waiting.pop().cancel()
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(backend.first_welcome()))  # there is room again
        _, pending = await asyncio.wait(waiting, timeout=0.05)
        assert len(pending) == 2
        for task in waiting:
            task.cancel()


async def test_a_scheduler_that_does_not_come_back_is_waited_for_so_long() -> None:
    async with serving(None, loss_timeout=1.0) as (system, backend):
        with system.slowed():
            running = asyncio.create_task(complete(backend, [CHAIN], TOKENS))
            await until(lambda: snapshot(backend).running == 1)
            system.scheduler.signal(signal.SIGSTOP)
        try:
            with pytest.raises(EngineFailure, match=r"lost, and no engine was ready for 1 s \(--engine-loss-timeout\)"):
                await running
            with pytest.raises(Unavailable, match="no engine was ready for 1 s"):
                await complete(backend, [CHAIN], 9)
        finally:
            system.scheduler.signal(signal.SIGCONT)
        await until(backend.ready)
        assert (await complete(backend, [CHAIN], 9)).tokens == expected([CHAIN], 9)
        assert (await rest(backend)).finished_abort == 1, "the old attempt has ended at the engine"


async def test_a_gateway_that_dies_leaves_nothing_behind() -> None:
    async with serving(Script(delay=0.01)) as (system, backend):
        other = Backend([system.address])
        async with other:
            await until(other.ready)
            sampling = Sampling(max_tokens=1500, seed=0)
            async with other.submit(array("i", [5]), sampling) as one, other.submit(array("i", [6]), sampling) as two:
                await one.rows()
                await two.rows()
                for task in other._running:  # as a killed process: the socket closes and no Abort is sent
                    task.cancel()
                await asyncio.wait(other._running)
                result = await rest(backend)
                assert result.finished_abort == 2
                assert result.steps < 1000
