"""Tests the sockets between processes: what the rest of the code relies on."""

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from shared import transport, unread
from shared.errors import ConfigError, ProtocolError
from shared.protocol import MAX_FRAME
from shared.transport import (
    HIGH_WATER,
    KEEPALIVE_PROBES,
    KEEPALIVE_S,
    MALFORMED_LIMIT,
    USER_TIMEOUT_MS,
    DropReason,
    Listener,
    Message,
    PeerGone,
    PeerSlow,
    check_address,
    connect,
    listen,
    new_identity,
    only_frame,
    printable_identity,
    receive_frames,
)
from tests.ports import free_ports
from tests.waiting import PATIENCE, wait_until

BOUND = 1_000_000  # bytes that a peer may have unread, in these tests


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        yield f"ipc://{folder}/a.sock"


def wait(listener: Listener) -> Message:
    message = None
    while message is None:  # those that are skipped may come first
        assert listener.socket.poll(PATIENCE * 1000)
        message = listener.receive()
    return message


def disconnected(listener: Listener) -> list[int]:
    fds: list[int] = []
    while not fds:
        assert listener.monitor.socket.poll(PATIENCE * 1000)
        fds = listener.monitor.drain()
    return fds


def fill(listener: Listener, peer: bytes) -> int:
    """Send numbers until no more are taken, and return how many were."""
    for number in range(100 * HIGH_WATER):
        try:
            listener.send(peer, b"%d" % number + b" " * 10_000)
        except PeerSlow:
            return number
    return 100 * HIGH_WATER


@pytest.fixture
def port() -> int:
    """Return a free port."""
    return free_ports(1)[0]


@pytest.mark.parametrize("over", ["ipc", "tcp"])
def test_a_message_carries_its_sender_and_its_connection(context: Any, address: str, port: int, over: str) -> None:
    address = address if over == "ipc" else f"tcp://127.0.0.1:{port}"
    with listen(context, address) as listener:
        with connect(context, address, b"one") as (one, _), connect(context, address, b"two") as (two, _):
            one.send(b"hello")
            first = wait(listener)
            two.send(b"hi")
            second = wait(listener)
            assert (first.peer, first.body, second.peer, second.body) == (b"one", b"hello", b"two", b"hi")
            assert first.pid == second.pid == (os.getpid() if over == "ipc" else None)
            listener.monitor.drain()
            assert listener.monitor.connected == {first.fd, second.fd}
            listener.send(b"two", b"answer")
            assert two.recv() == b"answer"
            two.close(0)
            assert disconnected(listener) == [second.fd]
            assert listener.monitor.connected == {first.fd}
        assert disconnected(listener) == [first.fd]


def test_sending_to_nobody_is_an_error(context: Any, address: str) -> None:
    with listen(context, address) as listener, pytest.raises(PeerGone):
        listener.send(b"nobody", b"hello")


def test_sending_to_one_that_does_not_read_is_an_error_and_loses_nothing(context: Any, address: str) -> None:
    with listen(context, address) as listener, connect(context, address, b"slow") as (slow, _):
        slow.send(b"hello")
        wait(listener)
        sent = fill(listener, b"slow")
        assert HIGH_WATER <= sent < 100 * HIGH_WATER
        assert [int(slow.recv()) for _ in range(sent)] == list(range(sent))
        listener.send(b"slow", b"again")
        assert slow.recv() == b"again"


def test_messages_of_other_shapes_are_skipped(context: Any, address: str) -> None:
    with listen(context, address) as listener, connect(context, address, b"odd") as (odd, _):
        odd.send_multipart([b"a", b"b"])
        odd.send_multipart([b"a"] * 50)
        odd.send(b"fine")
        assert wait(listener).body == b"fine"
        assert listener.receive() is None


@contextmanager
def raw_peer(port: int) -> Iterator[socket.socket]:
    """Yield a connected peer, its handshake done, that can send any bytes of ZMTP, also those that libzmq would not."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00")
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(greeting)
        peer.recv(len(greeting), socket.MSG_WAITALL)
        peer.sendall(ready)
        head = peer.recv(2, socket.MSG_WAITALL)
        peer.recv(head[1], socket.MSG_WAITALL)  # its own READY
        peer.settimeout(PATIENCE)
        yield peer


def command(name: bytes, data: bytes) -> bytes:
    body = bytes([len(name)]) + name + data
    return bytes([4, len(body)]) + body


def frame(body: bytes, *, more: bool) -> bytes:
    return bytes([2 + more]) + len(body).to_bytes(8, "big") + body


def flood(port: int) -> None:
    """Send messages with pings between them, as a peer with ZMTP heartbeats does, until no more are taken."""
    with raw_peer(port) as peer, suppress(TimeoutError):
        peer.settimeout(0.2)
        for _ in range(200):
            peer.sendall((b"\x00\x05hello" + command(b"PING", b"\x00\x0acontext")) * 100)


VICTIM = """
import sys, zmq
from shared.transport import listen
with zmq.Context() as context, listen(context, sys.argv[1]) as listener:
    print("listening", flush=True)
    for line in sys.stdin:
        while listener.receive():
            pass
        print("read", flush=True)
"""


def test_a_peer_that_floods_pings_and_leaves_over_tcp_harms_nobody(port: int) -> None:
    """PRC-22: it leaves while its messages wait, and then they are read. libzmq used to abort the process."""
    argv = [sys.executable, "-c", VICTIM, f"tcp://127.0.0.1:{port}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:
        assert victim.stdin is not None
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"listening\n"
        for _ in range(3):
            flood(port)
            time.sleep(0.1)  # so that the listener's own thread sees it leave
            victim.stdin.write(b"\n")
            victim.stdin.flush()
            assert victim.stdout.readline() == b"read\n"
        victim.stdin.close()
        assert victim.wait(PATIENCE) == 0


def test_the_kernel_and_not_pings_detects_dead_tcp_connections(context: Any, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    with listen(context, address) as listener, connect(context, address, b"one") as (one, monitor):
        one.send(b"hello")
        fds = [wait(listener).fd]
        monitor.drain()
        fds += monitor.connected
        assert len(fds) == 2
        for fd in fds:
            with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
                values = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
                assert values == [KEEPALIVE_S, KEEPALIVE_S, KEEPALIVE_PROBES, USER_TIMEOUT_MS]
        for end in (listener.socket, one):
            assert end.getsockopt(zmq.HEARTBEAT_IVL) == 0


def send_until_disconnected(listener: Listener, peer: socket.socket, data: bytes) -> int:
    """Send data until the listener ends the connection, and return how many bytes were sent."""
    sent = 0
    peer.settimeout(0.2)  # since only this thread ends the connection
    while sent < 100 * BOUND:
        try:
            sent += peer.send(data)
        except ConnectionError:
            return sent
        except TimeoutError:
            pass
        listener.disconnect_floods()
        listener.monitor.drain()
    return sent


@pytest.mark.parametrize("more", [True, False], ids=["frames of one message", "messages"])
@pytest.mark.parametrize("size", [1_000_000, 1_000, 1])
def test_what_a_peer_may_have_unread_over_tcp_is_bounded(
    context: Any, port: int, monkeypatch: pytest.MonkeyPatch, more: bool, size: int
) -> None:
    """PRC-28: its connection is ended. The next peer's is not, although it sends more in all, since it is read."""
    monkeypatch.setattr(unread, "MAX_UNREAD", BOUND)
    with listen(context, f"tcp://127.0.0.1:{port}") as listener:
        with raw_peer(port) as peer:
            data = frame(bytes(size), more=more) * (BOUND // 8 // size + 1)
            assert BOUND < send_until_disconnected(listener, peer, data) < 50 * BOUND
        while listener.socket.poll(200):
            listener.receive()
        with raw_peer(port) as fair:
            for _ in range(20):
                fair.sendall(frame(bytes(BOUND // 10), more=False))
                while len(wait(listener).body) != BOUND // 10:
                    pass  # the other peer has sent this
                listener.disconnect_floods()
            fair.sendall(frame(b"last", more=False))
            assert wait(listener).body == b"last"


@pytest.mark.parametrize("over_tcp", [False, True], ids=["ipc", "tcp"])
def test_the_connection_of_a_peer_that_sends_nonsense_is_ended(
    context: Any, address: str, port: int, over_tcp: bool
) -> None:
    """Those of others are not, though one of them sends a little nonsense too."""
    address = f"tcp://127.0.0.1:{port}" if over_tcp else address
    with listen(context, address) as listener, connect(context, address, b"fair") as (fair, monitor):
        for number in range(MALFORMED_LIMIT - 1):
            fair.send(b"%d" % number)
            listener.reject(wait(listener))
        with connect(context, address, b"hostile") as (hostile, other):
            hostile.send(b"hello")
            ended = wait(listener).fd
            for _ in range(MALFORMED_LIMIT):
                assert listener.monitor.drain() == []
                hostile.send_multipart([b"too", b"many"])
                assert listener.socket.poll(PATIENCE * 1000)
                assert listener.receive() is None
            assert disconnected(listener) == [ended]
            while not other.drain():
                assert other.socket.poll(PATIENCE * 1000)
        assert listener.dropped == {DropReason.MALFORMED: 2 * MALFORMED_LIMIT - 1}
        fair.send(b"still here")
        assert wait(listener).body == b"still here"
        assert monitor.drain() == []


def test_nonsense_of_a_peer_that_has_left_ends_no_other_connection(context: Any, address: str) -> None:
    """A new peer has its descriptor, as descriptors are reused."""
    with listen(context, address) as listener, connect(context, address, b"fair") as (fair, monitor):
        fair.send(b"hello")
        left_behind = Message(b"hostile", wait(listener).frame)
        listener.monitor.drain()
        for _ in range(2 * MALFORMED_LIMIT):
            listener.reject(left_behind)
        fair.send(b"still here")
        assert wait(listener).body == b"still here"
        assert monitor.drain() == []
        assert monitor.connected


def test_small_messages_give_no_credit_for_later_ones(context: Any, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRC-28: a frame counts as more than its size, but never as more than what came."""
    monkeypatch.setattr(unread, "MAX_UNREAD", BOUND)
    with listen(context, f"tcp://127.0.0.1:{port}") as listener, raw_peer(port) as peer:
        for _ in range(100):
            peer.sendall(frame(b"", more=False) * 1_000)
            for _ in range(1_000):
                wait(listener)
        listener.monitor.drain()
        listener.disconnect_floods()
        assert send_until_disconnected(listener, peer, frame(bytes(1_000), more=True) * 100) < 50 * BOUND


def test_a_frame_beyond_the_limit_ends_the_connection(context: Any, address: str) -> None:
    with listen(context, address) as listener, connect(context, address, b"big") as (big, _):
        big.send(b"hello")
        fd = wait(listener).fd
        big.send(bytes(MAX_FRAME + 1))
        assert fd in disconnected(listener)


def test_a_connected_socket_sees_the_end_of_its_listener(context: Any, address: str) -> None:
    with connect(context, address, b"patient") as (socket, monitor):
        socket.send(b"hello")
        with listen(context, address) as listener:
            wait(listener)
            while not monitor.connected:
                assert monitor.socket.poll(PATIENCE * 1000)
                assert monitor.drain() == []
        assert monitor.socket.poll(PATIENCE * 1000)
        assert len(monitor.drain()) == 1
        assert not monitor.connected


def test_no_connection_is_too_quick_to_be_seen(context: Any, address: str) -> None:
    with listen(context, address):
        for number in range(100):
            with connect(context, address, b"%d" % number) as (_, monitor):
                while not monitor.connected:
                    assert monitor.socket.poll(PATIENCE * 1000)
                    assert monitor.drain() == []


def test_strangers_are_counted_though_a_last_message_is_read_after_its_sender_has_left(context: Any, port: int) -> None:
    """One of them has its descriptor, as descriptors are reused."""
    strangers = [socket.socket() for _ in range(20)]  # now, so that descriptors that become free are the listener's
    address = f"tcp://127.0.0.1:{port}"
    with listen(context, address) as listener:
        with connect(context, address, b"fair") as (fair, _):
            fair.send(b"hello")
            fd = wait(listener).fd
            fair.send(b"good bye")
        assert disconnected(listener) == [fd]
        assert wait(listener).body == b"good bye"
        for stranger in strangers:
            stranger.connect(("127.0.0.1", port))
        wait_until(lambda: not listener.monitor.drain() and len(listener.monitor.connected) == len(strangers))
        assert fd in listener.monitor.connected
        for stranger in strangers:
            stranger.close()
        left: list[int] = []
        while len(left) < len(strangers):
            left += disconnected(listener)
        assert listener.monitor.refused == len(strangers)


def test_a_listener_over_ipc_that_hangs_up_is_said_to_and_keys_are_not_blamed(context: Any, address: str) -> None:
    """As when a scheduler is killed that stood still, or another program listens there."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address.removeprefix("ipc://"))
        listener.listen()
        with connect(context, address, b"a") as (_, monitor):
            accepted, _ = listener.accept()
            accepted.close()
            wait_until(lambda: bool(monitor.drain()))
            assert "it has died meanwhile" in monitor.refusal
            assert "keys" not in monitor.refusal


def test_an_ipc_path_is_guarded_private_and_left_clean(context: Any, address: str) -> None:
    path = Path(address.removeprefix("ipc://"))
    with listen(context, address):
        assert path.stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="another process is listening there"), listen(context, address):
            pass
        assert path.exists()
    assert list(path.parent.iterdir()) == []
    path.write_text("left by a process that was killed")
    path.with_suffix(".sock.lock").touch()
    with listen(context, address) as listener, connect(context, address, b"one") as (one, _):
        one.send(b"hello")
        assert wait(listener).body == b"hello"


def test_a_lock_that_is_let_go_of_and_unlinked_is_not_taken_for_held(
    context: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the lock file and locking it, its holder may unlink it: then another may hold a new one."""
    lock, flock, calls = Path(address.removeprefix("ipc://") + ".lock"), fcntl.flock, []

    def unlinked_meanwhile(fd: int, operation: int) -> None:
        if not calls:
            lock.unlink()
        calls.append(fd)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", unlinked_meanwhile)
    with listen(context, address):
        assert len(calls) == 2
        assert lock.exists()


def test_tcp_in_use_is_a_clear_error(context: Any, port: int) -> None:
    with (
        listen(context, f"tcp://127.0.0.1:{port}"),
        pytest.raises(ConfigError, match=rf"cannot bind tcp://127\.0\.0\.1:{port}: Address already in use"),
        listen(context, f"tcp://127.0.0.1:{port}"),
    ):
        pass


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "10.1.2.3", "[::]", "example.org"])
def test_tcp_for_other_hosts_needs_keys_or_insecure(context: Any, host: str) -> None:
    with pytest.raises(ConfigError, match="needs --zmq-keys, or --insecure"), listen(context, f"tcp://{host}:35823"):
        pass


def test_insecure_tcp_binds(context: Any, port: int) -> None:
    with (
        listen(context, f"tcp://0.0.0.0:{port}", insecure=True) as listener,
        connect(context, f"tcp://127.0.0.1:{port}", b"one") as (one, _),
    ):
        one.send(b"hello")
        assert wait(listener).body == b"hello"


def test_tcp_over_ipv6(context: Any, port: int) -> None:
    address = f"tcp://[::1]:{port}"
    with listen(context, address) as listener, connect(context, address, b"one") as (one, _):
        one.send(b"hello")
        assert wait(listener).body == b"hello"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_needs_nothing(context: Any, port: int, host: str) -> None:
    with listen(context, f"tcp://{host}:{port}"):
        pass


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("udp://1.2.3.4:5", "ipc:// or tcp://"),
        ("/tmp/a.sock", "ipc:// or tcp://"),
        ("", "ipc:// or tcp://"),
        ("ipc://", "needs a path"),
        ("ipc:///" + "x" * 107, "longer than 107 bytes"),
        ("ipc:///" + "é" * 54, "longer than 107 bytes"),
        ("tcp://localhost", "tcp://host:port"),
        ("tcp://:5", "tcp://host:port"),
        ("tcp://localhost:port", "tcp://host:port"),
        ("tcp://localhost:65536", "tcp://host:port"),
        ("tcp://localhost:٥٥", "tcp://host:port"),
        ("tcp://engine 2:5557", "tcp://host:port"),
        ("tcp://engine,2:5557", "tcp://host:port"),
        ("tcp://-engine:5557", "tcp://host:port"),
        ("tcp://é:5557", "tcp://host:port"),
        ("tcp://http://engine:5557", "tcp://host:port"),
        ("tcp://*:5557", "tcp://host:port"),
        ("tcp://[::zz]:5557", "tcp://host:port"),
        ("tcp://::1:5557", "tcp://host:port"),
    ],
)
def test_wrong_addresses_are_clear_errors(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///" + "x" * 106,
        "ipc://@name",
        "tcp://[::1]:5",
        "tcp://[fe80::1%eth0]:5",
        "tcp://10.0.0.1:5",
        "tcp://example.org:5557",
        "tcp://engine_2-a.svc.:5557",
    ],
)
def test_right_addresses_pass_and_can_be_connected_to(context: Any, address: str) -> None:
    check_address(address)
    with connect(context, address, new_identity("test")):
        pass


def test_a_listener_may_take_all_interfaces(context: Any) -> None:
    with listen(context, f"tcp://*:{free_ports(1)[0]}", insecure=True):
        pass
    with pytest.raises(ConfigError, match="is open to other hosts"), listen(context, "tcp://*:5557"):
        pass


def test_what_zeromq_cannot_connect_to_is_a_clear_error(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "check_address", lambda address: None)
    with pytest.raises(ConfigError, match="cannot connect to tcp://a b:1: Invalid argument"):
        connect(context, "tcp://a b:1", b"x").__enter__()


def test_a_folder_that_is_missing_is_a_clear_error(context: Any) -> None:
    with pytest.raises(ConfigError, match="No such file"), listen(context, "ipc:///nowhere/at/all.sock"):
        pass


def test_identities_are_never_the_same() -> None:
    identities = {new_identity("worker") for _ in range(1000)}
    assert len(identities) == 1000
    assert all(identity.startswith(b"worker-%d-" % os.getpid()) for identity in identities)


def test_identities_are_escaped_for_logs() -> None:
    assert printable_identity(b"\x00\xff\nworker") == "\\x00\\xff\\x0aworker"


def test_a_peer_is_reached_while_it_is_there_and_does_not_notice(context: Any, address: str) -> None:
    with listen(context, address) as listener:
        with connect(context, address, b"peer") as (peer, _):
            peer.send(b"first")
            peer.send(b"second")
            assert wait(listener).body == b"first"
            assert listener.reaches(b"peer")
            assert peer.poll(PATIENCE * 1000)
            assert only_frame(receive_frames(peer)) == b""
            peer.close(1000)
            disconnected(listener)
            wait_until(lambda: not listener.reaches(b"peer"))  # although something of it is not read yet
            assert wait(listener).body == b"second"
        assert not listener.reaches(b"nobody")


@pytest.mark.parametrize("frames", [[], [b"a", b"b"], [b""] * 50])
def test_a_message_of_other_than_one_frame_is_none(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match=f"and this one {len(frames)}$"):
        only_frame([zmq.Frame(frame) for frame in frames])
