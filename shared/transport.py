"""The sockets between Quire's processes: every ZeroMQ option and habit of ours is in this file.

A scheduler listens on a ROUTER (`listen`), gateways and workers dial it with a DEALER (`dial`). Messages are two frames
at a ROUTER, one at a DEALER; what is in them is `shared.protocol`'s.

Rules of the file:
- ZeroMQ's own heartbeats are not used. libzmq (4.3.5) aborts the process if it has to write a ping or a pong on a
  connection whose peer left while its input was stopped at the high-water mark. Ours never pings, and a peer that does
  finds no input that could be stopped: over tcp a listener takes all that comes, and bounds it by bytes (`Intake`).
  Beats show who is alive (`shared.reporter`), TCP's keepalive and user timeout a cut cable.
- Nothing is dropped silently: sends never block, and raise `PeerGone` or `PeerSlow`.
- An identity names one incarnation of a process on one connection. When a peer is gone the socket is closed and a new
  one dialled under a new identity, so that no old queue is delivered to a new process.
- Which peer a disconnection meant is known by the number of its file descriptor: the monitor reports it, and so does
  every received frame. Descriptors are reused, so `Monitor.drain` has to run before a newcomer is taken in.
- Binding an ipc path twice succeeds in ZeroMQ and steals the connections of the first, hence the lock file beside it.
"""

import fcntl
import ipaddress
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.errors import ConfigError
from shared.intake import Intake
from shared.protocol import MAX_FRAME

log = logging.getLogger(__name__)

HIGH_WATER = 1_000
"""Messages that may wait on either side of a connection before a ROUTER's send raises `PeerSlow`: a second or more of
steps for a gateway that is busy. A worker never has more than a few."""

DIAL_HIGH_WATER = 20_000
"""The same for what a DEALER sends: a burst of requests has to find room, one message each."""

HANDSHAKE_MS = 5_000
RECONNECT_MS, RECONNECT_MAX_MS = 20, 1_000
BEAT_RECONNECT_MAX_MS = 200  # a new scheduler waits for beats as soon as its worker has registered

BEAT_HIGH_WATER = 2
"""The same for beats: old ones are worth nothing."""

KEEPALIVE_S, KEEPALIVE_PROBES = 5, 3
"""Over tcp an idle connection is probed after so many seconds, and so often in that distance before it is given up."""

USER_TIMEOUT_MS = 30_000
"""Over tcp, data that is not acknowledged, or not taken, for so long ends the connection: a peer is dead by then."""

ODD_MESSAGES = 100
"""Messages of other shapes than ours that are passed over in one call."""

IPC_PATH_MAX = 107  # bytes, of sockaddr_un

S = TypeVar("S", bound="zmq.Socket[Any]")


class PeerGone(Exception):
    """There is no connection to the addressee. Always handled by the loop that sent."""


class PeerSlow(Exception):
    """The addressee does not read: as many messages as are allowed await it. Always handled by the loop that sent."""


class Message(NamedTuple):
    """What a ROUTER received."""

    peer: bytes  # identity of the sender
    frame: zmq.Frame

    @property
    def body(self) -> bytes:
        return self.frame.bytes

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return len(self.frame)

    @property
    def fd(self) -> int:
        """Descriptor of the connection it came by."""
        return int(self.frame.get(zmq.SRCFD))

    @property
    def pid(self) -> int | None:
        """The sender's process as the kernel knows it; None unless it came over ipc."""
        try:
            address = str(self.frame.get("Peer-Address"))  # host:uid:gid:pid over ipc, an IP address over tcp
        except zmq.ZMQError:
            return None
        parts = address.split(":")
        return int(parts[3]) if len(parts) == 4 and parts[3].isdecimal() else None


class Monitor:
    """Connections of one socket, as they come and go. `socket` may be polled.

    To be made before the socket is bound or connected: what happened earlier is never told.
    """

    def __init__(self, watched: "zmq.Socket[Any]") -> None:
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        self._watched = watched
        self.socket: zmq.Socket[Any] = watched.get_monitor_socket(events)
        self._reader: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket.underlying)  # reads at once on any event loop
        self.connected: set[int] = set()  # descriptors

    def drain(self) -> list[int]:
        """Descriptors of the connections that ended since the last call."""
        gone: list[int] = []
        while True:
            try:
                event = parse_monitor_message(self._reader.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return gone
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self.connected.discard(event["value"])
                gone.append(event["value"])
            else:
                self.connected.add(event["value"])

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        self.socket.close(linger=0)


class Listener:
    """A bound ROUTER with its monitor, and an intake if it is to bound what its peers have unread."""

    def __init__(self, socket: "zmq.Socket[bytes]", monitor: Monitor, intake: Intake | None = None) -> None:
        self.socket = socket
        self.monitor = monitor
        self._intake = intake

    def receive(self) -> Message | None:
        """The next message, if one is there. Anything but two frames is passed over: it is not of ours."""
        for _ in range(ODD_MESSAGES):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if self._intake is not None:
                self._intake.read(frames)
            if len(frames) == 2:
                return Message(frames[0].bytes, frames[1])
        return None

    def cut_floods(self) -> None:
        """End the connections of peers that send more than is read. Call it often; it is cheap."""
        if self._intake is not None:
            for fd in self._intake.cut(self.monitor.connected):
                log.warning("a peer sends faster than is read: its connection (%d) is ended", fd)

    def send(self, peer: bytes, body: bytes) -> None:
        """Queue a message. Raises PeerGone or PeerSlow, and has queued nothing then."""
        try:
            self.socket.send_multipart([peer, body], zmq.NOBLOCK)
        except zmq.Again:
            raise PeerSlow(show(peer)) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGone(show(peer)) from None


def identity(role: str) -> bytes:
    """A socket's name, never used before: role-pid-nonce."""
    return f"{role}-{os.getpid()}-{secrets.token_hex(4)}".encode()


def show(peer: bytes) -> str:
    """An identity as logs show it, whatever is in it: a stranger must not write lines of its own there."""
    return "".join(chr(byte) if 0x20 < byte < 0x7F else f"\\x{byte:02x}" for byte in peer)


@contextmanager
def listen(
    context: "zmq.Context[Any]", address: str, *, insecure: bool = False, linger_ms: int = 0
) -> Iterator[Listener]:
    """Bind `address` for the time of the block. ConfigError if that cannot be done.

    `linger_ms`: at the end, wait at most so long for the last messages to leave.
    """
    check_address(address)
    _check_exposure(address, insecure)
    with _locked(address), _socket(context, zmq.ROUTER, address) as socket:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        monitor = Monitor(socket)
        try:
            _bind(socket, address)
            yield Listener(socket, monitor, Intake() if address.startswith("tcp://") else None)
        finally:
            monitor.close()
            socket.close(linger=linger_ms)


@contextmanager
def dial(context: "zmq.Context[S]", address: str, name: bytes) -> "Iterator[tuple[S, Monitor]]":
    """A DEALER called `name` that keeps trying to connect to `address`, and its monitor, for the time of the block."""
    check_address(address)
    with _socket(context, zmq.DEALER, address) as socket:
        socket.setsockopt(zmq.IDENTITY, name)
        monitor = Monitor(socket)
        try:
            socket.connect(address)
            yield socket, monitor
        finally:
            monitor.close()


@contextmanager
def dial_beats(context: "zmq.Context[S]", address: str) -> Iterator[S]:
    """A DEALER without a name of its own, which sends to `address` while there is a connection, and keeps nothing."""
    with _socket(context, zmq.DEALER, address) as socket:
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, BEAT_HIGH_WATER)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, BEAT_RECONNECT_MAX_MS)
        socket.connect(address)
        yield socket


def check_address(address: str) -> None:
    """ConfigError unless `address` is one that can be bound or dialled."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path:
            raise ConfigError(f"{address}: needs a path behind ipc://")
        if len(os.fsencode(path)) > IPC_PATH_MAX:
            raise ConfigError(f"{address}: the path is longer than {IPC_PATH_MAX} bytes, the limit of the system")
    elif address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{address}: must be tcp://host:port")
    else:
        raise ConfigError(f"{address}: must begin with ipc:// or tcp://")


@contextmanager
def _socket(context: "zmq.Context[S]", kind: int, address: str) -> "Iterator[S]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, DIAL_HIGH_WATER if kind == zmq.DEALER else HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if address.startswith("tcp://"):
        _set_tcp(socket, kind)
    try:
        yield socket
    finally:
        socket.close(linger=None)  # the option above, unless closed before


def _set_tcp(socket: "zmq.Socket[Any]", kind: int) -> None:
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, USER_TIMEOUT_MS)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.RCVHWM, 0)  # input never stops: see the rules above


def _bind(socket: "zmq.Socket[Any]", address: str) -> None:
    mask = os.umask(0o077)  # the socket file is for this user only
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot bind {address}: {error.strerror}") from error
    finally:
        os.umask(mask)


def _check_exposure(address: str, insecure: bool) -> None:
    if not address.startswith("tcp://") or insecure:
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host != "localhost" and not _is_loopback(host):
        raise ConfigError(
            f"{address} can be reached by other hosts, and connections are neither encrypted nor authenticated: "
            "needs --insecure"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _locked(address: str) -> Iterator[None]:
    """Hold the lock file beside an ipc path, and leave neither it nor the socket behind."""
    path = address.removeprefix("ipc://")
    if not address.startswith("ipc://") or path.startswith("@"):  # the kernel itself guards tcp and abstract names
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
    """A descriptor that holds the lock on `path`; retried if the file was unlinked between opening and locking."""
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
