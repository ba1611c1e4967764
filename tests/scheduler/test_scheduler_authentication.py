"""Tests whom a scheduler's sockets admit over tcp, with keys."""

import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from msgspec.structs import replace

from services.scheduler import authentication as authentication_module
from services.scheduler.authentication import authentication
from services.scheduler.exporter import PeerCollector
from shared.curve import ConnectionKeys, ListenerKeys, load_connection_keys, load_listener_keys, make_keys
from shared.protocol import MAX_FRAME
from shared.transport import Listener, Monitor, connect, connect_for_heartbeats, listen, new_identity
from tests.ports import free_ports
from tests.waiting import PATIENCE, wait_until


class Sockets(NamedTuple):
    """A scheduler's sockets, and the keys of its peers."""

    context: "zmq.Context[Any]"
    address: str  # for gateways
    gateways: Listener
    gateway: ConnectionKeys
    worker: ConnectionKeys


def keys_of(folder: Path, role: str) -> ConnectionKeys:
    keys = load_connection_keys(str(folder), role)
    assert keys is not None
    return keys


@pytest.fixture
def listener_keys(tmp_path: Path) -> ListenerKeys:
    make_keys(tmp_path)
    keys = load_listener_keys(str(tmp_path))
    assert keys is not None
    return keys


@pytest.fixture
def sockets(tmp_path: Path, listener_keys: ListenerKeys) -> Iterator[Sockets]:
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    context: zmq.Context[Any] = zmq.Context()
    with (
        authentication(context, listener_keys),
        listen(context, address, role="gateway", keys=listener_keys) as gateways,
    ):
        yield Sockets(context, address, gateways, keys_of(tmp_path, "gateway"), keys_of(tmp_path, "worker"))
    context.destroy(linger=0)


def assert_serves(sockets: Sockets) -> None:
    name = new_identity("gateway")
    with connect(sockets.context, sockets.address, name, sockets.gateway) as (peer, monitor):
        peer.send(b"hello")
        assert sockets.gateways.socket.poll(PATIENCE * 1000)
        message = sockets.gateways.receive()
        assert message is not None
        assert (message.peer, message.body) == (name, b"hello")
        sockets.gateways.send(name, b"answer")
        assert peer.recv() == b"answer"
        monitor.drain()
        assert (len(monitor.connected), monitor.refusal) == (1, "")


def stranger(sockets: Sockets) -> AbstractContextManager[tuple[Any, Monitor]]:
    """Connect with keys that are not admitted, for the time of the block."""
    public, secret = zmq.curve_keypair()
    return connect(sockets.context, sockets.address, b"x", replace(sockets.gateway, public=public, secret=secret))


def wait_for_end(monitor: Monitor) -> None:
    while not monitor.drain():
        assert monitor.socket.poll(PATIENCE * 1000)


def num_refused(sockets: Sockets) -> int:
    sockets.gateways.monitor.drain()
    refused, _ = PeerCollector("0", {"gateway": sockets.gateways}).collect()
    (sample,) = refused.samples
    assert (sample.name, sample.labels) == ("quire:refused_connections_total", {"engine": "0", "role": "gateway"})
    return int(sample.value)


def test_a_peer_with_an_admitted_key_is_served_and_its_end_is_seen(sockets: Sockets) -> None:
    assert_serves(sockets)
    wait_for_end(sockets.gateways.monitor)
    assert num_refused(sockets) == 0


def test_a_refused_peer_with_the_descriptor_of_a_served_one_is_counted(sockets: Sockets) -> None:
    for _ in range(10):
        assert_serves(sockets)
        wait_for_end(sockets.gateways.monitor)
        before = num_refused(sockets)
        with connect(sockets.context, sockets.address, b"bad"):
            wait_until(lambda before=before: num_refused(sockets) > before)


@pytest.mark.parametrize("kind", ["the other role", "foreign", "none", "wrong scheduler"])
def test_other_peers_are_refused_and_counted_and_told_so(sockets: Sockets, kind: str) -> None:
    public, secret = zmq.curve_keypair()
    keys = {
        "the other role": sockets.worker,
        "foreign": replace(sockets.gateway, public=public, secret=secret),
        "none": None,
        "wrong scheduler": replace(sockets.gateway, scheduler=public),
    }[kind]
    with connect(sockets.context, sockets.address, b"bad", keys) as (peer, monitor):
        for _ in range(100):
            peer.send(b"let me in")
        wait_for_end(monitor)
    assert "--zmq-keys" in monitor.refusal
    with connect_for_heartbeats(sockets.context, sockets.address, keys) as heartbeats:
        for _ in range(20):
            with suppress(zmq.Again):
                heartbeats.send(b"alive", zmq.NOBLOCK)
            time.sleep(0.01)
    wait_until(lambda: num_refused(sockets) >= 2 and not sockets.gateways.monitor.connected)  # it tries again and again
    assert sockets.gateways.receive() is None
    assert_serves(sockets)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" + bytes(9), bytes(1000)])
def test_what_is_no_peer_is_refused_and_counted(sockets: Sockets, data: bytes) -> None:
    port = int(sockets.address.rpartition(":")[2])
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass
    wait_until(lambda: num_refused(sockets) == 3)
    assert sockets.gateways.receive() is None
    assert_serves(sockets)


def test_the_largest_message_passes_encrypted(sockets: Sockets) -> None:
    with connect(sockets.context, sockets.address, b"good", sockets.gateway) as (peer, _):
        peer.send(bytes(MAX_FRAME))
        assert sockets.gateways.socket.poll(PATIENCE * 1000)
        sockets.gateways.disconnect_floods()
        message = sockets.gateways.receive()
        assert message is not None
        assert message.size == MAX_FRAME


def test_what_is_sent_cannot_be_read_on_the_way(sockets: Sockets) -> None:
    """A relay between the two sees no word of it."""
    port = int(sockets.address.rpartition(":")[2])
    seen = b""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(PATIENCE)
        address = f"tcp://127.0.0.1:{relay.getsockname()[1]}"
        with connect(sockets.context, address, b"good", sockets.gateway) as (peer, _):
            peer.send(b"a secret prompt")
            near, _ = relay.accept()
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                near.settimeout(0.05)
                far.settimeout(0.05)
                while not sockets.gateways.socket.poll(0):
                    for source, target in ((near, far), (far, near)):
                        with suppress(TimeoutError):
                            data = source.recv(4096)
                            seen += data
                            target.sendall(data)
    message = sockets.gateways.receive()
    assert message is not None
    assert message.body == b"a secret prompt"
    assert len(seen) > 500
    assert b"secret" not in seen


def test_without_authentication_nobody_is_admitted(tmp_path: Path, listener_keys: ListenerKeys) -> None:
    """So that a mistake in the order of the parts cannot open a socket."""
    context: zmq.Context[Any] = zmq.Context()
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with (
        listen(context, address, role="gateway", keys=listener_keys) as listener,
        connect(context, address, b"good", keys_of(tmp_path, "gateway")) as (peer, _),
    ):
        peer.send(b"hello")
        assert not listener.socket.poll(1000)
        assert listener.receive() is None
    context.destroy(linger=0)


def test_keys_make_a_tcp_address_for_other_hosts_allowed(listener_keys: ListenerKeys) -> None:
    with zmq.Context() as context, authentication(context, listener_keys):
        address = f"tcp://0.0.0.0:{free_ports(1)[0]}"
        with listen(context, address, role="worker", keys=listener_keys):
            pass


def test_an_admitted_peer_does_not_wait_behind_strangers_whose_refusals_are_held_back(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication_module, "REFUSAL_DELAY", 3600.0)
    with ExitStack() as stack:
        monitors = [stack.enter_context(stranger(sockets))[1] for _ in range(5)]
        wait_until(lambda: len(sockets.gateways.monitor.connected) == 5 or bool(sockets.gateways.monitor.drain()))
        assert_serves(sockets)
        assert [monitor.refusal for monitor in monitors] == [""] * 5


def test_only_so_many_refusals_are_held_back(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps a connection open, and a process has only so many."""
    monkeypatch.setattr(authentication_module, "REFUSAL_DELAY", 3600.0)
    monkeypatch.setattr(authentication_module, "MAX_HELD", 2)
    with ExitStack() as stack:
        monitors = [stack.enter_context(stranger(sockets))[1] for _ in range(5)]
        wait_until(lambda: sum(bool(monitor.drain() or monitor.refusal) for monitor in monitors) == 3)
