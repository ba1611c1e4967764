"""Tests that every part of a server can be restarted, one after the other, while clients notice nothing.

Clients choose among gateways as a load balancer does: by /health?engines=0, and another one if a connection is refused.
"""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from quire.supervisor import is_healthy
from tests.ports import free_ports
from tests.scripted_worker import CHAIN
from tests.system.http_client import chained, complete, post_drain, talk, text_of
from tests.system.processes import Child, Engine, Gateway, engine, gateways
from tests.waiting import until

TOKENS = 40
CLIENTS = 8
CHECK_INTERVAL = 0.05  # seconds between two health checks of the balancer
FLAGS = ["--shutdown-delay=2", "--drain-timeout=30"]  # time for the balancer to see that a gateway drains


class Site:
    """Two gateways before some engines, and clients that send one request after the other."""

    def __init__(self, fronts: Sequence[Gateway], engines: Sequence[Engine], admin_ports: Sequence[int]) -> None:
        self.fronts, self.engines, self.admin_ports = fronts, engines, admin_ports
        self.num_answered = 0
        self._open = list(fronts)
        self._one_port = len({front.port for front in fronts}) == 1
        self._stopped = False
        self._turns = itertools.count()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Send requests for the time of the block. Each must be answered as if nothing happened meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            checks = tasks.create_task(self._check_health())
            clients = [tasks.create_task(self._send_requests(at)) for at in range(CLIENTS)]
            try:
                yield
            finally:
                self._stopped = True
            await asyncio.gather(*clients)
            checks.cancel()

    async def restarted(self, part: Child) -> None:
        """Wait until a part that was told to end has been started again, and every gateway reaches every engine."""
        lives = part.lives
        await until(lambda: part.lives > lives)
        await self.recovered()

    async def recovered(self) -> None:
        """Wait until every gateway reaches every engine, and requests are answered."""
        for front in self.fronts:
            await until(lambda front=front: front.healthy(len(self.engines)))
        answered = self.num_answered
        await until(lambda: self.num_answered > answered + CLIENTS)

    async def _check_health(self) -> None:
        while not self._one_port:
            takes = await asyncio.gather(*(is_healthy(("127.0.0.1", one.port), 0) for one in self.fronts))
            self._open = [front for front, open in zip(self.fronts, takes, strict=True) if open]
            await asyncio.sleep(CHECK_INTERVAL)

    async def _send_requests(self, at: int) -> None:
        while not self._stopped:
            turn = next(self._turns)
            prompt = [CHAIN, 20 + at]
            assert self._open, "no gateway takes requests"
            front = self._open[turn % len(self._open)]
            try:
                answer = await complete(front, prompt, TOKENS, stream=turn % 4 > 0)
            except ConnectionRefusedError:
                await asyncio.sleep(CHECK_INTERVAL)
                continue
            except ConnectionResetError:  # the kernel may drop one that no gateway has seen when its socket is closed
                assert self._one_port
                continue
            assert answer.status == 200, answer.text
            assert text_of(answer) == chained(prompt, TOKENS)
            self.num_answered += 1


@asynccontextmanager
async def site(num_engines: int) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        ports = free_ports(num_engines)
        engines = [
            await stack.enter_async_context(engine(talk(delay=0.01), f"--engine={name}", f"--admin-port={port}"))
            for name, port in zip("ab", ports, strict=False)
        ]
        fronts = await stack.enter_async_context(gateways(2, engines, *FLAGS))
        yield Site(fronts, engines, ports)


async def restart_gateways(site: Site) -> None:
    for front in site.fronts:
        front.signal(signal.SIGTERM)
        await site.restarted(front)


async def restart_schedulers(site: Site) -> None:
    """Their workers keep the weights."""
    for one in site.engines:
        one.scheduler.signal(signal.SIGTERM)
        await site.restarted(one.scheduler)
        assert one.worker.lives == 1
        assert "Traceback" not in one.scheduler.log + one.worker.log


async def drain_and_restart_engines(site: Site) -> None:
    """Scheduler and worker end once the engine has drained."""
    for number, one in enumerate(site.engines):
        assert await post_drain(site.admin_ports[number]) == 200
        assert one.scheduler.running
        one.worker.signal(signal.SIGTERM)
        one.scheduler.signal(signal.SIGTERM)
        await site.restarted(one.scheduler)
        assert (one.scheduler.lives, one.worker.lives) == (2, 2)


async def replace_workers(site: Site) -> None:
    """A new worker waits in line while the old one still runs, and so does the next."""
    for one in site.engines:
        standby = Child("standby", one.folder, one.worker.argv)
        await standby.start()
        try:
            await until(lambda one=one: one.scheduler.log.count("registered") == 2)
            one.worker.signal(signal.SIGTERM)
            await site.restarted(one.worker)
            assert one.worker.status == 0
            await until(lambda one=one: one.scheduler.log.count("registered") == 3)
        finally:
            await standby.stop()
        await site.recovered()
        assert "Traceback" not in one.scheduler.log + one.worker.log


async def restart_workers(site: Site) -> None:
    """No other waits in line: requests wait until the worker is back."""
    for one in site.engines:
        one.worker.signal(signal.SIGTERM)
        await site.restarted(one.worker)
        assert one.worker.status == 0
        assert one.scheduler.lives == 1
        assert "suspect" not in one.scheduler.log


async def test_gateways_of_one_port_are_restarted_and_no_request_fails() -> None:
    """One that drains leaves the port to the other at once, so clients need not look at its health."""
    (port,) = free_ports(1)
    async with (
        engine(talk(delay=0.01)) as behind,
        gateways(2, [behind], "--reuse-port", f"--port={port}", *FLAGS) as fronts,
    ):
        server = Site(fronts, [behind], [])
        async with server.load():
            await server.recovered()
            await restart_gateways(server)


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize(
    "restart", [restart_gateways, restart_schedulers, drain_and_restart_engines, replace_workers, restart_workers]
)
async def test_every_part_is_restarted_and_no_request_fails(
    restart: Callable[[Site], Awaitable[None]], num_engines: int
) -> None:
    async with site(num_engines) as server, server.load():
        await server.recovered()
        await restart(server)
