"""`Link`: a gateway's connection to one engine, and the attempts that run there.

One task a link, `run`, which owns the socket: it reads a bounded number of messages a turn, so that the event loop
stays with the clients, and hands them to the attempts. When the engine is gone (its connection ended, it is dead by its
own signs, it takes no more messages, or it has given this gateway up), all open attempts fail, the socket is closed
with whatever is still queued in it, and a new one is opened under a new identity.
"""

import asyncio
import itertools
import logging
import time
from array import array
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from msgspec import Struct

from services.gateway.attempt import Attempt
from shared.errors import EngineFailure, InvalidRequest, Overloaded, ProtocolError, QuireError, Unavailable
from shared.liveness import GATEWAY_TIMEOUT, Liveness
from shared.protocol import (
    VERSION,
    Abort,
    Accepted,
    Hello,
    Progress,
    Refusal,
    Refused,
    Sampling,
    Status,
    Submit,
    UnknownGateway,
    Welcome,
    decode_to_gateway,
    encode,
    pack_tokens,
)
from shared.transport import Monitor, connect, new_identity, printable_identity

log = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between two looks at whether the engine is late, at most."""

FRESH = 2.0
"""Seconds for which a `Status` counts."""

PATIENCE = 5.0
"""Seconds of silence after which an engine is taken for dead, unless it is excused; it speaks four times a second."""

PAUSE = 0.05
"""Seconds before a new connection is tried."""

MESSAGES = 64
"""Messages read before other tasks get their turn."""


class Link:
    """One engine as its gateway sees it. `short_of_cpu`: whether this process is short of CPU."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, text: str, short_of_cpu: Callable[[float], bool]
    ) -> None:
        self.address = address
        self.welcome: Welcome | None = None  # of the present connection
        self.unusable = ""  # why the engine of the present connection is not used
        self._text = text
        self.status: Status | None = None
        self._context = context
        self._short_of_cpu = short_of_cpu
        self._identity = ""  # of the present connection
        self._liveness = Liveness(PATIENCE, 0.0)  # the engine's, since the beginning of the connection
        self._told = 0.0  # when `status` came
        self._since = 0  # submitted since then
        self._ids = itertools.count()
        self._attempts: dict[int, Attempt] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._lost = ""  # why the present connection is of no use any more

    def known_as(self) -> str:
        """The name by which the engine knows this gateway; empty while it has not shown that it does."""
        return self._identity if self.status is not None else ""

    @property
    def ready(self) -> bool:
        """The engine makes steps and takes requests, by its own recent word."""
        status = self.status
        if self.welcome is None or status is None or time.monotonic() - self._told > FRESH:
            return False
        return status.ready and not status.draining

    @property
    def draining(self) -> bool:
        return self.status is not None and self.status.draining

    @property
    def load(self) -> int:
        """Sequences there, as far as is known."""
        snapshot = self.status.snapshot if self.status else None
        return self._since + (snapshot.running + snapshot.waiting if snapshot else 0)

    @property
    def name(self) -> str:
        return self.welcome.engine if self.welcome else self.address

    def submit(
        self, tokens: "array[int]", sampling: Sampling, n: int, priority: int, samples_before: int = 0
    ) -> Attempt:
        """Start a request."""
        attempt = Attempt(next(self._ids), n, self.name, self._send)
        self._attempts[attempt.id] = attempt
        self._since += n
        self._send(
            Submit(
                id=attempt.id,
                tokens=pack_tokens(tokens),
                prompt_len=len(tokens),
                sampling=sampling,
                n=n,
                priority=priority,
                arrival=time.time(),
                samples_before=samples_before,
            )
        )
        return attempt

    def leave(self, attempt: Attempt) -> None:
        """Nobody waits for it any more: end what is unfinished."""
        if self._attempts.pop(attempt.id, None) is not None and not attempt.done:
            self._send(Abort(attempt.id))

    async def run(self) -> None:
        """Keep a connection until cancelled. However one ends, the attempts that ran on it fail."""
        while True:
            reason = "the gateway is shutting down"
            try:
                reason = "the engine was lost: " + await self._connection()
                log.warning("engine at %s: %s (%d requests)", self.address, reason, len(self._attempts))
            finally:
                self._fail_all(reason)
            await asyncio.sleep(PAUSE)

    async def _connection(self) -> str:
        """One connection from its beginning to its end; says why it ended."""
        name = new_identity("gateway")
        with connect(self._context, self.address, name) as (socket, monitor):
            self._socket, self._identity, self._lost = socket, printable_identity(name), ""
            self._liveness = Liveness(PATIENCE, time.monotonic())
            try:
                self._send(Hello(VERSION, printable_identity(name)))
                return await self._pump(socket, monitor)
            finally:
                self._socket = self.welcome = self.status = None
                self.unusable = ""

    async def _pump(self, socket: zmq.asyncio.Socket, monitor: Monitor) -> str:
        """Read until the engine is gone; says why."""
        reader: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)  # reads at once, between two polls
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor.socket, zmq.POLLIN)
        turned = time.monotonic()
        while True:
            await poller.poll(int(LOOK * 1000))
            more = self._read(reader)
            if more:
                await asyncio.sleep(0)  # a poll that finds something does not wait
            elif monitor.drain():
                return "its connection ended"
            now, before = time.monotonic(), turned
            turned = now
            if not monitor.connected:
                self._liveness.note_message(now)  # it cannot be silent yet
            if reason := self._fault(now, now - before):
                return reason

    def _fault(self, now: float, still: float) -> str:
        """Return why this connection is of no use any more; empty while it is. `still`: seconds since the last look."""
        if self._lost:
            return self._lost
        if still > GATEWAY_TIMEOUT:
            return f"this gateway stood still for {still:.0f} s, and was given up meanwhile"
        fault = self._liveness.failure(now, short_of_cpu=self._short_of_cpu(now))
        return fault and f"it has been {fault}"

    def _read(self, reader: "zmq.Socket[bytes]") -> bool:
        """Take what has come, up to a bound; whether there may be more."""
        for _ in range(MESSAGES):
            try:
                frames = reader.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                self._take(decode_to_gateway(b"".join(frames)))
            except ProtocolError as error:
                log.error("engine at %s: %s", self.address, error)
                self._lost = "it sent something that is not a message"  # and somebody would wait for what was lost
        return True

    def _take(self, message: Welcome | Accepted | Refused | Progress | Status | UnknownGateway) -> None:
        now = time.monotonic()
        if isinstance(message, UnknownGateway):  # no sign of life, for this gateway has none of its services
            self._lost = "it has given this gateway up"
            return
        self._liveness.note_message(now)
        match message:
            case Progress():
                for row in message.rows:
                    if (attempt := self._attempts.get(row.id)) is not None:
                        attempt.take(row)
            case Accepted():
                for id in message.ids:
                    if (attempt := self._attempts.get(id)) is not None:
                        attempt.accept()
            case Refused():
                if (attempt := self._attempts.get(message.id)) is not None:
                    attempt.fail(_error(message))
            case Status():
                self.status, self._told, self._since = message, now, 0
                self._liveness.note_heartbeat(message.process, now)
            case Welcome() if self._text and message.model.text_digest not in ("", self._text):
                self.unusable = "the engine has loaded another model than this gateway: its files have changed"
                log.error("engine at %s: %s; start both anew", self.address, self.unusable)
            case Welcome():
                self.welcome = message
                log.info("engine %s at %s serves %s", message.engine, self.address, message.model.name)

    def _send(self, message: Struct) -> None:
        if self._socket is None:
            return
        sent: Any = self._socket.send(encode(message), zmq.NOBLOCK)  # done at once, for better or worse
        if isinstance(sent.exception(), zmq.Again):
            self._lost = "it does not read"  # seen by the pump, which gives up the engine and all that runs there

    def _fail_all(self, reason: str) -> None:
        attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            attempt.fail(EngineFailure(reason))


def _error(refused: Refused) -> QuireError:
    match refused.reason:
        case Refusal.QUEUE_FULL:
            return Overloaded(refused.detail, refused.retry_after)
        case Refusal.DRAINING | Refusal.NOT_READY:
            return Unavailable(refused.detail)
        case Refusal.TOO_LONG:
            return InvalidRequest(refused.detail, "prompt")
        case Refusal.INVALID:
            return InvalidRequest(refused.detail)
