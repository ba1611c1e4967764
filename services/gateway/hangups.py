"""`HangUps`: tells which half-closed connections have been closed whole.

A client that shuts down its sending side may still wait for its answer. Once the end of its data was read, an event
loop no longer watches the socket, since reading again would give the same end for ever; so it does not see either that
the client has gone away. An epoll set in which nothing is asked of a socket reports just this, a hang-up or an error.
"""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress


class HangUps:
    """Watches sockets by their file descriptors, on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._report)

    def __repr__(self) -> str:
        return f"<HangUps of {sorted(self._callbacks)}>"

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` once if the peer is gone."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, 0)

    def forget(self, fd: int) -> None:
        """Stop watching. Idempotent, but not to be called when the number may belong to another socket already."""
        if self._callbacks.pop(fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop watching all."""
        self._callbacks.clear()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _report(self) -> None:
        for fd, _ in self._epoll.poll(0):
            callback = self._callbacks[fd]
            self.forget(fd)  # or it would be reported again and again
            callback()
