"""Tests deploy/haproxy.cfg on a real HAProxy, if it is installed, in front of gateways that echo their requests."""

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports
from tests.waiting import PATIENCE, wait_until

CONFIG = (Path(__file__).resolve().parents[2] / "deploy/haproxy.cfg").read_text()
HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed")


class Gateway(ThreadingHTTPServer):
    """Answers with its name, the path and the length of the body, after reading all of it."""

    request_queue_size = 128

    def __init__(self, name: str = "gateway") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = name
        self.engine_ready = self.takes_requests = True
        self.health_seconds = 0.0  # that an answer about its health takes
        self.not_frozen = threading.Event()
        self.not_frozen.set()

    def status(self, target: str) -> int:
        healthy = {"/health": self.engine_ready and self.takes_requests, "/health?engines=0": self.takes_requests}
        return 200 if healthy.get(target, True) else 503


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_GET(self) -> None:
        self.server.not_frozen.wait()
        time.sleep(self.server.health_seconds if self.path.startswith("/health") else 0)
        length = len(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        answer = f"{self.server.name} {self.path} {length}".encode()
        self.send_response(self.server.status(self.path))
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with suppress(ConnectionError):  # the balancer may not have waited
            self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


def replace_line(text: str, pattern: str, new: str) -> str:
    """Return `text` with the one line replaced that matches."""
    replaced, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    assert count == 1, pattern
    return replaced


@contextmanager
def balancing(folder: Path, gateways: Sequence[Gateway], *, body_timeout: str = "30s") -> Iterator[int]:
    """Run the balancer before `gateways` for the block; yield its port.

    Only names, ports and the `body_timeout` differ from the container's configuration.
    """
    assert HAPROXY is not None
    front, monitoring = free_ports(2)
    servers = [f"server {one.name} 127.0.0.1:{one.server_address[1]} init-addr last,libc" for one in gateways]
    with ExitStack() as stack:
        for gateway in gateways:
            stack.enter_context(gateway)
            thread = threading.Thread(target=gateway.serve_forever, args=[0.05])
            thread.start()
            stack.callback(thread.join)
            stack.callback(gateway.shutdown)
            stack.callback(gateway.not_frozen.set)
        text = replace_line(CONFIG, r"bind :8000$", f"bind 127.0.0.1:{front}")
        text = replace_line(text, r"bind :8404$", f"bind 127.0.0.1:{monitoring}")
        text = replace_line(text, r"timeout http-request .*", f"timeout http-request {body_timeout}")
        text, count = re.subn(r"server-template .*", "\n    ".join(servers), text)
        assert count == 2
        file = folder / "haproxy.cfg"
        file.write_text(text)
        process = subprocess.Popen([HAPROXY, "-W", "-db", "-f", str(file)], stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        wait_until(lambda: process.poll() is not None or ask(front, "GET", "/health")[0] == 200)
        yield front


@pytest.fixture(scope="module")
def balancer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of a balancer before one gateway."""
    with balancing(tmp_path_factory.mktemp("haproxy"), [Gateway()]) as port:
        yield port


def ask(
    port: int, method: str, target: str, body: bytes | None = None, *, seconds: float = PATIENCE, **headers: str
) -> tuple[int, bytes]:
    """Return status and body of the answer; status 0 if nobody listens."""
    connection = HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read()
    except ConnectionError:
        return 0, b""
    finally:
        connection.close()


def test_the_configuration_is_valid() -> None:
    argv = [str(HAPROXY), "-c", "-f", str(Path(__file__).resolve().parents[2] / "deploy/haproxy.cfg")]
    process = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert process.returncode == 0, process.stderr
    assert "WARNING" not in process.stderr


@pytest.mark.parametrize(
    "target",
    [
        "/metrics",
        "/metrics?name=x",
        "/%6detrics",
        "/%6D%65trics",
        "/m%65trics?x",
        "http://gateway/metrics",
        "/metrics#x",
    ],
)
def test_no_spelling_of_metrics_reaches_a_gateway(balancer: int, target: str) -> None:
    status, body = ask(balancer, "GET", target)
    assert status in (400, 404)
    assert target.encode() not in body, "a gateway answered"
    assert status == 400 or b'"type":"NotFoundError"' in body


@pytest.mark.parametrize("target", ["/v1/models", "/metrics2", "/v1/metrics"])
def test_other_paths_do(balancer: int, target: str) -> None:
    assert ask(balancer, "GET", target) == (200, f"gateway {target} 0".encode())


@pytest.mark.parametrize("length", [0, 100, 100_000, 32 * 1024 * 1024])
def test_bodies_of_any_length_pass(balancer: int, length: int) -> None:
    assert ask(balancer, "POST", "/v1/completions", bytes(length)) == (
        200,
        f"gateway /v1/completions {length}".encode(),
    )


@pytest.mark.parametrize("length", [9_000, 60_000])
@pytest.mark.parametrize("name", ["Cookie", "Authorization"])
def test_long_headers_pass(balancer: int, name: str, length: int) -> None:
    """HTTP-01."""
    assert ask(balancer, "GET", "/v1/models", **{name: "a" * length}) == (200, b"gateway /v1/models 0")


def test_a_body_that_does_not_come_times_out(tmp_path: Path) -> None:
    with (
        balancing(tmp_path, [Gateway()], body_timeout="1s") as port,
        socket.create_connection(("127.0.0.1", port), PATIENCE) as client,
    ):
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        response = HTTPResponse(client)
        response.begin()
        with response:
            assert response.status == 408
            assert b"did not come in time" in response.read()


def serving(port: int, requests: int = 8) -> set[str]:
    """Return who answers requests: names of gateways, or the status that the balancer gave."""
    answers = [ask(port, "GET", "/v1/models") for _ in range(requests)]
    return {body.decode().split()[0] if status == 200 else str(status) for status, body in answers}


def settle(port: int, *names: str) -> None:
    """Send requests until these gateways answer them. None may fail."""

    def settled() -> bool:
        served = serving(port)
        assert served <= {"first", "second"}, served
        return served == set(names)

    wait_until(settled)


def test_no_request_fails_while_engines_and_gateways_restart(tmp_path: Path) -> None:
    """Without an engine that is ready, requests go to the gateways nevertheless, which keep them until one is."""
    first, second = gateways = [Gateway("first"), Gateway("second")]
    with balancing(tmp_path, gateways) as port:
        settle(port, "first", "second")
        first.engine_ready = False
        settle(port, "second")
        second.engine_ready = False
        settle(port, "first", "second")
        assert ask(port, "GET", "/health")[0] == 503
        second.takes_requests = False  # it drains, and still serves what comes
        settle(port, "first")
        first.engine_ready = True
        settle(port, "first")
        second.takes_requests = second.engine_ready = True
        settle(port, "first", "second")


def test_the_balancer_refuses_requests_that_no_gateway_takes(tmp_path: Path) -> None:
    gateway = Gateway()
    with balancing(tmp_path, [gateway]) as port:
        gateway.takes_requests = False
        wait_until(lambda: serving(port) == {"503"})
        gateway.takes_requests = True
        wait_until(lambda: serving(port) == {"gateway"})


def test_a_frozen_gateway_is_left_out(tmp_path: Path) -> None:
    first, second = gateways = [Gateway("first"), Gateway("second")]
    with balancing(tmp_path, gateways) as port:
        settle(port, "first", "second")
        first.engine_ready = second.engine_ready = False
        settle(port, "first", "second")
        first.not_frozen.clear()
        wait_until(lambda: all(answered(port) for _ in range(8)))
        assert serving(port) == {"second"}


def test_a_gateway_that_answers_checks_late_is_not_left_out(tmp_path: Path) -> None:
    gateway = Gateway()
    with balancing(tmp_path, [gateway]) as port:
        gateway.health_seconds = 1.5  # longer than the time between two checks
        for _ in range(30):
            assert ask(port, "GET", "/v1/models")[0] == 200
            time.sleep(0.2)


def answered(port: int) -> bool:
    """Return whether a request is answered within a second."""
    with suppress(TimeoutError):
        return ask(port, "GET", "/v1/models", seconds=1.0)[0] == 200
    return False
