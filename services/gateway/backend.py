"""`Backend`: the engines behind a gateway. It chooses one for each request; what comes of it is the `Attempt`'s.

A request that is in the hands of an engine stays there: if the engine's workers die, it goes on when they are back,
and if the scheduler dies it fails.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

import zmq.asyncio

from services.gateway.attempt import Attempt
from services.gateway.link import Link
from shared.errors import Unavailable
from shared.heartbeat import HEARTBEAT_INTERVAL, HeartbeatSender, LoopTimer, Watcher, supervisor_watcher
from shared.protocol import Sampling, Status, Welcome
from shared.transport import check_address

__all__ = ["Attempt", "Backend"]


class Backend:
    """Connections to engines, one an address, for the time of an `async with`. Raises `ConfigError` for an address.

    `text` is the digest of this gateway's model, without which nothing is sent to an engine that has another one.
    Meanwhile beats tell the engines, and the supervisor at `supervisor` if there is one, that this gateway lives.
    """

    def __init__(self, addresses: Sequence[str], text: str = "", supervisor: str = "") -> None:
        for address in addresses:
            check_address(address)
        self._context = zmq.asyncio.Context()
        self._links = [Link(self._context, address, text, self._short_of_cpu) for address in dict.fromkeys(addresses)]
        self._loop = LoopTimer()
        watchers = [Watcher(link.address, link.known_as) for link in self._links]
        self._heartbeats = HeartbeatSender(self._loop, watchers + supervisor_watcher(supervisor, "gateway"))
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []
        self._welcome: Welcome | None = None

    async def __aenter__(self) -> "Backend":
        await self._tasks.__aenter__()
        self._running = [self._tasks.create_task(link.run()) for link in self._links]
        self._running.append(self._tasks.create_task(self._mark()))
        self._heartbeats.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeats.__exit__()
        for task in self._running:
            task.cancel()
        ours = isinstance(error, asyncio.CancelledError)  # it may have been the group: if a link has crashed
        try:  # an error of the block itself passes as it is
            await (self._tasks.__aexit__(kind, error, trace) if ours else self._tasks.__aexit__(None, None, None))
        finally:
            self._context.destroy(linger=0)

    @property
    def welcome(self) -> Welcome | None:
        """What the first engine that can be reached said of itself, or the last one that could."""
        self._welcome = next((link.welcome for link in self._links if link.welcome), self._welcome)
        return self._welcome

    def ready(self) -> bool:
        """Some engine makes steps."""
        return any(link.ready for link in self._links)

    def statuses(self) -> Mapping[str, Status]:
        """The last word of each engine that is connected, by its name; by its address, where names are the same."""
        found: dict[str, Status] = {}
        for link in self._links:
            if link.welcome is not None and link.status is not None:
                found[link.address if link.name in found else link.name] = link.status
        return found

    @asynccontextmanager
    async def submit(
        self, tokens: "array[int]", sampling: Sampling, *, n: int = 1, priority: int = 0, samples_before: int = 0
    ) -> AsyncIterator[Attempt]:
        """Run a request for the time of the block; leaving it ends what is unfinished.

        Raises `Unavailable` if there is no engine to send it to.
        """
        link = self._choose()
        attempt = link.submit(tokens, sampling, n, priority, samples_before)
        try:
            yield attempt
        finally:
            link.leave(attempt)

    async def _mark(self) -> None:
        """Mark the turns of the event loop for the reporter."""
        while True:
            self._loop.begin_turn()
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    def _short_of_cpu(self, now: float) -> bool:
        return self._heartbeats.short_of_cpu(now)

    def _choose(self) -> Link:
        """The least loaded engine that makes steps; else one whose workers are on their way, for it queues."""
        known = [link for link in self._links if link.welcome is not None]
        if not known:
            raise Unavailable(next((link.unusable for link in self._links if link.unusable), "no engine is ready yet"))
        open_ = [link for link in known if not link.draining]
        if not open_:
            raise Unavailable("the engine is shutting down")
        return min([link for link in open_ if link.ready] or open_, key=lambda link: link.load)
