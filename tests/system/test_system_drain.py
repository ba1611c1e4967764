"""Tests how the processes stop when they are asked to."""

import asyncio
import re
import signal
from array import array
from contextlib import AsyncExitStack, suppress

import pytest

from shared.errors import EngineFailure, Unavailable
from shared.protocol import Sampling
from tests.scripted_worker import CHAIN, Script, expected_chain
from tests.system.processes import Child, complete, rest, serving, snapshot
from tests.waiting import until

SLOW = Script(delay=0.02)
TOKENS = 200


async def test_draining_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    async with serving(None, "--max-num-seqs=4", loss_timeout=0.3) as (system, backend):
        system.scheduler.restart = system.worker.restart = False
        with system.slowed():
            running = [asyncio.create_task(complete(backend, [CHAIN, at], TOKENS)) for at in range(8)]
            await until(lambda: snapshot(backend).running == 4)
            system.scheduler.signal(signal.SIGTERM)
            await until(lambda: not backend.ready())
            with pytest.raises(Unavailable):
                await complete(backend, [CHAIN], 1)
            assert not any(task.done() for task in running)
        outputs = await asyncio.gather(*running)
        assert [output.tokens for output in outputs] == [expected_chain([CHAIN, at], TOKENS) for at in range(8)]
        assert await system.scheduler.ended() == 0
        assert system.worker.running  # it waits for the next scheduler
        system.worker.signal(signal.SIGTERM)
        assert await system.worker.ended() == 0
        left = [path.name for path in system.folder.iterdir() if path.suffix in (".sock", ".lock")]
        assert left == []


@pytest.mark.parametrize("flags", [["--drain-timeout=0"], []])
async def test_what_is_not_waited_for_is_aborted(flags: list[str]) -> None:
    """The drain timeout is 0, or a second signal comes. No other engine goes on with it."""
    async with serving(SLOW, *flags, loss_timeout=0.3) as (system, backend):
        system.scheduler.restart = False
        running = [asyncio.create_task(complete(backend, [CHAIN, at], 1500)) for at in range(3)]
        await until(lambda: snapshot(backend).running == 3)
        system.scheduler.signal(signal.SIGTERM)
        if not flags:
            await until(lambda: "draining: 3 requests" in system.scheduler.log)
            system.scheduler.signal(signal.SIGTERM)
        for one in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(one, EngineFailure)
        assert await system.scheduler.ended() == 0


async def test_a_gateway_that_leaves_does_not_hold_up_the_drain() -> None:
    async with serving(SLOW) as (system, backend):
        system.scheduler.restart = system.worker.restart = False
        async with backend.submit(array("i", [5]), Sampling(max_tokens=1500, seed=0)) as attempt:
            await attempt.rows()
            system.scheduler.signal(signal.SIGTERM)
            await until(lambda: "draining: 1 requests" in system.scheduler.log)
        assert await system.scheduler.ended() == 0


@pytest.mark.parametrize("spare", [True, False], ids=["with a spare", "alone"])
async def test_a_worker_under_load_leaves_its_streams_to_another(spare: bool) -> None:
    """It ends after a step or two, or alone, a second later, and nobody is a suspect."""
    async with serving() as (system, backend), AsyncExitStack() as stack:
        if spare:
            system.worker.restart = False
            standby = Child("standby", system.folder, system.worker.argv)
            stack.push_async_callback(standby.stop)
            await standby.start()
            await until(lambda: system.scheduler.log.count("registered") == 2)
        with system.slowed():
            running = [asyncio.create_task(complete(backend, [CHAIN, at], TOKENS)) for at in range(8)]
            await until(lambda: snapshot(backend).running == 8)
            system.worker.signal(signal.SIGTERM)
            await until(lambda: system.worker.status is not None)
            assert system.worker.status == 0
            assert not any(task.done() for task in running)
        outputs = await asyncio.gather(*running)
        assert [output.tokens for output in outputs] == [expected_chain([CHAIN, at], TOKENS) for at in range(8)]
        result = await rest(backend)
        assert (result.worker_losses, result.finished_length) == (0, 8)
        assert (system.worker.lives, system.scheduler.lives) == (1 if spare else 2, 1)
        log = re.sub(".*the scheduler stood still.*", "", system.scheduler.log)  # as it may on a busy machine
        assert log.count("is ready") == 2, "two epochs"
        assert not any(word in log for word in ("WARNING", "ERROR", "suspect", "given up"))


async def test_a_worker_that_is_told_to_end_before_its_scheduler_finishes_what_it_has() -> None:
    """As when all services are told at once."""
    async with serving() as (system, backend):
        system.scheduler.restart = system.worker.restart = False
        with system.slowed():
            running = [asyncio.create_task(complete(backend, [CHAIN, at], TOKENS)) for at in range(8)]
            await until(lambda: snapshot(backend).running == 8)
            system.worker.signal(signal.SIGTERM)
            await until(lambda: "was told to end" in system.scheduler.log)
            system.scheduler.signal(signal.SIGTERM)
            await until(lambda: "draining: 8 requests" in system.scheduler.log)
        outputs = await asyncio.gather(*running)
        assert [output.tokens for output in outputs] == [expected_chain([CHAIN, at], TOKENS) for at in range(8)]
        assert (await system.worker.ended(), await system.scheduler.ended()) == (0, 0)


async def test_a_worker_that_is_asked_twice_ends_at_once() -> None:
    async with serving(SLOW) as (system, backend):
        system.worker.restart = False
        async with backend.submit(array("i", [5]), Sampling(max_tokens=1500, seed=0)) as attempt:
            await attempt.rows()
            system.worker.signal(signal.SIGTERM)
            await attempt.rows()
            system.worker.signal(signal.SIGTERM)
            assert await system.worker.ended() == 128 + signal.SIGTERM


async def test_an_idle_engine_ends_at_once_and_fails_nobody() -> None:
    async with serving() as (system, backend):
        system.scheduler.restart = False
        async with backend.submit(array("i", [5]), Sampling(max_tokens=1, seed=0)) as attempt:
            with suppress(EngineFailure):
                await attempt.rows()
        system.scheduler.signal(signal.SIGINT)  # the worker's supervisor decides about it
        await asyncio.sleep(0.3)
        assert system.scheduler.running
        system.scheduler.signal(signal.SIGTERM)
        assert await system.scheduler.ended() == 0
        assert "Traceback" not in system.scheduler.log + system.worker.log
