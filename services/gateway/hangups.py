"""`HangUpWatcher`: notices when a half-closed connection is closed completely.

A client that shuts down its sending side may still wait for its response. When the event loop has read the end of the
client's data, it stops watching the socket, since every further read would return the same end. So it does not notice
when the client goes away. Epoll with an empty event mask still reports hang-ups and errors, and nothing else.
"""

import asyncio
import select
from collections.abc import Callable
from contextlib import suppress


class HangUpWatcher:
    """Watches sockets by their file descriptors, on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._report)

    def __repr__(self) -> str:
        return f"<HangUpWatcher of {sorted(self._callbacks)}>"

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the peer has hung up."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, 0)

    def forget(self, fd: int) -> None:
        """Stop watching. Idempotent. Call it before the socket is closed: its number may then be another socket's."""
        if self._callbacks.pop(fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop watching all sockets."""
        self._callbacks.clear()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _report(self) -> None:
        for fd, _ in self._epoll.poll(0):
            callback = self._callbacks[fd]
            self.forget(fd)  # epoll would report it again and again
            callback()
