"""`Supervisor`: starts the children of one server together, watches them, and stops them in order.

It knows processes, signals, readiness and heartbeats, but not what the children do. They are stopped in the order of
`children`: first the one that accepts work, last the one that does it, so that accepted work can be finished.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from quire.children import Child, StartFailed
from quire.watch import PERIOD, Watch

PROBE_INTERVAL = 0.05  # seconds
PROBE_TIMEOUT = 2.0  # seconds
QUICK_STOP = 3.0  # seconds between SIGTERM and SIGKILL when there is nothing to drain
LAST_ANSWERS = 15.0  # seconds beyond the drain timeout for the first child to send its last answers
STOPPING = "stopping: running requests may finish (Ctrl-C again ends at once)"
INTERRUPTED = 128  # plus the signal's number: the exit status that shells know


class Supervisor:
    """Runs `children` until a signal. `ready` tells whether they serve; `announce` is called once they do.

    `say` gets a line for the user at the first signal, and when everything has ended.
    `watch` names the children that hang; those are replaced.
    `drain_timeout`: seconds in which the first child may finish its work after SIGTERM.
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
        """Run until a signal; return 0 after a drain, 128 + signal if it was cut short. Raise `StartFailed`.

        No child is left, however it ends.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signals.put_nowait, number)
        keepers = [asyncio.ensure_future(child.keep_running()) for child in self.children]
        watcher = asyncio.ensure_future(self._replace_dead())
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
        """Wait until the children serve; return an exit status if a signal came first, else None."""
        ready = asyncio.ensure_future(self._until_ready())
        interrupt = asyncio.ensure_future(self._signals.get())
        awaited: list[asyncio.Future[Any]] = [*keepers, ready, interrupt]
        done, _ = await asyncio.wait(awaited, timeout=self.ready_timeout, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        interrupt.cancel()
        if ready in done:
            ready.result()
            for child in self.children:
                child.established = True
            self.announce()
            return None
        await asyncio.gather(*(child.stop(QUICK_STOP) for child in self.children))
        if interrupt in done:
            return INTERRUPTED + interrupt.result()
        for keeper in done:  # a child could not be started
            keeper.result()
        raise StartFailed(f"not ready within {self.ready_timeout:g} s (--ready-timeout)")

    async def _replace_dead(self) -> None:
        while self.watch is not None:
            for child, reason in self.watch.find_hung(self.children, time.monotonic()):
                child.replace(reason)
            await asyncio.sleep(PERIOD)

    def _report_failure(self, watcher: "asyncio.Future[None]") -> None:
        """Say that hung services are no longer replaced. Serving goes on, since none may ever hang."""
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self.say(f"services that hang are no longer replaced, by a bug: {error!r}")

    async def _until_ready(self) -> None:
        while not await self.ready():  # noqa: ASYNC110  (another process decides it)
            await asyncio.sleep(PROBE_INTERVAL)

    async def _drain(self) -> int:
        """Stop the children one after the other, until another signal; return the exit status."""
        drained = asyncio.ensure_future(self._stop_in_order())
        interrupt = asyncio.ensure_future(self._signals.get())
        done, _ = await asyncio.wait([drained, interrupt], return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        interrupt.cancel()
        return drained.result() if drained in done else INTERRUPTED + interrupt.result()

    async def _stop_in_order(self) -> int:
        first, *rest = self.children
        await first.stop(self.drain_timeout + LAST_ANSWERS)
        for child in rest:
            await child.stop(QUICK_STOP)
        return 0


async def is_healthy(host: str, port: int, uds: str | None = None) -> bool:
    """Return whether `GET /health` is answered with 200, at the Unix socket `uds` if there is one."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_TIMEOUT):
            opening = asyncio.open_unix_connection(uds) if uds else asyncio.open_connection(host, port)
            reader, writer = await opening
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    return False
