"""Sockets without a network, for a gateway's connections and a scheduler's listener in one thread.

A `Link` is one connection. Each end sees the other's death late, and what was on the way then may arrive or be lost, as
with ZeroMQ. Nothing sent on one link arrives on another.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import zmq

from shared.transport import DropReason, Message, PeerGone, PeerSlow


class Link:
    """A connection, as the socket that the gateway holds."""

    def __init__(self, identity: bytes, fd: int) -> None:
        self.identity = identity
        self.fd = fd
        self.to_scheduler: deque[bytes] = deque()
        self.to_gateway: deque[bytes] = deque()
        self.attached = False  # whether a scheduler listens, or did
        self.closed_by_gateway = False
        self.closed_by_scheduler = False
        self.readable = 0  # number of messages that the gateway may read now

    def send(self, body: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if not self.closed_by_scheduler:
            self.to_scheduler.append(body)

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return int(zmq.POLLIN) if self.readable and self.to_gateway else 0

    def recv(self, flags: int, copy: bool) -> zmq.Frame:
        assert flags == zmq.NOBLOCK
        assert not copy
        self.readable -= 1
        return zmq.Frame(self.to_gateway.popleft())


class Frame:
    """The body of a message, with the descriptor of its connection."""

    def __init__(self, body: bytes, fd: int) -> None:
        self.bytes = body
        self._fd = fd

    def __len__(self) -> int:
        return len(self.bytes)

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD
        return self._fd


class SimulatedMonitor:
    """The connections of a listener."""

    def __init__(self) -> None:
        self.connected: set[int] = set()
        self.disconnected: list[int] = []

    def drain(self) -> list[int]:
        disconnected, self.disconnected = self.disconnected, []
        return disconnected


class SimulatedListener:
    """A scheduler's socket. `high_water` messages may wait on the way to a gateway."""

    def __init__(self, rng: Random, high_water: int) -> None:
        self.monitor = SimulatedMonitor()
        self.dropped: Counter[DropReason] = Counter()
        self.links: dict[bytes, Link] = {}
        self._rng = rng
        self._high_water = high_water

    def attach(self, link: Link) -> None:
        link.attached = True
        self.links[link.identity] = link
        self.monitor.connected.add(link.fd)

    def detach(self, link: Link) -> None:
        """See that a gateway has closed a connection. The last messages on the way may be lost."""
        del self.links[link.identity]
        self.monitor.connected.discard(link.fd)
        self.monitor.disconnected.append(link.fd)

    def receive(self) -> Message | None:
        waiting = [link for link in self.links.values() if link.to_scheduler]
        if not waiting:
            return None
        link = self._rng.choice(waiting)
        frame: Any = Frame(link.to_scheduler.popleft(), link.fd)
        return Message(link.identity, frame)

    def reject(self, message: Message) -> None:
        """Count a malformed message. No gateway of the simulation sends so many that its connection would be ended."""
        self.dropped[DropReason.MALFORMED] += 1

    def reaches(self, peer: bytes) -> bool:
        return peer in self.links

    def send(self, peer: bytes, body: bytes) -> None:
        if (link := self.links.get(peer)) is None:
            raise PeerGone
        if len(link.to_gateway) >= self._high_water:
            raise PeerSlow
        link.to_gateway.append(body)

    def close(self, *, linger: bool) -> None:
        """End. Of the messages on the way to gateways, all arrive if the socket lingers, else maybe the first ones."""
        for link in self.links.values():
            link.closed_by_scheduler = True
            link.to_scheduler.clear()
            arriving = len(link.to_gateway) if linger else self._rng.randint(0, len(link.to_gateway))
            while len(link.to_gateway) > arriving:
                link.to_gateway.pop()


class LinkMonitor:
    """The monitor of a link, whose handshake never fails."""

    refusal = ""


class Network:
    """The addresses at which schedulers listen, and the links to them."""

    def __init__(self) -> None:
        self._fds = itertools.count(1)
        self._listeners: dict[str, SimulatedListener] = {}
        self._unattached: dict[str, list[Link]] = {}  # links to addresses where nobody listens

    def listen(self, address: str, listener: SimulatedListener) -> None:
        """Listen at an address, and attach the links that wait for that."""
        self._listeners[address] = listener
        for link in self._unattached.pop(address, []):
            if not link.closed_by_gateway:
                listener.attach(link)

    def close(self, address: str, *, linger: bool) -> None:
        """Stop listening at an address."""
        self._listeners.pop(address).close(linger=linger)

    @contextmanager
    def connect(
        self, context: object, address: str, identity: bytes, keys: None
    ) -> Iterator[tuple[Link, SimulatedMonitor]]:
        """Yield a link to an address for the time of the block, in place of `shared.transport.connect`."""
        link = Link(identity, next(self._fds))
        if address in self._listeners:
            self._listeners[address].attach(link)
        else:
            self._unattached.setdefault(address, []).append(link)
        try:
            yield link, LinkMonitor()
        finally:
            link.closed_by_gateway = True
