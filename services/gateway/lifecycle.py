"""`Lifecycle`: which requests run, and how they end when the process does.

`drain` refuses new ones and lets the running ones finish; `cut` ends those too, each with `Unavailable` raised where
it waits, so that its client is told.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import Unavailable

SHUTTING_DOWN = "the server is shutting down"


class Lifecycle:
    """Of one gateway process. Not ready to restart: drained once, it stays so."""

    def __init__(self) -> None:
        self.draining = False
        self._cut = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Requests that run."""
        return len(self._tasks)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The span of one request. Raises `Unavailable` when draining, or when it is cut off."""
        if self.draining:
            raise Unavailable(SHUTTING_DOWN)
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self._cut:
                raise
            task.uncancel()
            raise Unavailable(SHUTTING_DOWN) from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    def drain(self) -> None:
        """Take no more requests."""
        self.draining = True

    def cut(self) -> None:
        """End the running requests. Idempotent."""
        self.draining = True
        if not self._cut:
            self._cut = True
            for task in self._tasks:
                task.cancel()

    async def finished(self, seconds: float) -> bool:
        """Waits until nothing runs, at most so many seconds; says whether that came."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
