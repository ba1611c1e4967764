"""The sockets between Quire's processes. Every ZeroMQ option that Quire sets is set in this file.

A scheduler listens on a ROUTER (`listen`). Gateways and workers connect to it with a DEALER (`connect`). A message has
two frames at a ROUTER and one at a DEALER; `shared.protocol` defines their content.

Rules of the file:
- ZeroMQ's own heartbeats are not used. libzmq (4.3.5) aborts the process if it has to write a ping or a pong on a
  connection whose peer left while its input was stopped at the high-water mark. Quire's sockets never ping, and the
  input of a listener over tcp never stops for a peer that does: it is bounded by bytes instead (`UnreadBytes`).
  Heartbeats show who is alive (`shared.heartbeat`); TCP's keepalive and user timeout detect a cut cable.
- Nothing is dropped silently: sends never block, and raise `PeerGone` or `PeerSlow`.
- An identity belongs to one process and one connection. When a peer is gone the socket is closed and a new one
  connected under a new identity, so that no old queue is delivered to a new process. It cannot be guessed, since
  whoever knows it can send heartbeats in its name.
- A disconnected peer is identified by its file descriptor, which the monitor reports and every received frame carries.
  Descriptors are reused, so `Monitor.drain` has to run before a new peer is accepted. And a peer may have left before
  its first message was read, and its descriptor may be another's by then. So `Listener.reaches` must say that it is
  there: it sends an empty message, which receivers ignore (`only_frame`).
- Binding an ipc path twice succeeds in ZeroMQ and steals the connections of the first socket, hence the lock file.
- Over tcp, a listener with keys admits only peers whose keys it knows (`shared.curve`). Without keys, addresses that
  other hosts can reach need the flag --insecure, on both sides. ipc has no keys: its files are for this user only.
- After a failed handshake libzmq either never connects again or does so 50 times a second. So whoever connects closes
  the socket then, and opens a new one after a delay that grows to `MAX_REFUSED_DELAY`.
"""

import fcntl
import ipaddress
import logging
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.curve import ConnectionKeys, ListenerKeys
from shared.errors import ConfigError, ProtocolError
from shared.protocol import MAX_FRAME
from shared.unread import FRAMING, UnreadBytes, end_connection

logger = logging.getLogger(__name__)

HIGH_WATER = 1_000
"""Messages that may wait on either side of a connection before a ROUTER's send raises `PeerSlow`. For a busy gateway
these are the messages of a second or more; a worker never has more than a few."""

DEALER_HIGH_WATER = 20_000
"""Messages that may wait on a DEALER's sending side: enough for a burst of requests, which are one message each."""

HANDSHAKE_MS = 5_000
RECONNECT_MS, RECONNECT_MAX_MS = 20, 1_000
HEARTBEAT_RECONNECT_MAX_MS = 200  # a new scheduler expects heartbeats as soon as its worker has registered

MAX_REFUSED_DELAY = 1.0
"""Maximum seconds between two tries to connect if handshakes fail."""

HANDSHAKE_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not admit this key (--zmq-keys)",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "only one of the two has keys (--zmq-keys), or it is no scheduler",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ended the handshake; if there are keys, they may not match (--zmq-keys)",
}
"""What a failed handshake means to the one that connects. If the listener is quicker, any of them is the last."""

HANDSHAKE_FAILURE_WITHOUT_KEYS = "it ended the handshake: it has died meanwhile, or is no scheduler"
"""What any of them means over ipc, where there are no keys."""

HEARTBEAT_HIGH_WATER = 2
"""Heartbeats that may wait to be sent: old ones are worth nothing."""

KEEPALIVE_S, KEEPALIVE_PROBES = 5, 3
"""Over tcp, an idle connection is probed every KEEPALIVE_S seconds, and ended after KEEPALIVE_PROBES lost probes."""

USER_TIMEOUT_MS = 30_000
"""Milliseconds for which data over tcp may stay unacknowledged. Then the peer counts as dead: the connection ends."""

MAX_MALFORMED = 100
"""Maximum number of messages with a wrong number of frames that one call skips."""

MALFORMED_LIMIT = 20
"""Malformed messages after which a listener ends the connection that they came by. Honest peers send at most one, and
wait for the answer."""

IPC_PATH_MAX = 107  # bytes, of sockaddr_un

HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # or an IPv4 address, or an interface to listen on

S = TypeVar("S", bound="zmq.Socket[Any]")

# as plain numbers, since arithmetic on members of an enum takes longer than a read or a send
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_NOBLOCK_MORE, _MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE), int(zmq.MORE)


class DropReason(Enum):
    """The reasons for which a peer's messages are dropped. The values are labels of metrics."""

    MALFORMED = "malformed"  # it has more or fewer frames than it must, or is no message of the protocol
    UNKNOWN_SENDER = "unknown_sender"  # its sender did not introduce itself, or was given up
    UNEXPECTED = "unexpected"  # nothing waits for it, or it names a request that its sender does not have
    NOT_ADMITTED = "not_admitted"  # it introduces a peer that cannot be used, or one too many


class PeerGone(Exception):
    """There is no connection to the peer. The loop that sends handles it."""


class PeerSlow(Exception):
    """The peer does not read: the queue to it is full. The loop that sends handles it."""


class Message(NamedTuple):
    """A message that a ROUTER received."""

    peer: bytes  # identity of the sender
    frame: zmq.Frame

    @property
    def body(self) -> bytes:
        return self.frame.bytes

    @property
    def size(self) -> int:
        """Return the length of the body in bytes, without copying it."""
        return len(self.frame)

    @property
    def fd(self) -> int:
        """Return the file descriptor of the connection that the message came by."""
        return int(self.frame.get(zmq.SRCFD))

    @property
    def pid(self) -> int | None:
        """Return the process id of the sender, as the kernel reports it for ipc; None over tcp."""
        try:
            address = str(self.frame.get("Peer-Address"))  # host:uid:gid:pid over ipc, an IP address over tcp
        except zmq.ZMQError:
            return None
        parts = address.split(":")
        return int(parts[3]) if len(parts) == 4 and parts[3].isdecimal() else None


class Monitor:
    """The connections of one socket. `socket` may be polled for changes.

    It must be created before the socket is bound or connected, since it does not see earlier events.
    """

    def __init__(self, watched: "zmq.Socket[Any]", address: str) -> None:
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        if watched.type != zmq.ROUTER:  # a listener needs no reason why a stranger was refused
            for failure in HANDSHAKE_FAILURES:
                events |= failure
        self._watched = watched
        self._may_have_keys = address.startswith("tcp://")
        self.socket: zmq.Socket[Any] = watched.get_monitor_socket(events)
        self._reader: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket.underlying)  # reads at once on any event loop
        self.connected: set[int] = set()  # descriptors
        self.refusal = ""  # why the last handshake failed; of use only to the side that connects
        self.refused = 0  # connections that ended without a message; other threads may read it
        self._heard: set[int] = set()  # descriptors by which messages have come

    def note_message(self, fd: int) -> None:
        """Note that a message came by a connection, which may have ended since then."""
        if fd in self.connected or has_message(self._reader):  # a new connection's event comes before its messages
            self._heard.add(fd)

    def drain(self) -> list[int]:
        """Return the descriptors of the connections that ended since the last call."""
        disconnected: list[int] = []
        while has_message(self._reader):
            event = parse_monitor_message(self._reader.recv_multipart(_NOBLOCK))
            kind, fd = event["event"], event["value"]
            if kind in HANDSHAKE_FAILURES:
                self.refusal = HANDSHAKE_FAILURES[kind] if self._may_have_keys else HANDSHAKE_FAILURE_WITHOUT_KEYS
            elif kind == zmq.EVENT_DISCONNECTED:
                self.connected.discard(fd)
                self.refused += fd not in self._heard
                self._heard.discard(fd)
                disconnected.append(fd)
            else:
                self.connected.add(fd)
        return disconnected

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        self.socket.close(linger=0)


class Listener:
    """A bound ROUTER with its monitor. `unread`, if given, bounds the unread bytes of its peers."""

    def __init__(self, socket: "zmq.Socket[bytes]", monitor: Monitor, unread: UnreadBytes | None = None) -> None:
        self.socket = socket
        self.monitor = monitor
        self.dropped: Counter[DropReason] = Counter()  # those who read messages count here; other threads may read it
        self._unread = unread
        self._malformed: dict[int, tuple[bytes, int]] = {}  # the last peer to send some by a descriptor, and how many

    def receive(self) -> Message | None:
        """Return the next message, or None if there is none. Messages of more or fewer than two frames are dropped."""
        for _ in range(MAX_MALFORMED):
            if not has_message(self.socket):
                return None
            frames = receive_frames(self.socket)
            self.monitor.note_message(int(frames[-1].get(zmq.SRCFD)))
            if self._unread is not None:
                self._unread.count(frames)
            if len(frames) == 2:
                return Message(frames[0].bytes, frames[1])
            self._reject(frames[0].bytes, int(frames[-1].get(zmq.SRCFD)))
        return None

    def reject(self, message: Message) -> None:
        """Count a malformed message, and end the connection of a peer that sends nothing else."""
        self._reject(message.peer, message.fd)

    def _reject(self, peer: bytes, fd: int) -> None:
        self.dropped[DropReason.MALFORMED] += 1
        sender, number = self._malformed.get(fd, (peer, 0))
        number = number + 1 if sender == peer else 1
        self._malformed[fd] = (peer, number)
        # Whoever has sent this may have left, and the descriptor be another's by now: then it cannot be reached.
        if number % MALFORMED_LIMIT == 0 and fd in self.monitor.connected and self.reaches(peer):
            logger.warning("%s sends nonsense: its connection (%d) is ended", printable_identity(peer), fd)
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                end_connection(connection)

    def disconnect_floods(self) -> None:
        """End the connections of peers that have too much unread. Must be called often; it is cheap."""
        if self._unread is not None:
            for fd in self._unread.disconnect_floods(self.monitor.connected):
                logger.warning("a peer sends faster than Quire reads: its connection (%d) is ended", fd)

    def reaches(self, peer: bytes) -> bool:
        """Return whether there is a connection to a peer, by sending an empty message."""
        self.socket.getsockopt(zmq.EVENTS)  # lets libzmq see which connections have ended, which `send` does seldom
        try:
            self.send(peer, b"")
        except PeerGone:
            return False
        except PeerSlow:
            return True
        return True

    def send(self, peer: bytes, body: bytes) -> None:
        """Queue a message, or raise PeerGone or PeerSlow and queue nothing."""
        try:
            self.socket.send(peer, _NOBLOCK_MORE)
            self.socket.send(body, _NOBLOCK)
        except zmq.Again:
            raise PeerSlow(printable_identity(peer)) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGone(printable_identity(peer)) from None


def has_message(socket: "zmq.Socket[Any]") -> bool:
    """Return whether a message can be read at once. The exception of a read that finds none takes three times as long.

    This also lets the socket see what its I/O thread reports, so that its descriptor is readable again for new reports.
    """
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def receive_frames(socket: "zmq.Socket[Any]") -> list[zmq.Frame]:
    """Return the frames of the next message, which must be there.

    `recv_multipart` takes twice as long: it asks the socket behind each frame whether there are more.
    """
    frames: list[zmq.Frame] = []
    while not frames or frames[-1].get(_MORE):
        frames.append(socket.recv(_NOBLOCK, copy=False))
    return frames


def only_frame(frames: Sequence[zmq.Frame]) -> bytes:
    """Return the body of a message that a DEALER received; an empty one is to be ignored.

    Raise `ProtocolError` unless it has one frame.
    """
    if len(frames) != 1:
        raise ProtocolError(f"a message has one frame, and this one {len(frames)}")
    return frames[0].bytes


def new_identity(role: str) -> bytes:
    """Return a name for a socket that was never used before: role-pid-nonce."""
    return f"{role}-{os.getpid()}-{secrets.token_hex(8)}".encode()


def printable_identity(peer: bytes) -> str:
    """Return an identity for logs, escaped: a hostile peer must not write log lines of its own."""
    return "".join(chr(byte) if 0x20 < byte < 0x7F else f"\\x{byte:02x}" for byte in peer)


@contextmanager
def listen(
    context: "zmq.Context[Any]",
    address: str,
    *,
    role: str = "",
    keys: ListenerKeys | None = None,
    insecure: bool = False,
    linger_ms: int = 0,
) -> Iterator[Listener]:
    """Bind `address` for the time of the block. Raise ConfigError if that fails.

    With `keys`, only peers of `role` are admitted over tcp, by the `authentication` of the context. At the end, wait at
    most `linger_ms` for the last messages to be sent.
    """
    check_exposure(address.replace("tcp://*:", "tcp://0.0.0.0:", 1), protected=insecure or keys is not None)
    with _locked(address), _socket(context, zmq.ROUTER, address) as socket:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None and address.startswith("tcp://"):
            _use_keys(socket, keys)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.ZAP_DOMAIN, role)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # admit nobody if there is no authentication
        monitor = Monitor(socket, address)
        try:
            _bind(socket, address)
            yield Listener(socket, monitor, UnreadBytes() if address.startswith("tcp://") else None)
        finally:
            monitor.close()
            socket.close(linger=linger_ms)


@contextmanager
def connect(
    context: "zmq.Context[S]", address: str, identity: bytes, keys: ConnectionKeys | None = None
) -> "Iterator[tuple[S, Monitor]]":
    """Yield a DEALER that keeps trying to connect to `address`, and its monitor, for the time of the block.

    Raise `ConfigError` if ZeroMQ cannot even try.
    """
    check_address(address)
    with _socket(context, zmq.DEALER, address) as socket:
        socket.setsockopt(zmq.IDENTITY, identity)
        _use_connection_keys(socket, address, keys)
        monitor = Monitor(socket, address)
        try:
            _connect(socket, address)
            yield socket, monitor
        finally:
            monitor.close()


@contextmanager
def connect_for_heartbeats(context: "zmq.Context[S]", address: str, keys: ConnectionKeys | None = None) -> Iterator[S]:
    """Yield a DEALER without an identity, which sends to `address` while it is connected and queues nothing else."""
    with _socket(context, zmq.DEALER, address) as socket:
        _use_connection_keys(socket, address, keys)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, HEARTBEAT_HIGH_WATER)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, HEARTBEAT_RECONNECT_MAX_MS)
        _connect(socket, address)
        yield socket


def check_address(address: str) -> None:
    """Raise ConfigError unless `address` is a valid ipc or tcp address: ZeroMQ can connect to it if somebody is there.

    A host over tcp is a name, an IPv4 address, or an IPv6 address in brackets.
    """
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path:
            raise ConfigError(f"{address}: needs a path behind ipc://")
        if len(os.fsencode(path)) > IPC_PATH_MAX:
            raise ConfigError(f"{address}: the path is longer than {IPC_PATH_MAX} bytes, the limit of the system")
    elif address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        valid_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
        if not valid_port or not (HOST_NAME.fullmatch(host) or _is_bracketed_ipv6(host)):
            raise ConfigError(f"{address}: must be tcp://host:port")
    else:
        raise ConfigError(f"{address}: must begin with ipc:// or tcp://")


def check_exposure(address: str, *, protected: bool) -> None:
    """Raise ConfigError if `address` is invalid, or is tcp between hosts and not `protected`, by keys or on purpose."""
    check_address(address)
    if not address.startswith("tcp://") or protected:
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host != "localhost" and not _is_loopback(host):
        raise ConfigError(
            f"{address} is open to other hosts: needs --zmq-keys, or --insecure to do without encryption and "
            "authentication"
        )


@contextmanager
def _socket(context: "zmq.Context[S]", socket_type: int, address: str) -> "Iterator[S]":
    socket = context.socket(socket_type)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, DEALER_HIGH_WATER if socket_type == zmq.DEALER else HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if address.startswith("tcp://"):
        socket.setsockopt(zmq.IPV6, address.startswith("tcp://["))
        _set_tcp_options(socket, socket_type)
    try:
        yield socket
    finally:
        socket.close(linger=None)  # None keeps the linger time of the option above or of an earlier close


def _use_connection_keys(socket: "zmq.Socket[Any]", address: str, keys: ConnectionKeys | None) -> None:
    if keys is not None and address.startswith("tcp://"):
        _use_keys(socket, keys)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.scheduler)


def _use_keys(socket: "zmq.Socket[Any]", keys: ConnectionKeys | ListenerKeys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + FRAMING)  # it counts what encryption adds


def _set_tcp_options(socket: "zmq.Socket[Any]", socket_type: int) -> None:
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, USER_TIMEOUT_MS)
    if socket_type == zmq.ROUTER:
        socket.setsockopt(zmq.RCVHWM, 0)  # unlimited, so that input never stops: see the rules above


def _bind(socket: "zmq.Socket[Any]", address: str) -> None:
    mask = os.umask(0o077)  # the socket file is for this user only
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot bind {address}: {error.strerror}") from error
    finally:
        os.umask(mask)


def _connect(socket: "zmq.Socket[Any]", address: str) -> None:
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {address}: {error.strerror}") from error


def _is_bracketed_ipv6(host: str) -> bool:
    try:
        return host.startswith("[") and host.endswith("]") and bool(ipaddress.IPv6Address(host[1:-1]))
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _locked(address: str) -> Iterator[None]:
    """Hold the lock file beside an ipc path for the time of the block; then remove it and the socket's file."""
    path = address.removeprefix("ipc://")
    if not address.startswith("ipc://") or path.startswith("@"):  # the kernel guards tcp and abstract names
        yield
        return
    lock = _lock(Path(path + ".lock"), address)
    try:
        yield
    finally:
        Path(path).unlink(missing_ok=True)
        Path(path + ".lock").unlink(missing_ok=True)
        os.close(lock)


def _lock(path: Path, address: str) -> int:
    """Return a descriptor that holds the lock on `path`. Retry if the file was unlinked between opening and locking."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot bind {address}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"cannot bind {address}: another process is listening there") from None
        os.close(fd)
