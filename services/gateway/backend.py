"""`Backend`: the engines of a gateway. It chooses an engine for each request.

A request stays at its engine. If the engine's worker dies, the request continues when the worker is back; if the
scheduler dies, the request fails.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

import zmq.asyncio

from services.gateway.engine_connection import EngineConnection
from services.gateway.engine_request import EngineRequest
from shared.errors import Unavailable
from shared.heartbeat import HEARTBEAT_INTERVAL, HeartbeatSender, LoopTimer, Watcher, supervisor_watcher
from shared.protocol import Sampling, Status, Welcome
from shared.transport import check_address

__all__ = ["Backend", "EngineRequest"]


class Backend:
    """Connects to engines, one for each address, for the time of an `async with` block.

    Raise `ConfigError` for an invalid address. `text_digest` identifies this gateway's tokenizer files; an engine with
    another digest gets no requests. Heartbeats tell the engines, and the supervisor at the address `supervisor` if
    there is one, that this gateway is alive.
    """

    def __init__(self, addresses: Sequence[str], text_digest: str = "", supervisor: str = "") -> None:
        for address in addresses:
            check_address(address)
        self._context = zmq.asyncio.Context()
        self._connections = [
            EngineConnection(self._context, address, text_digest, self._short_of_cpu)
            for address in dict.fromkeys(addresses)
        ]
        self._loop_timer = LoopTimer()
        watchers = [Watcher(engine.address, engine.registered_name) for engine in self._connections]
        self._heartbeats = HeartbeatSender(self._loop_timer, watchers + supervisor_watcher(supervisor, "gateway"))
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []
        self._last_welcome: Welcome | None = None

    async def __aenter__(self) -> "Backend":
        await self._tasks.__aenter__()
        self._running = [self._tasks.create_task(engine.run()) for engine in self._connections]
        self._running.append(self._tasks.create_task(self._mark_turns()))
        self._heartbeats.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeats.__exit__()
        for task in self._running:
            task.cancel()
        try:
            if isinstance(error, asyncio.CancelledError):  # by the task group, if one of its tasks has crashed
                await self._tasks.__aexit__(kind, error, trace)
            else:  # the group would wrap any other error of the block in an exception group
                await self._tasks.__aexit__(None, None, None)
        finally:
            self._context.destroy(linger=0)

    @property
    def welcome(self) -> Welcome | None:
        """Return the `Welcome` of the first connected engine. If none is connected, return the last one returned."""
        connected = (engine.welcome for engine in self._connections if engine.welcome)
        self._last_welcome = next(connected, self._last_welcome)
        return self._last_welcome

    def ready(self) -> bool:
        """Return whether at least one engine can compute steps."""
        return any(engine.ready for engine in self._connections)

    def statuses(self) -> Mapping[str, Status]:
        """Return the last status of each connected engine by its name, or by its address where two names are equal."""
        statuses: dict[str, Status] = {}
        for engine in self._connections:
            if engine.welcome is not None and engine.status is not None:
                statuses[engine.address if engine.name in statuses else engine.name] = engine.status
        return statuses

    @asynccontextmanager
    async def submit(
        self, tokens: "array[int]", sampling: Sampling, *, n: int = 1, priority: int = 0, samples_before: int = 0
    ) -> AsyncIterator[EngineRequest]:
        """Run a request for the time of the block. On leaving the block, abort its unfinished samples.

        Raise `Unavailable` if no engine can take it.
        """
        engine = self._choose()
        request = engine.submit(tokens, sampling, n, priority, samples_before)
        try:
            yield request
        finally:
            engine.release(request)

    async def _mark_turns(self) -> None:
        """Mark the turns of the event loop, by which heartbeats show that it does not stand still."""
        while True:
            self._loop_timer.begin_turn()
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    def _short_of_cpu(self, now: float) -> bool:
        return self._heartbeats.short_of_cpu(now)

    def _choose(self) -> EngineConnection:
        """Return the least loaded engine of those that compute steps, or else of those that queue requests.

        Raise `Unavailable` if there is neither.
        """
        connected = [engine for engine in self._connections if engine.welcome is not None]
        if not connected:
            reasons = (engine.unusable for engine in self._connections if engine.unusable)
            raise Unavailable(next(reasons, "no engine is ready yet"))
        accepting = [engine for engine in connected if not engine.draining]
        if not accepting:
            raise Unavailable("the engine is shutting down")
        return min([engine for engine in accepting if engine.ready] or accepting, key=lambda engine: engine.load)
