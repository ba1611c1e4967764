"""`FaultInjector`: kills or freezes one part of a server now and then, and knows which connections that broke."""

import asyncio
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil
from msgspec import Struct

from tests.quire.quire_server import Server

SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
"""Kinds of faults. The supervisor replaces a process that is frozen, as one that hangs."""

REPLACED_WITHIN = 60.0  # seconds
LOOK_INTERVAL = 0.25  # seconds between two looks for the next process
SLACK = 0.5  # seconds by which the clocks of a fault and of a connection may differ


class Fault(Struct):
    """A fault of one process; times are the monotonic clock's, in seconds.

    `replaced` is None if the process was not replaced in time. `ports` are those of the clients whose connections it
    had, if it is a gateway.
    """

    name: str  # such as "scheduler 1"
    kind: str
    began: float
    ports: frozenset[int] = frozenset()
    replaced: float | None = None

    @property
    def role(self) -> str:
        return self.name.split()[0]

    def broke(self, port: int, opened: float, *, responded: bool) -> bool:
        """Return whether this broke a connection from `port`, opened then.

        One to which no gateway has `responded` may have been in the queue of the victim's socket.
        """
        end = time.monotonic() if self.replaced is None else self.replaced
        queued = not responded and self.began - SLACK <= opened <= end + SLACK
        return self.role == "gateway" and (port in self.ports or queued)


class FaultInjector:
    """Chooses process and kind at random, each role as often as another. `counts` says how many of a role there are."""

    def __init__(self, server: Server, port: int, counts: Mapping[str, int], seed: int) -> None:
        self.faults: list[Fault] = []
        self._server = server
        self._port = port
        self._counts = counts
        self._random = random.Random(f"faults {seed}")

    async def run(self, seconds: float, every: float) -> None:
        """Inject a fault `every` so many seconds, for so many seconds. Return when the last process is replaced."""
        began = time.monotonic()
        for number in range(1, int(seconds / every) + 1):
            await asyncio.sleep(began + number * every - time.monotonic())
            await self._inject()

    def broke(self, port: int, opened: float, *, responded: bool) -> bool:
        """Return whether a connection from `port`, opened then, broke because of a fault."""
        return any(fault.broke(port, opened, responded=responded) for fault in self.faults)

    async def _inject(self) -> None:
        role = self._random.choice(sorted(self._counts))
        name = f"{role} {self._random.randrange(self._counts[role])}"
        kind = self._random.choice(sorted(SIGNALS))
        victim = await self._running(name)
        fault = Fault(name, kind, time.monotonic(), self._client_ports(victim) if role == "gateway" else frozenset())
        self.faults.append(fault)
        victim.send_signal(SIGNALS[kind])
        with suppress(TimeoutError):
            await self._running(name, victim)
            fault.replaced = time.monotonic()

    async def _running(self, name: str, before: psutil.Process | None = None) -> psutil.Process:
        """Wait for a process that is not `before`, and for a gateway until it listens, and return it."""
        async with asyncio.timeout(REPLACED_WITHIN):
            while True:
                process = self._server.all_children().get(name)
                if process not in (before, None) and (not name.startswith("gateway") or self._listens(process)):
                    return process
                await asyncio.sleep(LOOK_INTERVAL)

    def _listens(self, gateway: psutil.Process) -> bool:
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == self._port
            for connection in gateway.net_connections("tcp")
        )

    def _client_ports(self, gateway: psutil.Process) -> frozenset[int]:
        return frozenset(
            connection.raddr.port
            for connection in gateway.net_connections("tcp")
            if connection.raddr and connection.laddr.port == self._port
        )
