"""The admin port: by HTTP on loopback, an operator or an orchestrator's hook has a service drain.

    GET /drain    tells how far it is: {"draining": true, "drained": false, "unfinished": 3}
    POST /drain   has it drain, and answers when it has: 200, or 503 if requests still run when their time is over

A drain cannot be taken back; the process ends at SIGTERM. Only this host, or this pod, can reach the port, and no web
page of a browser on it: a browser says where a page comes from.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import ConfigError

HOST = "127.0.0.1"
POLL_INTERVAL = 0.05  # seconds between two looks at a drain, or at whether the port is to be closed
READ_TIMEOUT = 10.0  # seconds for a client to send its request


class DrainState(Struct, frozen=True):
    """How far a service's drain is."""

    draining: bool  # it has begun
    drained: bool  # no requests are taken any more, and all have ended
    unfinished: int  # requests that have not ended


class Drain(Struct, frozen=True):
    """How a service is drained. The functions are called in other threads than the service's."""

    begin: Callable[[], object]  # idempotent, and does not block
    state: Callable[[], DrainState]
    timeout: float  # seconds that it may take


@contextmanager
def admin_port(port: int, drain: Drain) -> Iterator[None]:
    """Answer at `port` of loopback for the time of the block, or nowhere if it is 0.

    Raise `ConfigError` if the port cannot be bound.
    """
    if not port:
        yield
        return
    try:
        server = _Server(port, drain)
    except OSError as error:
        raise ConfigError(f"--admin-port {port}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, args=[POLL_INTERVAL], name="admin port")
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, port: int, drain: Drain) -> None:
        super().__init__((HOST, port), _Handler)
        self.drain = drain

    def wait_drained(self) -> DrainState:
        """Return the state as soon as the service has drained or the time for that is over."""
        deadline = time.monotonic() + self.drain.timeout
        while not (state := self.drain.state()).drained and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        return state


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_TIMEOUT

    def do_GET(self) -> None:
        if self.path == "/drain":
            self._answer(HTTPStatus.OK, self.server.drain.state())
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": "there is only /drain"})

    def do_POST(self) -> None:
        if self.path != "/drain":
            self._answer(HTTPStatus.NOT_FOUND, {"error": "there is only /drain"})
        elif "Origin" in self.headers:
            self._answer(HTTPStatus.FORBIDDEN, {"error": "web pages may not drain a service"})
        else:
            self.server.drain.begin()
            state = self.server.wait_drained()
            self._answer(HTTPStatus.OK if state.drained else HTTPStatus.SERVICE_UNAVAILABLE, state)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the service says that it drains."""

    def _answer(self, status: HTTPStatus, content: Any) -> None:
        body = json.dumps(msgspec.to_builtins(content)).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
