"""Gateways: who they are, whose requests are whose, and what is on its way to them. No queue of requests.

A gateway names its requests by ids of its own; the core knows them by numbers that are unique over the scheduler's
life. `_owners` maps the latter to the former, holds what is unfinished and nothing else, and is empty at idle.

What a gateway cannot take at the moment waits here: news of later steps are merged into the same message, so that
a gateway that does not read for a while is behind but loses nothing. One that is gone, or stuck or silent for
`GATEWAY_TIMEOUT` seconds, has its requests aborted.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec
from msgspec import Struct

from shared.errors import ProtocolError
from shared.liveness import GATEWAY_TIMEOUT, Liveness
from shared.protocol import (
    VERSION,
    Abort,
    Accepted,
    Heartbeat,
    Hello,
    Progress,
    ProgressRow,
    Refusal,
    Refused,
    Status,
    Submit,
    UnknownGateway,
    Welcome,
    decode_from_gateway,
    decode_submit_id,
    encode,
)
from shared.transport import Listener, Message, PeerGone, PeerSlow, printable_identity

log = logging.getLogger(__name__)

SKEW = 10.0
"""Seconds by which a request's arrival may lie before it came here: a gateway's clock must not put its requests before
or behind all others'."""

TURN_BYTES = 4 * 1024 * 1024
"""Bytes of gateways' messages after which no more are read in one turn: some milliseconds' work."""

ROWS = 4096
"""Rows in one message at most: far below the limit of a frame, whatever log-probabilities they carry."""


class Gateway:
    """One gateway on its connection."""

    def __init__(self, name: bytes, fd: int, now: float) -> None:
        self.name = name
        self.fd = fd
        self.liveness = Liveness(GATEWAY_TIMEOUT, now, turn_timeout=GATEWAY_TIMEOUT)
        self.stuck_since: float | None = None
        self.ids: dict[int, int] = {}  # its ids to the core's
        self.outbox: deque[bytes] = deque()
        self.accepted: list[int] = []  # its ids, to be sent behind the outbox
        self.rows: list[ProgressRow] = []  # to be sent behind those

    @property
    def unsent(self) -> bool:
        """Return whether something waits to be sent."""
        return bool(self.outbox or self.accepted or self.rows)

    def next_message(self) -> bytes:
        """Return what is to be sent next, which stays the first of the outbox; call it only if there is something."""
        if not self.outbox and self.accepted:
            self.outbox.append(encode(Accepted(self.accepted)))
            self.accepted = []
        elif not self.outbox:
            self.outbox.append(encode(Progress(self.rows[:ROWS])))
            del self.rows[:ROWS]
        return self.outbox[0]

    def __repr__(self) -> str:
        return f"{printable_identity(self.name)} with {len(self.ids)} requests"


class Owner(Struct):
    """To whom a request of the core belongs."""

    gateway: Gateway
    id: int  # the gateway's
    unfinished: int  # samples


class Gateways:
    """The gateways' side of the scheduler. `short_of_cpu`: whether the scheduler is short of CPU."""

    def __init__(self, listener: Listener, short_of_cpu: Callable[[float], bool]) -> None:
        self._listener = listener
        self._short_of_cpu = short_of_cpu
        self._peers: dict[bytes, Gateway] = {}
        self._owners: dict[int, Owner] = {}  # by the core's ids
        self._next_id = itertools.count()
        self._welcome: bytes | None = None
        self._orphans: list[Abort] = []

    @property
    def unfinished(self) -> list[int]:
        """The core's ids of all requests that have not ended."""
        return list(self._owners)

    @property
    def flushed(self) -> bool:
        """Nothing waits to be sent."""
        return not any(gateway.unsent for gateway in self._peers.values())

    def receive(self, most: int, now: float) -> list[Submit | Abort]:
        """What gateways want of the core, under the core's ids; at most so many messages are read."""
        self._notice_gone()
        wanted: list[Submit | Abort] = []
        size = 0
        for _ in range(most):
            if size > TURN_BYTES or (message := self._listener.receive()) is None:
                break
            size += message.size
            request = self._handle(message, now)
            if request is not None:
                wanted.append(request)
        return wanted

    def orphans(self) -> list[Abort]:
        """Aborts of what belonged to gateways that were given up since the last call."""
        orphans, self._orphans = self._orphans, []
        return orphans

    def accept(self, id: int) -> None:
        """Tell the gateway with the next `flush` that the core has taken a request."""
        owner = self._owners.get(id)
        if owner is not None:
            owner.gateway.accepted.append(owner.id)

    def refuse(self, refused: Refused) -> None:
        """Pass a refusal of the core on."""
        owner = self._owners.pop(refused.id, None)
        if owner is not None:
            del owner.gateway.ids[owner.id]
            owner.gateway.outbox.append(encode(msgspec.structs.replace(refused, id=owner.id)))

    def deliver(self, rows: Iterable[ProgressRow]) -> None:
        """Note news of the core for those whom they concern; they leave with the next `flush`."""
        for row in rows:
            owner = self._owners.get(row.id)
            if owner is None:
                continue
            owner.gateway.rows.append(msgspec.structs.replace(row, id=owner.id))
            if row.finish_reason is not None:
                owner.unfinished -= 1
                if not owner.unfinished:
                    del self._owners[row.id], owner.gateway.ids[owner.id]

    def welcome(self, welcome: Welcome) -> None:
        """Answer all gateways, those that have come and those that will."""
        self._welcome = encode(welcome)
        for gateway in self._peers.values():
            gateway.outbox.append(self._welcome)

    def status(self, status: Status) -> None:
        """Send a sign of life, except to those who do not take what was sent before."""
        body = encode(status)
        for gateway in self._peers.values():
            if gateway.stuck_since is None:
                gateway.outbox.append(body)

    def flush(self, now: float) -> None:
        """Send what gateways can take."""
        for gateway in list(self._peers.values()):
            if gateway.unsent:
                self._flush(gateway, now)

    def expire(self, now: float) -> None:
        """Give up who is dead by its own signs, or has taken nothing for too long."""
        for gateway in list(self._peers.values()):
            due = float("inf") if gateway.stuck_since is None else gateway.stuck_since + GATEWAY_TIMEOUT
            what = f"has read nothing for {GATEWAY_TIMEOUT:.0f} s"
            if fault := gateway.liveness.failure(now, due=due, missed=what, short_of_cpu=self._short_of_cpu(now)):
                self._give_up(gateway, fault)

    def forgive(self, seconds: float) -> None:
        """The scheduler itself stood still for so long."""
        for gateway in self._peers.values():
            gateway.liveness.forgive(seconds)
            if gateway.stuck_since is not None:
                gateway.stuck_since += seconds

    def _handle(self, message: Message, now: float) -> Submit | Abort | None:
        gateway = self._peers.get(message.peer)
        try:
            content = decode_from_gateway(message.body)
        except ProtocolError as error:
            log.warning("gateway %s: %s", printable_identity(message.peer), error)
            if gateway is not None:
                self._refuse_nonsense(gateway, message.body, error)
            return None
        if isinstance(content, Hello):
            self._greet(message, content, now)
            return None
        if isinstance(content, Heartbeat):
            self._note_beat(content, now)
            return None
        if gateway is None:
            self._turn_away(message.peer)
            return None
        gateway.liveness.note_message(now)
        match content:
            case Submit():
                return self._submit(gateway, content)
            case Abort():
                id = gateway.ids.get(content.id)
                return None if id is None else Abort(id, content.sample)

    def _note_beat(self, beat: Heartbeat, now: float) -> None:
        name = beat.identity.encode()
        if (gateway := self._peers.get(name)) is not None:
            gateway.liveness.note_heartbeat(beat.process, now)
        else:
            self._turn_away(name)

    def _refuse_nonsense(self, gateway: Gateway, body: bytes, error: ProtocolError) -> None:
        """A `Submit` with a value out of its range costs its sender that request, anything else its connection."""
        id = decode_submit_id(body)
        if id is None:
            self._give_up(gateway, "it sent something that is not a message")
        else:
            gateway.outbox.append(encode(Refused(id, Refusal.INVALID, str(error))))

    def _greet(self, message: Message, hello: Hello, now: float) -> None:
        self._notice_gone()  # from here on, a descriptor that is used again means the newcomer
        if message.fd not in self._listener.monitor.connected:
            return  # gone already
        if hello.version != VERSION:
            reason = "gateway %s is not served: it speaks version %d of the protocol, this scheduler version %d"
            log.error(reason, printable_identity(message.peer), hello.version, VERSION)
            return
        for former in [one for one in self._peers.values() if message.fd == one.fd or message.peer == one.name]:
            self._give_up(former, "its connection ended")
        gateway = self._peers[message.peer] = Gateway(message.peer, message.fd, now)
        if self._welcome is not None:
            gateway.outbox.append(self._welcome)
        log.info("gateway %s connected", printable_identity(message.peer))

    def _turn_away(self, peer: bytes) -> None:
        """Tell one who was given up, and may not know it: it must not wait for what never comes."""
        log.debug("something of %s, who is not known (any more)", printable_identity(peer))
        with suppress(PeerGone, PeerSlow):
            self._listener.send(peer, encode(UnknownGateway()))

    def _submit(self, gateway: Gateway, submit: Submit) -> Submit | None:
        if submit.id in gateway.ids:
            refused = Refused(submit.id, Refusal.INVALID, f"request {submit.id} is still running")
            gateway.outbox.append(encode(refused))
            return None
        id = next(self._next_id)
        gateway.ids[submit.id] = id
        self._owners[id] = Owner(gateway, submit.id, submit.n)
        return msgspec.structs.replace(submit, id=id, arrival=_arrival(submit.arrival, time.time()))

    def _flush(self, gateway: Gateway, now: float) -> None:
        while gateway.unsent:
            try:
                self._listener.send(gateway.name, gateway.next_message())
            except PeerSlow:
                gateway.stuck_since = gateway.stuck_since or now
                return
            except PeerGone:
                self._give_up(gateway, "it cannot be reached")
                return
            gateway.outbox.popleft()
            gateway.stuck_since = None

    def _notice_gone(self) -> None:
        gone = set(self._listener.monitor.drain())
        for gateway in [gateway for gateway in self._peers.values() if gateway.fd in gone]:
            self._give_up(gateway, "its connection ended")

    def _give_up(self, gateway: Gateway, reason: str) -> None:
        log.log(logging.WARNING if gateway.ids else logging.INFO, "gateway %r has left: %s", gateway, reason)
        del self._peers[gateway.name]
        for id in gateway.ids.values():
            del self._owners[id]
            self._orphans.append(Abort(id))


def _arrival(said: float, now: float) -> float:
    """Return when a request arrived: the time that its gateway said, within bounds, or `now` if that is 0."""
    return min(max(said, now - SKEW), now) if said else now
