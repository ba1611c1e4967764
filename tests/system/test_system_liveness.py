"""Tests that processes which hang or are stopped are found, and that one that was given up comes back."""

import asyncio
import signal
import time
from contextlib import suppress

import pytest

from shared.errors import QuireError
from shared.liveness import GATEWAY_TIMEOUT
from tests.scripted_worker import CHAIN, Script, ScriptedFailure
from tests.scripted_worker import expected_chain as expected
from tests.system import http_client
from tests.system.http_client import talk
from tests.system.processes import complete, gateway, rest, serving
from tests.system.processes import engine as running
from tests.waiting import PATIENCE, found_dead, until

STUCK = 666


@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
async def test_a_worker_that_is_stopped_in_its_first_step_is_found(tcp: bool) -> None:
    """PRC-24: over tcp the scheduler cannot kill the process; it tells it to end, which it reads once it goes on."""
    async with serving(Script(delay=1.0), tcp=tcp) as (system, backend):
        task = asyncio.create_task(complete(backend, [CHAIN], 2))
        await until(lambda: next(iter(backend.statuses().values())).snapshot.in_flight > 0)
        system.worker.signal(signal.SIGSTOP)
        await until(lambda: found_dead(system.scheduler.log, "silent", 2, remote=tcp))
        if tcp:
            system.worker.signal(signal.SIGCONT)
        assert (await task).tokens == expected([CHAIN], 2)
        assert system.worker.lives == 2


@pytest.mark.parametrize("kind", ["hang", "hang_with_gil"])
@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
async def test_a_step_that_hangs_without_computing_is_found(kind: str, tcp: bool) -> None:
    """PRC-23: heartbeats go on during a hang, but stop if it holds the GIL."""
    failures = [ScriptedFailure(STUCK, kind, lives=1)]
    async with serving(Script(failures=failures), tcp=tcp) as (system, backend):
        assert (await complete(backend, [CHAIN], 9)).tokens == expected([CHAIN], 9)
        task = asyncio.create_task(complete(backend, [CHAIN, STUCK], 9))
        said = "busy with one step" if kind == "hang" else "(?:silent|busy with one step)"
        await until(lambda: found_dead(system.scheduler.log, said, 2, remote=tcp))
        if tcp:
            system.worker.signal(signal.SIGKILL)  # as an orchestrator would
        assert (await task).tokens == expected([CHAIN, STUCK], 9)


@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
async def test_a_step_that_takes_long_but_computes_is_left_alone(tcp: bool) -> None:
    """PRC-23: this step is an endless loop, which for half a minute looks like a slow step on a busy host."""
    failures = [ScriptedFailure(STUCK, "loop", lives=1)]
    async with serving(Script(failures=failures), "--worker-timeout=1", tcp=tcp) as (system, backend):
        assert (await complete(backend, [CHAIN], 9)).tokens == expected([CHAIN], 9)
        task = asyncio.create_task(complete(backend, [CHAIN, STUCK], 9))
        await asyncio.sleep(4.0)  # four times as long as it may be silent or hang
        await until(backend.ready)
        assert system.worker.lives == 1
        system.worker.signal(signal.SIGKILL)
        assert (await task).tokens == expected([CHAIN, STUCK], 9)


async def test_a_scheduler_that_is_stopped_is_given_up_by_its_gateways(caplog: pytest.LogCaptureFixture) -> None:
    """PRC-25: gateways find it again once it goes on, and so do its streams."""
    async with serving(Script(delay=0.01)) as (system, backend):
        task = asyncio.create_task(complete(backend, [CHAIN], 300))
        await until(lambda: next(iter(backend.statuses().values())).snapshot.running > 0)
        system.scheduler.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await until(lambda: not backend.statuses())  # the connection was given up
        assert time.monotonic() - stopped > 1.5
        assert found_dead(caplog.text, "silent", 2, remote=True)
        system.scheduler.signal(signal.SIGCONT)
        assert (await task).tokens == expected([CHAIN], 300)
        assert (system.scheduler.lives, system.worker.lives) == (1, 1)
        assert (await rest(backend)).finished_length == 1


@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
async def test_a_gateway_that_was_stopped_and_goes_on_serves_at_once(tcp: bool) -> None:
    """PRC-21: the scheduler has given it up meanwhile. Requests come all the time, and soon none of them fails."""
    async with running(talk(), tcp=tcp) as system, gateway(system) as front:
        front.signal(signal.SIGSTOP)
        await until(lambda: found_dead(system.scheduler.log, "has left: silent", int(GATEWAY_TIMEOUT), remote=True))
        front.signal(signal.SIGCONT)
        went_on = time.monotonic()
        failures = []
        while (now := time.monotonic()) < went_on + 3.0:
            if (await http_client.complete(front, [CHAIN], 1)).status != 200:
                failures.append(now - went_on)
            await asyncio.sleep(0.05)
        print(f"failed after it went on, in seconds: {failures}")
        assert max(failures, default=0.0) < 1.5
        assert front.lives == 1


async def test_a_link_that_was_given_up_says_hello_again_though_it_is_never_quiet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PRC-21: the scheduler forgets a gateway that still sends heartbeats and requests, which then says Hello again."""
    async with serving() as (_, backend):
        (engine,) = backend._connections
        name = engine.registered_name()
        assert engine._socket is not None
        engine._socket.send(b"nonsense")  # the scheduler gives the gateway up for this
        async with asyncio.timeout(PATIENCE):
            while engine.registered_name() in (name, ""):
                with suppress(QuireError):
                    await complete(backend, [CHAIN], 1)
                await asyncio.sleep(0.02)
        assert "was lost: it has given this gateway up" in caplog.text, "and not for silence"
        assert (await complete(backend, [CHAIN], 9)).tokens == expected([CHAIN], 9)
