"""`Attempt`: one `Submit` in flight, and what has come of it. It keeps no sockets and starts no tasks.

Rows carry the absolute position of their tokens: those that a sample has already are dropped, and where some are
missing the attempt fails, since a stream with a hole must not go on.
"""

import asyncio
from collections.abc import Callable

from shared.errors import EngineFailure, QuireError
from shared.protocol import Abort, ProgressRow


class Attempt:
    """News of one request at the engine named `engine`. For one reader."""

    def __init__(self, id: int, n: int, engine: str, send: Callable[[Abort], None]) -> None:
        self.id = id
        self.engine = engine
        self._send = send
        self._lengths = [0] * n  # output tokens that have come, by sample
        self._unfinished = set(range(n))
        self._accepted = False
        self._rows: list[ProgressRow] = []
        self._error: QuireError | None = None
        self._loop = asyncio.get_running_loop()  # kept, since asking for it is a system call
        self._reader: asyncio.Future[None] | None = None  # who waits for news

    def __repr__(self) -> str:
        return f"<Attempt {self.id} at {self.engine} lengths={self._lengths} unfinished={sorted(self._unfinished)}>"

    @property
    def done(self) -> bool:
        """The engine has nothing more to say of it."""
        return not self._unfinished or self._error is not None

    async def accepted(self) -> None:
        """Return as soon as the engine has taken the request, by its own word or by a first row.

        Raises what `rows` does if it never will.
        """
        while not (self._accepted or self._rows or self.done):
            await self._news()
        if self._error is not None and not self._rows:
            raise self._error

    async def rows(self) -> list[ProgressRow]:
        """The rows that have come since the last call; waits if there are none.

        Raises, once the rows before it were taken, `Overloaded`, `InvalidRequest` or `Unavailable` if the engine
        refused the request, and `EngineFailure` if it was lost with it. Must not be called again when each sample has
        had its last row or was aborted.
        """
        if not self._rows and not self._unfinished:
            raise RuntimeError(f"{self!r} has ended")
        while not self._rows and self._error is None:
            await self._news()
        if not self._rows and self._error is not None:
            raise self._error
        rows, self._rows = self._rows, []
        return rows

    def abort(self, sample: int) -> None:
        """End one sample, of which no rows are wanted any more. Idempotent."""
        if sample in self._unfinished and self._error is None:
            self._unfinished.discard(sample)
            self._rows = [row for row in self._rows if row.sample != sample]
            self._send(Abort(self.id, sample))

    def accept(self) -> None:
        """The engine has taken the request into its queue."""
        self._accepted = True
        self._wake()

    def take(self, row: ProgressRow) -> None:
        """Note what the engine said."""
        if row.sample not in self._unfinished or self._error is not None:
            return
        known = self._lengths[row.sample]
        if row.tokens and row.position < known:
            return
        if row.tokens and row.position > known:
            self._send(Abort(self.id))
            self.fail(EngineFailure(f"tokens {known} to {row.position - 1} of the output were lost"))
            return
        self._lengths[row.sample] = known + len(row.tokens)
        if row.finish_reason is not None:
            self._unfinished.discard(row.sample)
        self._rows.append(row)
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Nothing more will come."""
        if not self.done:
            self._error = error
            self._wake()

    async def _news(self) -> None:
        self._reader = self._loop.create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
