"""Tests the admin port over real connections."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from shared.admin import POLL_INTERVAL, Drain, DrainState, admin_port
from shared.errors import ConfigError
from tests.ports import free_ports
from tests.waiting import wait_until


class Service:
    """A service with one request."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.unfinished = 1

    @property
    def state(self) -> DrainState:
        draining = self.begun.is_set()
        return DrainState(draining, draining and not self.unfinished, self.unfinished)


@contextmanager
def administered(service: Service, timeout: float = 20.0) -> Iterator[int]:
    (port,) = free_ports(1)
    with admin_port(port, Drain(service.begun.set, lambda: service.state, timeout)):
        yield port


def ask(port: int, method: str, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_post_answers_when_the_service_has_drained() -> None:
    service = Service()
    answers = []
    with administered(service) as port:
        assert ask(port, "GET", "/drain") == (200, {"draining": False, "drained": False, "unfinished": 1})
        hook = threading.Thread(target=lambda: answers.append(ask(port, "POST", "/drain")))
        hook.start()
        assert service.begun.wait(20)
        assert ask(port, "GET", "/drain") == (200, {"draining": True, "drained": False, "unfinished": 1})
        assert not answers
        service.unfinished = 0
        hook.join()
        drained = (200, {"draining": True, "drained": True, "unfinished": 0})
        assert answers == [drained]
        assert ask(port, "POST", "/drain") == ask(port, "GET", "/drain") == drained


def test_a_post_answers_when_time_is_over() -> None:
    with administered(Service(), timeout=0.1) as port:
        assert ask(port, "POST", "/drain") == (503, {"draining": True, "drained": False, "unfinished": 1})


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("POST", "/", {}, 404),
        ("POST", "/drain/", {}, 404),
        ("PUT", "/drain", {}, 501),
        ("POST", "/drain", {"Origin": "http://example.com"}, 403),
        ("POST", "/drain", {"Origin": "null"}, 403),
    ],
)
def test_nothing_else_drains_it(method: str, path: str, headers: dict[str, str], status: int) -> None:
    service = Service()
    with administered(service) as port, closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        assert connection.getresponse().status == status
        assert not service.begun.is_set()


def test_other_hosts_cannot_connect() -> None:
    with administered(Service()) as port, socket.socket() as outside:
        outside.bind(("127.0.0.2", port))  # free: the port is taken at one address only


def test_clients_that_send_nothing_do_not_block_others() -> None:
    service = Service()
    num_before = threading.active_count()
    with administered(service) as port:
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        assert ask(port, "GET", "/drain")[0] == 200
        for each in silent:
            each.close()
        wait_until(lambda: threading.active_count() < num_before + 20)


def test_a_port_that_is_taken_is_a_wrong_setting() -> None:
    service = Service()
    drain = Drain(service.begun.set, lambda: service.state, 1.0)
    with administered(service) as port:
        second = admin_port(port, drain)
        with pytest.raises(ConfigError, match=f"--admin-port {port}: "):
            second.__enter__()


def test_there_is_no_port_by_default() -> None:
    threads = threading.active_count()
    with admin_port(0, Drain(lambda: None, lambda: Service().state, 1.0)):
        assert threading.active_count() == threads


def test_the_end_of_the_port_is_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway's event loop waits for it, and the server looks only twice a second if it is not told otherwise."""
    intervals: list[float] = []
    serve_forever = ThreadingHTTPServer.serve_forever

    def note_interval(server: ThreadingHTTPServer, poll_interval: float = 0.5) -> None:
        intervals.append(poll_interval)
        serve_forever(server, poll_interval)

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", note_interval)
    with administered(Service()) as port:
        assert ask(port, "GET", "/drain")[0] == 200
    assert intervals == [POLL_INTERVAL]
    assert POLL_INTERVAL < 0.1
