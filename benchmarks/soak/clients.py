"""`Client`: asks for streams again and again, as impatient, slow and unlucky clients do, and checks what it gets."""

import asyncio
import random
import socket
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import aiohttp
from aiohttp import ClientSession, ClientTimeout, TCPConnector

from benchmarks.soak.answer import Answer, StreamFailed, read_chunks
from benchmarks.soak.tally import Pause, Tally
from benchmarks.soak.workload import StreamRequest

LONGEST = 300.0
"""Seconds after which a stream that has not ended counts as lost."""

RECEIVE_BUFFER = 4096
"""Bytes that wait for a client that reads nothing, so that the gateway soon has to wait for it too."""

MIN_PAUSE = 0.25  # seconds; shorter ones are not kept


class Full(Exception):
    """The server's queue is full, and it says after how many seconds to try again."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after


class Manner(NamedTuple):
    """Says how a client treats a stream: it may stall once, and may leave after some seconds."""

    stall_after: int = 0  # chunks; 0: never
    stall_seconds: float = 0.0
    leave_after: float | None = None


class Outcome(Enum):
    """Tells how one attempt ended."""

    ENDED = auto()
    LEFT = auto()
    REFUSED = auto()
    BROKEN = auto()
    LOST = auto()


class Connection:
    """One client's connection, which reads little ahead. Its `port` is known before anything can go wrong."""

    def __init__(self) -> None:
        self.port = 0
        self.opened = time.monotonic()
        self.responded = False

    def session(self) -> ClientSession:
        connector = TCPConnector(force_close=True, socket_factory=self._socket)
        return ClientSession(connector=connector, timeout=ClientTimeout(total=None), read_bufsize=RECEIVE_BUFFER)

    def _socket(self, address: Any) -> socket.socket:
        result = socket.socket(*address[:3])
        result.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        result.bind(("127.0.0.1", 0))
        self.port = result.getsockname()[1]
        return result


class Broke(Protocol):
    """Tells whether a connection from `port`, opened then, broke because its gateway was killed or frozen."""

    def __call__(self, port: int, opened: float, *, responded: bool) -> bool: ...


class Client:
    """Asks at `url` until `over`. `expected` are the requests, each with its undisturbed answer."""

    def __init__(
        self,
        url: str,
        expected: Sequence[tuple[StreamRequest, Answer]],
        tally: Tally,
        broke: Broke,
        over: Callable[[], bool],
        numbers: random.Random,
    ) -> None:
        self._url = url
        self._expected = expected
        self._tally = tally
        self._broke = broke
        self._over = over
        self._random = numbers

    async def run(self) -> None:
        """Ask for one stream after the other."""
        while not self._over():
            request, undisturbed = self._random.choice(self._expected)
            await self._ask(request, undisturbed)
            await self._wait(0.0, 1.0)

    async def _ask(self, request: StreamRequest, undisturbed: Answer) -> None:
        """Try until the stream has ended, or the client has left it for good."""
        manner = self._manner()
        while True:
            outcome = await self._attempt(request, undisturbed, manner)
            if outcome in (Outcome.ENDED, Outcome.LOST):
                return
            if outcome is Outcome.LEFT:
                if self._random.random() < 0.5:
                    return
                self._tally.came_back += 1
                manner = Manner()
            await self._wait(0.5, 2.0)

    def _manner(self) -> Manner:
        drawn = self._random.random()
        if drawn < 0.2:
            return Manner(leave_after=self._random.uniform(0.0, 8.0))
        if drawn < 0.4:
            return Manner(stall_after=self._random.randint(1, 10), stall_seconds=self._random.uniform(1.0, 6.0))
        return Manner()

    async def _attempt(self, request: StreamRequest, undisturbed: Answer, manner: Manner) -> Outcome:
        connection, answer = Connection(), Answer()
        try:
            async with asyncio.timeout(LONGEST if manner.leave_after is None else manner.leave_after):
                await self._stream(request, connection, answer, manner)
        except Full as full:
            self._tally.refused += 1
            await asyncio.sleep(full.retry_after)
            return Outcome.REFUSED
        except StreamFailed as error:
            return self._lost(request, str(error))
        except TimeoutError:
            if manner.leave_after is None:
                return self._lost(request, f"it did not end within {LONGEST:g} s")
            self._tally.left += 1
            return self._cut_short(request, answer, undisturbed, Outcome.LEFT)
        except aiohttp.ClientError as error:
            if not self._broke(connection.port, connection.opened, responded=connection.responded):
                return self._lost(request, f"its connection broke, and its gateway was alive: {error!r}")
            self._tally.broken += 1
            return self._cut_short(request, answer, undisturbed, Outcome.BROKEN)
        return self._ended(request, answer, undisturbed)

    async def _stream(self, request: StreamRequest, connection: Connection, answer: Answer, manner: Manner) -> None:
        """Read a stream to its end. Raise `Full` or `StreamFailed` if there is none."""
        url, body = self._url + request.path, request.body
        async with connection.session() as session, session.post(url, json=body) as response:
            connection.responded = True
            if response.status == 429:
                raise Full(float(response.headers["Retry-After"]))
            if response.status != 200:
                raise StreamFailed(f"status {response.status}: {await response.text()}")
            await self._read(response, answer, manner)

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, manner: Manner) -> None:
        chunks, last = 0, time.monotonic()
        async for chunk in read_chunks(response):
            now, chunks = time.monotonic(), chunks + 1
            if answer.has_text and now - last > MIN_PAUSE:
                self._tally.pauses.append(Pause(last, now))
            answer.take(chunk)
            if chunks == manner.stall_after:
                self._tally.stalled += 1
                await asyncio.sleep(manner.stall_seconds)
            last = time.monotonic()

    def _ended(self, request: StreamRequest, answer: Answer, undisturbed: Answer) -> Outcome:
        if difference := answer.difference(undisturbed):
            return self._lost(request, difference)
        assert answer.usage is not None  # as in the undisturbed answer
        self._tally.ended += 1
        self._tally.tokens += answer.usage[1]
        return Outcome.ENDED

    def _cut_short(self, request: StreamRequest, answer: Answer, undisturbed: Answer, outcome: Outcome) -> Outcome:
        if answer.begins(undisturbed):
            return outcome
        return self._lost(request, f"its beginning is {answer.choices} instead of that of {undisturbed.choices}")

    def _lost(self, request: StreamRequest, reason: str) -> Outcome:
        self._tally.lost.append(f"{reason}; {request}")
        return Outcome.LOST

    async def _wait(self, minimum: float, maximum: float) -> None:
        await asyncio.sleep(self._random.uniform(minimum, maximum))


async def undisturbed_answer(url: str, request: StreamRequest) -> Answer:
    """Return the answer of a server that has nothing else to do."""
    answer = Answer()
    async with ClientSession() as session, session.post(url + request.path, json=request.body) as response:
        response.raise_for_status()
        async for chunk in read_chunks(response):
            answer.take(chunk)
    return answer
