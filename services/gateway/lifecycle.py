"""`Lifecycle`: the running requests of a gateway, and how they end when the process does.

`drain` refuses new requests and lets the running ones finish. `abort` ends those too: `Unavailable` is raised in each
request's task, which then sends its client an error.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import Unavailable

SHUTTING_DOWN = "the server is shutting down"


class Lifecycle:
    """The running requests of one gateway process. Once it drains, it never accepts requests again."""

    def __init__(self) -> None:
        self.draining = False
        self._aborted = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Return the number of running requests."""
        return len(self._tasks)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count a request as running for the time of the block. Raise `Unavailable` if draining or aborted."""
        if self.draining:
            raise Unavailable(SHUTTING_DOWN)
        task = asyncio.current_task()
        assert task is not None  # every coroutine runs in a task
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            task.uncancel()
            raise Unavailable(SHUTTING_DOWN) from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    def abort(self) -> None:
        """Refuse new requests, and end the running ones. Idempotent."""
        self.draining = True
        if not self._aborted:
            self._aborted = True
            for task in self._tasks:
                task.cancel()

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no request is running, for at most `seconds`. Return whether that is so."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
