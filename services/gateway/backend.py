"""`Backend`: the engines behind a gateway. It chooses an engine for each request.

A request stays at its engine. If the engine's workers die, it goes on when they are back; if the scheduler dies, it
fails.
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
    """Connections to engines, one for each address, for the time of an `async with`. Raise `ConfigError` for a bad one.

    `text_digest` identifies this gateway's tokenizer files; an engine with another digest gets no requests. Heartbeats
    tell the engines, and the supervisor at the address `supervisor` if there is one, that this gateway lives.
    """

    def __init__(self, addresses: Sequence[str], text_digest: str = "", supervisor: str = "") -> None:
        for address in addresses:
            check_address(address)
        self._context = zmq.asyncio.Context()
        self._connections = [
            EngineConnection(self._context, address, text_digest, self._short_of_cpu)
            for address in dict.fromkeys(addresses)
        ]
        self._loop = LoopTimer()
        watchers = [Watcher(engine.address, engine.registered_name) for engine in self._connections]
        self._heartbeats = HeartbeatSender(self._loop, watchers + supervisor_watcher(supervisor, "gateway"))
        self._tasks = asyncio.TaskGroup()
        self._running: list[asyncio.Task[None]] = []
        self._welcome: Welcome | None = None

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
        cancelled = isinstance(error, asyncio.CancelledError)  # perhaps by the group, if a connection has crashed
        try:  # another error of the block is raised as it is, not in a group
            await (self._tasks.__aexit__(kind, error, trace) if cancelled else self._tasks.__aexit__(None, None, None))
        finally:
            self._context.destroy(linger=0)

    @property
    def welcome(self) -> Welcome | None:
        """Return the `Welcome` of the first engine that is connected, or of the last one that was."""
        self._welcome = next((engine.welcome for engine in self._connections if engine.welcome), self._welcome)
        return self._welcome

    def ready(self) -> bool:
        """Return whether some engine makes steps."""
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
        """Run a request for the time of the block. Leaving the block ends what is unfinished.

        Raise `Unavailable` if no engine can take it.
        """
        engine = self._choose()
        request = engine.submit(tokens, sampling, n, priority, samples_before)
        try:
            yield request
        finally:
            engine.release(request)

    async def _mark_turns(self) -> None:
        """Mark the turns of the event loop for the reporter."""
        while True:
            self._loop.begin_turn()
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    def _short_of_cpu(self, now: float) -> bool:
        return self._heartbeats.short_of_cpu(now)

    def _choose(self) -> EngineConnection:
        """Return the least loaded engine that makes steps, or else one that queues until its workers are back."""
        connected = [engine for engine in self._connections if engine.welcome is not None]
        if not connected:
            reasons = (engine.unusable for engine in self._connections if engine.unusable)
            raise Unavailable(next(reasons, "no engine is ready yet"))
        open_ = [engine for engine in connected if not engine.draining]
        if not open_:
            raise Unavailable("the engine is shutting down")
        return min([engine for engine in open_ if engine.ready] or open_, key=lambda engine: engine.load)
