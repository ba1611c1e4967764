"""`Supervisor`: starts the children of one server together, watches them, and stops them in order.

It knows processes, signals, readiness and heartbeats, but not what the children do. It stops them in the order of
`children`, those of one role together: first the ones that accept requests, so that accepted requests can finish, and
last the ones that others report to.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from quire.children import Child, StartFailed
from quire.watch import CHECK_INTERVAL, Watch

HEALTH_CHECK_INTERVAL = 0.05  # seconds
HEALTH_CHECK_TIMEOUT = 2.0  # seconds
QUICK_STOP = 3.0  # seconds between SIGTERM and SIGKILL when there is nothing to drain
LAST_RESPONSES = 15.0  # seconds after the drain timeout in which the first children send their last responses
STOPPING = "stopping: running requests may finish (Ctrl-C again ends at once)"
INTERRUPTED = 128  # plus the signal's number, as in shells


class Supervisor:
    """Runs `children` until a signal. `ready` tells whether they serve; `announce` is called once they do.

    `say` prints a line for the user: at the first signal, and when all children have ended.
    `watch` names the children that hang; those are replaced.
    `drain_timeout` is the time in seconds in which the first children may finish their requests after SIGTERM.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        ready: Callable[[], Awaitable[bool]],
        announce: Callable[[], None],
        say: Callable[[str], None],
        ready_timeout: float,
        drain_timeout: float,
        watch: Watch | None = None,
    ) -> None:
        self.children = children
        self.watch = watch
        self.ready = ready
        self.announce = announce
        self.say = say
        self.ready_timeout = ready_timeout
        self.drain_timeout = drain_timeout
        self._signals: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> int:
        """Run until a signal. Return 0 after a drain, or 128 + signal if one cut it short. Raise `StartFailed`.

        However this ends, no child is left running.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signals.put_nowait, number)
        keepers = [asyncio.ensure_future(child.keep_running()) for child in self.children]
        watcher = asyncio.ensure_future(self._replace_hung())
        watcher.add_done_callback(self._report_failure)
        try:
            status = await self._start(keepers)
            if status is None:
                await self._signals.get()
                self.say(STOPPING)
                status = await self._drain()
        finally:
            watcher.cancel()
            for child in self.children:
                child.kill()
            await asyncio.gather(*keepers, watcher, return_exceptions=True)
        self.say("stopped")
        return status

    async def _start(self, keepers: Sequence["asyncio.Future[None]"]) -> int | None:
        """Wait until the children serve. Return None, or an exit status if a signal came first. Raise `StartFailed`."""
        ready = asyncio.ensure_future(self._until_ready())
        interrupt = asyncio.ensure_future(self._signals.get())
        awaited: list[asyncio.Future[Any]] = [*keepers, ready, interrupt]
        done, _ = await asyncio.wait(awaited, timeout=self.ready_timeout, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        interrupt.cancel()
        if ready in done:
            ready.result()
            for child in self.children:
                child.note_server_ready()
            self.announce()
            return None
        await asyncio.gather(*(child.stop(QUICK_STOP) for child in self.children))
        if interrupt in done:
            return INTERRUPTED + interrupt.result()
        for keeper in done:  # a child could not be started
            keeper.result()
        raise StartFailed(f"not ready within {self.ready_timeout:g} s (--ready-timeout)")

    async def _replace_hung(self) -> None:
        while self.watch is not None:
            for child, reason in self.watch.find_hung(self.children, time.monotonic()):
                child.replace(reason)
            await asyncio.sleep(CHECK_INTERVAL)

    def _report_failure(self, watcher: "asyncio.Future[None]") -> None:
        """Tell the user that the watch has failed. Serving goes on, since perhaps no service will ever hang."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self.say(f"services that hang are no longer replaced, because of a bug: {error!r}")

    async def _until_ready(self) -> None:
        while not await self.ready():  # noqa: ASYNC110  (another process decides it)
            await asyncio.sleep(HEALTH_CHECK_INTERVAL)

    async def _drain(self) -> int:
        """Stop the children one after the other, or until another signal. Return the exit status."""
        stopped = asyncio.ensure_future(self._stop_in_order())
        interrupt = asyncio.ensure_future(self._signals.get())
        done, _ = await asyncio.wait([stopped, interrupt], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        interrupt.cancel()
        return stopped.result() if stopped in done else INTERRUPTED + interrupt.result()

    async def _stop_in_order(self) -> int:
        grace = self.drain_timeout + LAST_RESPONSES
        for _, group in groupby(self.children, key=lambda child: child.role):
            await asyncio.gather(*(child.stop(grace) for child in group))
            grace = QUICK_STOP
            for child in self.children:  # all requests have ended, and a rank ends if another one has
                child.let_end()
        return 0


async def is_healthy(address: str | tuple[str, int], num_engines: int = 1) -> bool:
    """Return whether `GET /health` says that `num_engines` engines are ready.

    `address` is a Unix socket's path, or host and port.
    """
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(HEALTH_CHECK_TIMEOUT):
            if isinstance(address, str):
                reader, writer = await asyncio.open_unix_connection(address)
            else:
                reader, writer = await asyncio.open_connection(*address)
            try:
                path = f"/health?engines={num_engines}"
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    return False
