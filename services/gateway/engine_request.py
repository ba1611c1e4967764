"""`EngineRequest`: one `Submit` at an engine, and the rows that have come for it. It owns no socket and no task.

Each row has the output position of its tokens. A row whose tokens have come before is dropped. If tokens are missing,
the request fails, since a stream with a gap must not continue.
"""

import asyncio
from collections.abc import Callable

from shared.errors import EngineFailure, QuireError
from shared.protocol import Abort, ProgressRow


class EngineRequest:
    """A request at the engine named `engine`. The connection adds rows, and one task reads them."""

    def __init__(self, id: int, n: int, engine: str, send: Callable[[Abort], None]) -> None:
        self.id = id
        self.engine = engine
        self._send = send
        self._num_received = dict.fromkeys(range(n), 0)  # output tokens, of each sample that the engine still runs
        self._accepted = False
        self._rows: list[ProgressRow] = []
        self._error: QuireError | None = None
        self._loop = asyncio.get_running_loop()  # kept, since get_running_loop is a system call
        self._waiter: asyncio.Future[None] | None = None  # the reader waits on it

    def __repr__(self) -> str:
        return f"<EngineRequest {self.id} at {self.engine}, tokens of running samples: {self._num_received}>"

    @property
    def done(self) -> bool:
        """Return whether the engine sends nothing more for this request."""
        return not self._num_received or self._error is not None

    async def wait_accepted(self) -> None:
        """Return as soon as the engine has accepted the request, or has sent a first row.

        Raise as `rows` does if the request ended before that.
        """
        while not (self._accepted or self._rows or self.done):
            await self._wait()
        if self._error is not None and not self._rows:
            raise self._error

    async def rows(self) -> list[ProgressRow]:
        """Return the rows that have come since the last call, waiting for one if there are none.

        When there are no more rows, raise `Overloaded`, `InvalidRequest` or `Unavailable` if the engine refused the
        request, and `EngineFailure` if the engine was lost. Do not call this after each sample has had its last row or
        was aborted.
        """
        if not self._rows and not self._num_received:
            raise RuntimeError(f"{self!r} has ended")
        while not self._rows and self._error is None:
            await self._wait()
        if not self._rows and self._error is not None:
            raise self._error
        rows, self._rows = self._rows, []
        return rows

    def abort(self, sample: int) -> None:
        """End one sample at the engine, and drop its rows. Idempotent."""
        if sample in self._num_received and self._error is None:
            del self._num_received[sample]
            self._rows = [row for row in self._rows if row.sample != sample]
            self._send(Abort(self.id, sample))

    def accept(self) -> None:
        """Note that the engine has queued the request."""
        self._accepted = True
        self._wake()

    def add(self, row: ProgressRow) -> None:
        """Keep a row for the reader, unless the sample has ended or its tokens have come before."""
        num_received = self._num_received.get(row.sample)
        if num_received is None or self._error is not None:
            return
        if row.tokens and row.position < num_received:
            return
        if row.tokens and row.position > num_received:
            self._send(Abort(self.id))
            self.fail(EngineFailure(f"tokens {num_received} to {row.position - 1} of the output were lost"))
            return
        if row.finish_reason is None:
            self._num_received[row.sample] = num_received + len(row.tokens)
        else:
            del self._num_received[row.sample]
        self._rows.append(row)
        self._wake()

    def fail(self, error: QuireError) -> None:
        """End the request with `error`, which the reader gets after the rows that have come. Idempotent."""
        if not self.done:
            self._error = error
            self._wake()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
