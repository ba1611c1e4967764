"""Tests an engine whose worker is a group of ranks: any of them may die, stop or leave, and no stream notices."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.gateway.backend import Backend
from tests.scripted_worker import CHAIN, Script, ScriptedFailure
from tests.scripted_worker import expected_chain as expected
from tests.system.processes import Engine, Output, complete, rest, serving, snapshot
from tests.waiting import found_dead, until

TOKENS = 200
STREAMS = 8
POISON = 666

TENSOR_PARALLEL, PIPELINE, BOTH = (2, 1), (1, 2), (2, 2)


@asynccontextmanager
async def streams(system: Engine, backend: Backend) -> AsyncIterator[None]:
    """Run requests, and check all their tokens.

    Some of them have some of their tokens when the block starts, and not all when it ends.
    """
    prompts = [[CHAIN, 10 + at] for at in range(STREAMS)]
    async with asyncio.TaskGroup() as tasks:
        with system.slowed():
            running: list[asyncio.Task[Output]] = [
                tasks.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts
            ]
            begun = snapshot(backend).generation_tokens
            await until(lambda: snapshot(backend).generation_tokens > begun)
            yield
            assert not all(task.done() for task in running)
    assert [task.result().tokens for task in running] == [expected(prompt, TOKENS) for prompt in prompts]


async def assert_recovered(system: Engine, backend: Backend, *, losses: int = 1) -> None:
    """Check that the group was lost so often as a whole."""
    assert (await rest(backend)).worker_losses == losses
    assert {rank.lives for rank in system.ranks} == {losses + 1}, "all ranks begin again together"
    assert system.scheduler.lives == 1


@pytest.mark.parametrize("sizes", [TENSOR_PARALLEL, PIPELINE, BOTH])
async def test_killing_each_rank_in_turn_loses_and_doubles_no_token(sizes: tuple[int, int]) -> None:
    async with serving(None, sizes=sizes) as (system, backend):
        async with streams(system, backend):
            for losses, rank in enumerate(system.ranks):
                await until(lambda losses=losses: backend.ready() and snapshot(backend).worker_losses == losses)
                steps = snapshot(backend).steps
                await until(lambda steps=steps: snapshot(backend).steps > steps)
                rank.signal(signal.SIGKILL)
                await until(lambda losses=losses: snapshot(backend).worker_losses == losses + 1)
        await assert_recovered(system, backend, losses=len(system.ranks))


@pytest.mark.parametrize("number", [0, 1])
async def test_a_rank_that_is_stopped_is_replaced_with_its_group(number: int) -> None:
    async with serving(None, "--worker-timeout=1", sizes=TENSOR_PARALLEL) as (system, backend):
        async with streams(system, backend):
            system.ranks[number].signal(signal.SIGSTOP)
        log = system.scheduler.log
        reason = rf"rank {number} of 2 is given up: "
        assert found_dead(log, reason + "silent", 1) or found_dead(log, reason + "busy with one step", 1)
        assert f"rank {1 - number} of 2 is given up: its group is lost" in log
        await assert_recovered(system, backend)


@pytest.mark.parametrize("number", [0, 2])
async def test_a_rank_that_hangs_in_a_step_is_replaced_with_its_group(number: int) -> None:
    failure = ScriptedFailure(POISON, "hang", lives=1, rank=number)
    async with serving(Script(failures=[failure]), "--worker-timeout=1", sizes=BOTH) as (system, backend):
        async with streams(system, backend):
            assert (await complete(backend, [CHAIN, POISON], 9)).tokens == expected([CHAIN, POISON], 9)
        assert f"rank {number} of 4 is given up: busy with one step" in system.scheduler.log
        await assert_recovered(system, backend)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", ["raise", "memory", "garbage"])
async def test_a_step_that_goes_wrong_on_one_rank_is_done_again(kind: str, number: int) -> None:
    failure = ScriptedFailure(POISON, kind, lives=1, rank=number)
    async with serving(Script(failures=[failure]), sizes=PIPELINE) as (system, backend):
        async with streams(system, backend):
            assert (await complete(backend, [CHAIN, POISON], 9)).tokens == expected([CHAIN, POISON], 9)
        await assert_recovered(system, backend)


async def test_a_request_that_kills_one_rank_each_time_fails_alone() -> None:
    script = Script(failures=[ScriptedFailure(POISON, "raise", rank=1)])
    async with serving(script, sizes=TENSOR_PARALLEL) as (system, backend):
        async with streams(system, backend):
            assert "died 2 times" in (await complete(backend, [CHAIN, POISON], 9)).detail
        assert (await rest(backend)).worker_losses == system.worker.lives - 1 >= 2


async def test_a_rank_that_is_told_to_end_takes_its_group_along_in_good_order() -> None:
    async with serving(None, sizes=BOTH) as (system, backend):
        async with streams(system, backend):
            system.ranks[2].signal(signal.SIGTERM)
            await until(lambda: all(rank.lives == 2 for rank in system.ranks))
        assert (await rest(backend)).worker_losses == 0
        assert all(rank.status == 0 for rank in system.ranks)


async def test_a_rank_of_a_group_of_another_size_is_sent_away() -> None:
    async with serving(None, sizes=TENSOR_PARALLEL) as (system, backend), streams(system, backend):
        stranger = system.rank(2, 3, 1, "stranger")
        stranger.restart = False
        try:
            await stranger.start()
            assert await stranger.ended() == 0
        finally:
            await stranger.stop()
        reason = r"rank 2 of 3 is given up: it differs from rank [01], which came before: world_size 3 instead of 2"
        assert re.search(reason, system.scheduler.log)
    assert system.worker.lives == 1


async def test_a_rank_that_waits_in_line_takes_the_place_of_one_that_dies() -> None:
    """The others come again for it."""
    async with serving(None, sizes=TENSOR_PARALLEL) as (system, backend):
        spare = system.rank(1, *TENSOR_PARALLEL, "spare")
        try:
            await spare.start()
            await until(lambda: system.scheduler.log.count("rank 1 of 2 registered") == 2)
            async with streams(system, backend):
                system.ranks[1].restart = False
                system.ranks[1].signal(signal.SIGKILL)
            assert (await rest(backend)).worker_losses == 1
            assert (spare.lives, system.ranks[0].lives) == (1, 2)
        finally:
            await spare.stop()


@pytest.mark.parametrize("sizes", [TENSOR_PARALLEL, BOTH])
async def test_killing_the_scheduler_of_a_group_loses_and_doubles_no_token(sizes: tuple[int, int]) -> None:
    async with serving(None, sizes=sizes) as (system, backend):
        async with streams(system, backend):
            system.scheduler.signal(signal.SIGKILL)
            await until(lambda: system.scheduler.lives == 2)
        assert (await rest(backend)).worker_losses == 0
