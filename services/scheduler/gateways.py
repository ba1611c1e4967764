"""`Gateways`: the connected gateways, their requests, and the messages on the way to them. It has no queue.

A gateway names its requests by ids of its own; the engine knows them by ids that are unique over the scheduler's life.
`_origins` maps the latter to the former. The engine alone knows which requests are unfinished: a request is forgotten
here when its gateway leaves, when the engine refuses it, or with the row after which the engine has none left for it.

Messages that a gateway cannot take at the moment wait here. Rows of later steps are merged into one message, so that a
gateway that does not read for a while is late but loses nothing. The requests of one that is gone, or that is stuck or
silent for `GATEWAY_TIMEOUT` seconds, are aborted.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from shared.errors import ProtocolError
from shared.liveness import GATEWAY_TIMEOUT, Liveness
from shared.log_format import of_requests
from shared.protocol import (
    VERSION,
    Abort,
    Accepted,
    AdapterAnswer,
    AddAdapter,
    Heartbeat,
    Hello,
    PrefixCacheReset,
    Progress,
    ProgressRow,
    Refusal,
    Refused,
    RemoveAdapter,
    ResetPrefixCache,
    Status,
    Submit,
    UnknownGateway,
    Welcome,
    decode_from_gateway,
    decode_submit_id,
    encode,
)
from shared.transport import DropReason, Listener, Message, PeerGone, PeerSlow, printable_identity

logger = logging.getLogger(__name__)

MAX_CLOCK_SKEW = 10.0
"""Maximum seconds between the arrival that a gateway claims for a request and its arrival here. A gateway with a wrong
clock must not put its requests before or behind all others."""

MAX_RESUMED_AGE = 86_400.0
"""The same for a request that an engine has accepted before: it keeps its place in the queue, and streams last long."""

MAX_TURN_BYTES = 4 * 1024 * 1024
"""Bytes of gateways' messages after which no more are read in one turn, which take some milliseconds."""

MAX_GATEWAYS = 1024
"""Gateways that are served at a time. It bounds what a flood of newcomers costs; HAProxy's file knows 64."""

MAX_ROWS = 4096
"""Maximum number of rows in one message, which is far below `MAX_FRAME`, whatever log-probabilities they carry."""


class Gateway:
    """A gateway on its connection."""

    def __init__(self, identity: bytes, fd: int, now: float) -> None:
        self.identity = identity  # of its socket
        self.fd = fd
        self.liveness = Liveness(GATEWAY_TIMEOUT, now, turn_timeout=GATEWAY_TIMEOUT)
        self.stuck_since: float | None = None
        self.ids: dict[int, int] = {}  # the engine's id by the gateway's id
        self.outbox: deque[bytes] = deque()
        self.accepted: list[int] = []  # ids of the gateway, to be sent after the outbox
        self.rows: list[ProgressRow] = []  # to be sent after those

    @property
    def has_unsent(self) -> bool:
        """True if something waits to be sent."""
        return bool(self.outbox or self.accepted or self.rows)

    def next_message(self) -> bytes:
        """Return the message to send next, which stays first in the outbox. Call it only if `has_unsent`."""
        if not self.outbox and self.accepted:
            self.outbox.append(encode(Accepted(self.accepted)))
            self.accepted = []
        elif not self.outbox:
            self.outbox.append(encode(Progress(self.rows[:MAX_ROWS])))
            del self.rows[:MAX_ROWS]
        return self.outbox[0]

    def __repr__(self) -> str:
        return f"{printable_identity(self.identity)} with {len(self.ids)} requests"


class Origin(Struct, frozen=True):
    """The gateway that sent a request, and its id there."""

    gateway: Gateway
    id: int  # of the request, at the gateway
    request_id: str  # that its client sees


class Reset(Struct, frozen=True):
    """A gateway's demand to reset the prefix cache."""

    gateway: Gateway
    id: int  # by which the gateway knows the answer


class AdapterRequest(Struct, frozen=True):
    """A gateway's demand to add or remove an adapter."""

    gateway: Gateway
    message: AddAdapter | RemoveAdapter


GatewayRequest: TypeAlias = Submit | Abort | Reset | AdapterRequest


class Gateways:
    """The gateways' side of the scheduler. `short_of_cpu` tells whether the scheduler is short of CPU."""

    def __init__(self, listener: Listener, short_of_cpu: Callable[[float], bool]) -> None:
        self._listener = listener
        self._short_of_cpu = short_of_cpu
        self._gateways: dict[bytes, Gateway] = {}
        self._origins: dict[int, Origin] = {}  # by the engine's ids
        self._next_id = itertools.count()
        self._welcome: bytes | None = None
        self._orphans: list[Abort] = []

    @property
    def flushed(self) -> bool:
        """True if nothing waits to be sent."""
        return not any(gateway.has_unsent for gateway in self._gateways.values())

    def receive(self, max_messages: int, now: float) -> list[GatewayRequest]:
        """Read at most `max_messages`. Return what they ask of the engine, with requests under the engine's ids."""
        self._drop_disconnected()
        requests: list[GatewayRequest] = []
        size = 0
        for _ in range(max_messages):
            if size > MAX_TURN_BYTES or (message := self._listener.receive()) is None:
                break
            size += message.size
            request = self._handle(message, now)
            if request is not None:
                requests.append(request)
        return requests

    def take_orphans(self) -> list[Abort]:
        """Return aborts of the requests whose gateways were given up since the last call."""
        orphans, self._orphans = self._orphans, []
        return orphans

    def accept(self, id: int) -> None:
        """Queue the news for its gateway that the engine has accepted a request."""
        origin = self._origins.get(id)
        if origin is not None:
            origin.gateway.accepted.append(origin.id)

    def confirm(self, reset: Reset) -> None:
        """Queue the news for its gateway that the prefix cache was reset."""
        reset.gateway.outbox.append(encode(PrefixCacheReset(reset.id)))

    def answer_adapter(self, request: AdapterRequest, error: str) -> None:
        """Queue the answer for its gateway: why the adapters were not changed, or an empty text if they were."""
        request.gateway.outbox.append(encode(AdapterAnswer(request.message.id, error)))

    def refuse(self, refused: Refused) -> None:
        """Forget a request that the engine refused, and queue the refusal for its gateway."""
        origin = self._origins.get(refused.id)
        if origin is not None:
            self._forget(refused.id)
            origin.gateway.outbox.append(encode(replace(refused, id=origin.id)))

    def deliver(self, rows: Iterable[ProgressRow], unfinished: Container[int]) -> None:
        """Queue rows for the gateways of their requests, to be sent by the next `flush`.

        `unfinished` holds the engine's ids of the requests for which more rows will come.
        """
        ended = []
        for row in rows:
            origin = self._origins.get(row.id)
            if origin is None:
                continue
            origin.gateway.rows.append(replace(row, id=origin.id))
            if row.finish_reason is not None and row.id not in unfinished:
                ended.append(row.id)
        for id in dict.fromkeys(ended):  # after the loop, since the last rows of several samples may come together
            self._forget(id)

    def welcome(self, welcome: Welcome) -> None:
        """Queue the answer to `Hello` for the gateways that are connected, and for those that will be."""
        self._welcome = encode(welcome)
        for gateway in self._gateways.values():
            gateway.outbox.append(self._welcome)

    def status(self, status: Status) -> None:
        """Queue a status for all gateways that are not stuck."""
        body = encode(status)
        for gateway in self._gateways.values():
            if gateway.stuck_since is None:
                gateway.outbox.append(body)

    def flush(self, now: float) -> None:
        """Send what gateways can take."""
        for gateway in list(self._gateways.values()):
            if gateway.has_unsent:
                self._flush(gateway, now)

    def expire(self, now: float) -> None:
        """Give up each gateway that is dead, or has read nothing for too long."""
        for gateway in list(self._gateways.values()):
            due = float("inf") if gateway.stuck_since is None else gateway.stuck_since + GATEWAY_TIMEOUT
            missed = f"has read nothing for {GATEWAY_TIMEOUT:.0f} s"
            if reason := gateway.liveness.failure(now, due=due, missed=missed, short_of_cpu=self._short_of_cpu(now)):
                self._give_up(gateway, reason)

    def postpone(self, seconds: float) -> None:
        """Move all deadlines by the seconds for which the scheduler itself stood still."""
        for gateway in self._gateways.values():
            gateway.liveness.postpone(seconds)
            if gateway.stuck_since is not None:
                gateway.stuck_since += seconds

    def _handle(self, message: Message, now: float) -> GatewayRequest | None:
        gateway = self._gateways.get(message.peer)
        try:
            content = decode_from_gateway(message.body)
        except ProtocolError as error:
            logger.warning("gateway %s: %s", printable_identity(message.peer), error)
            self._handle_undecodable(gateway, message, error)
            return None
        if isinstance(content, Hello):
            self._handle_hello(message, content, now)
            return None
        if isinstance(content, Heartbeat):
            self._handle_heartbeat(content, now)
            return None
        if gateway is None:
            self._reject_unknown(message.peer)
            return None
        gateway.liveness.note_message(now)
        match content:
            case Submit():
                return self._submit(gateway, content)
            case Abort():
                return self._abort(gateway, content)
            case ResetPrefixCache():
                return Reset(gateway, content.id)
            case AddAdapter() | RemoveAdapter():
                return AdapterRequest(gateway, content)

    def _handle_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        identity = heartbeat.identity.encode()
        if (gateway := self._gateways.get(identity)) is not None:
            gateway.liveness.note_heartbeat(heartbeat.process, now)
        else:
            self._reject_unknown(identity)

    def _handle_undecodable(self, gateway: Gateway | None, message: Message, error: ProtocolError) -> None:
        """Refuse a `Submit` with a value out of its range; give up the sender of anything else."""
        if gateway is not None and (id := decode_submit_id(message.body)) is not None:
            self._drop(DropReason.MALFORMED)
            gateway.outbox.append(encode(Refused(id, Refusal.INVALID, str(error))))
            return
        self._listener.reject(message)
        if gateway is not None:
            self._give_up(gateway, "it sent something that is not a message")

    def _handle_hello(self, message: Message, hello: Hello, now: float) -> None:
        self._drop_disconnected()  # first, since the newcomer may have the descriptor of one
        if message.fd not in self._listener.monitor.connected or not self._listener.reaches(message.peer):
            self._drop(DropReason.UNKNOWN_SENDER)
            return  # the connection has ended meanwhile
        if hello.version != VERSION:
            self._drop(DropReason.NOT_ADMITTED)
            reason = "gateway %s is not served: it speaks version %d of the protocol, this scheduler version %d"
            logger.error(reason, printable_identity(message.peer), hello.version, VERSION)
            return
        if (former := self._gateways.get(message.peer)) is not None:
            self._give_up(former, "it begins anew")
        if len(self._gateways) >= MAX_GATEWAYS:
            self._drop(DropReason.NOT_ADMITTED)
            logger.error("gateway %s is not served: there are too many", printable_identity(message.peer))
            return
        gateway = self._gateways[message.peer] = Gateway(message.peer, message.fd, now)
        if self._welcome is not None:
            gateway.outbox.append(self._welcome)
        logger.info("gateway %s connected", printable_identity(message.peer))

    def _reject_unknown(self, peer: bytes) -> None:
        """Tell a gateway that it was given up or never said `Hello`, so that it does not wait for progress."""
        self._drop(DropReason.UNKNOWN_SENDER)
        logger.debug("a message of %s, which is not connected or was given up", printable_identity(peer))
        with suppress(PeerGone, PeerSlow):
            self._listener.send(peer, encode(UnknownGateway()))

    def _submit(self, gateway: Gateway, submit: Submit) -> Submit | None:
        if submit.id in gateway.ids:
            refused = Refused(submit.id, Refusal.INVALID, f"request {submit.id} is still running")
            gateway.outbox.append(encode(refused))
            return None
        id = next(self._next_id)
        gateway.ids[submit.id] = id
        self._origins[id] = Origin(gateway, submit.id, submit.request_id)
        return replace(submit, id=id, arrival=_arrival(submit, time.time()))

    def _abort(self, gateway: Gateway, abort: Abort) -> Abort | None:
        """Return an abort under the engine's id, or None if the gateway has no such request: it has just ended."""
        id = gateway.ids.get(abort.id)
        if id is None:
            self._drop(DropReason.UNEXPECTED)
            return None
        return Abort(id, abort.sample)

    def _drop(self, reason: DropReason) -> None:
        """Count a message that is dropped."""
        self._listener.dropped[reason] += 1

    def _forget(self, id: int) -> None:
        origin = self._origins.pop(id)
        del origin.gateway.ids[origin.id]

    def _flush(self, gateway: Gateway, now: float) -> None:
        while gateway.has_unsent:
            try:
                self._listener.send(gateway.identity, gateway.next_message())
            except PeerSlow:
                gateway.stuck_since = gateway.stuck_since or now
                return
            except PeerGone:
                self._give_up(gateway, "it cannot be reached")
                return
            gateway.outbox.popleft()
            gateway.stuck_since = None

    def _drop_disconnected(self) -> None:
        disconnected = set(self._listener.monitor.drain())
        for gateway in [gateway for gateway in self._gateways.values() if gateway.fd in disconnected]:
            self._give_up(gateway, "its connection ended")

    def _give_up(self, gateway: Gateway, reason: str) -> None:
        extra = of_requests(self._origins[id].request_id for id in gateway.ids.values())
        level = logging.WARNING if gateway.ids else logging.INFO
        logger.log(level, "gateway %r has left: %s", gateway, reason, extra=extra)
        del self._gateways[gateway.identity]
        for id in gateway.ids.values():
            del self._origins[id]
            self._orphans.append(Abort(id))


def _arrival(submit: Submit, now: float) -> float:
    """Return when a request arrived: the time that its gateway claims, within bounds, or `now` if that is 0."""
    earliest = now - (MAX_RESUMED_AGE if submit.resumed else MAX_CLOCK_SKEW)
    return min(max(submit.arrival, earliest), now) if submit.arrival else now
