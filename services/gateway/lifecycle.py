"""`Lifecycle`: the running requests of a gateway, and how they end when the process does.

`drain` has health checks fail, refuses new requests after a delay, and lets the running ones finish. `abort` ends those
too: `Unavailable` is raised in each request's task, which then sends its client an error.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shared.admin import DrainState
from shared.errors import Unavailable

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"


class Lifecycle:
    """The running requests of one gateway process. Once it drains, it never serves as before again.

    A drain still accepts requests for `shutdown_delay` seconds, and then gives them `drain_timeout` seconds to finish.
    """

    def __init__(self, shutdown_delay: float = 0.0, drain_timeout: float = 30.0) -> None:
        self.drain_seconds = shutdown_delay + drain_timeout  # of a whole drain
        self._shutdown_delay = shutdown_delay
        self._drain_began = -float("inf")
        self._draining = asyncio.Event()
        self._closed = False  # to new requests
        self._aborted = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._drained = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Return whether a drain has begun."""
        return self._draining.is_set()

    @property
    def num_running(self) -> int:
        """Return the number of running requests."""
        return len(self._tasks)

    @property
    def seconds_left(self) -> float:
        """Return the time that the drain has left. 0: it has taken its time, or not begun."""
        return max(0.0, self._drain_began + self.drain_seconds - time.monotonic())

    @property
    def drain_state(self) -> DrainState:
        """Return how far the drain is. Other threads may ask."""
        return DrainState(self.draining, self._drained.is_set(), self.num_running)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request as running for the time of the block, which is all that its task does for it.

        Raise `Unavailable` if none is accepted any more, or if `abort` ends it.
        """
        if self._closed:
            raise Unavailable(SHUTTING_DOWN)
        task = _current_task()
        self._tasks.add(task)
        try:
            with self.abortable():
                yield
        finally:
            self._tasks.discard(task)
            self._note_drained()

    @contextmanager
    def abortable(self) -> Iterator[None]:
        """Raise `Unavailable` in a part of a running request that `abort` ends, and that has to tell its client so."""
        try:
            yield
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            _current_task().uncancel()
            raise Unavailable(SHUTTING_DOWN) from None

    def drain(self) -> None:
        """Fail health checks from now on, and refuse new requests after the delay. Idempotent."""
        if self.draining:
            return
        self._draining.set()
        self._drain_began = time.monotonic()
        logger.info("draining: %d requests are running", self.num_running)
        if self._shutdown_delay:
            asyncio.get_running_loop().call_later(self._shutdown_delay, self._close)
        else:
            self._close()

    def abort(self) -> None:
        """Refuse new requests, and end the running ones. Idempotent."""
        self._draining.set()
        self._close()
        if not self._aborted:
            self._aborted = True
            for task in self._tasks:
                task.cancel()

    async def wait_draining(self) -> None:
        """Wait until a drain has begun."""
        await self._draining.wait()

    async def wait_drained(self, seconds: float) -> bool:
        """Wait until new requests are refused and none is running, for at most `seconds`. Return whether that is so."""
        try:
            async with asyncio.timeout(seconds):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True

    def _close(self) -> None:
        self._closed = True
        self._note_drained()

    def _note_drained(self) -> None:
        if self._closed and not self._tasks:
            self._drained.set()


def _current_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    assert task is not None  # every coroutine runs in a task
    return task
