"""`FakeListener`: a listener without sockets. Peers are names, connections are numbers, and sent messages are kept."""

from collections import Counter, deque
from typing import Any, cast

from msgspec import Struct

from shared.protocol import encode
from shared.transport import DropReason, Listener, Message, PeerGone, PeerSlow


class FakeMessage:
    """Like `shared.transport.Message`."""

    def __init__(self, peer: bytes, body: bytes, fd: int, pid: int | None) -> None:
        self.peer, self.body, self.fd, self.pid, self.size = peer, body, fd, pid, len(body)


class FakeMonitor:
    """Like `shared.transport.Monitor`."""

    def __init__(self) -> None:
        self.socket = object()
        self.connected: set[int] = set()
        self.disconnected: list[int] = []

    def drain(self) -> list[int]:
        disconnected, self.disconnected = self.disconnected, []
        return disconnected


class FakeListener:
    """Like `shared.transport.Listener`. Sends to the peers in `slow` and `unreachable` fail."""

    def __init__(self) -> None:
        self.monitor = FakeMonitor()
        self.dropped: Counter[DropReason] = Counter()
        self.socket = object()  # a poller needs one
        self.inbox: deque[FakeMessage] = deque()
        self.sent: list[tuple[bytes, bytes]] = []
        self.slow: set[bytes] = set()
        self.unreachable: set[bytes] = set()

    def receive(self) -> Message | None:
        return cast(Message, self.inbox.popleft()) if self.inbox else None

    def reject(self, message: Message) -> None:
        self.dropped[DropReason.MALFORMED] += 1

    def reaches(self, peer: bytes) -> bool:
        return peer not in self.unreachable

    def send(self, peer: bytes, body: bytes) -> None:
        if peer in self.slow:
            raise PeerSlow
        if peer in self.unreachable:
            raise PeerGone
        self.sent.append((peer, body))

    def hear(self, peer: bytes, content: Struct | bytes, fd: int, pid: int | None = None) -> None:
        """Put a message that a peer sent over connection `fd` into the inbox."""
        self.monitor.connected.add(fd)
        body = content if isinstance(content, bytes) else encode(content)
        self.inbox.append(FakeMessage(peer, body, fd, pid))

    def disconnect_floods(self) -> None:
        """Do nothing, since no peer floods this listener."""

    def leave(self, fd: int) -> None:
        """End a connection."""
        self.monitor.connected.discard(fd)
        self.monitor.disconnected.append(fd)

    def take(self, peer: bytes, decode: Any) -> list[Any]:
        """Return the decoded messages that were sent to a peer since the last call."""
        messages = [decode(body) for to, body in self.sent if to == peer]
        self.sent = [(to, body) for to, body in self.sent if to != peer]
        return messages


def as_listener(fake: FakeListener) -> Listener:
    return cast(Listener, fake)
