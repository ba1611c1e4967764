"""`StreamWrites`: what streams write, until the event loop's next turn.

All streams that get rows in a turn are written one right behind the other, so that a client that reads several of them
is woken once.
"""

import asyncio


class StreamWrites:
    """The bytes that wait to be written, by connection. Connections buffer them if their clients do not read."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, list[bytes]] = {}

    def add(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write `data` in the loop's next turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.setdefault(transport, []).append(data)

    def flush(self) -> None:
        """Write what waits now."""
        waiting, self._waiting = self._waiting, {}
        for transport, pieces in waiting.items():
            if not transport.is_closing():
                transport.write(b"".join(pieces))
