"""Tests deploy/haproxy.cfg on a real HAProxy, if it is installed, in front of a gateway that echoes its requests."""

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports

CONFIG = (Path(__file__).resolve().parents[2] / "deploy/haproxy.cfg").read_text()
HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed")


class Gateway(BaseHTTPRequestHandler):
    """Answers with the path and the length of the body, after reading all of it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        length = len(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        answer = f"{self.path} {length}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


def replace_line(text: str, pattern: str, new: str) -> str:
    """Return `text` with the one line replaced that matches."""
    replaced, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    assert count == 1, pattern
    return replaced


@pytest.fixture(scope="module")
def balancer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the balancer's port. Only names, ports and one timeout differ from the container's configuration."""
    assert HAPROXY is not None
    front, monitoring = free_ports(2)
    with ExitStack() as stack:
        gateway = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Gateway))
        thread = threading.Thread(target=gateway.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(gateway.shutdown)
        text = replace_line(CONFIG, r"bind :8000$", f"bind 127.0.0.1:{front}")
        text = replace_line(text, r"bind :8404$", f"bind 127.0.0.1:{monitoring}")
        text = replace_line(
            text, r"server-template .*", f"server gateway 127.0.0.1:{gateway.server_port} init-addr last,libc"
        )
        text = replace_line(text, r"timeout http-request .*", "timeout http-request 1s")
        file = tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"
        file.write_text(text)
        process = subprocess.Popen([HAPROXY, "-W", "-db", "-f", str(file)], stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        deadline = time.monotonic() + 30
        while ask(front, "GET", "/health")[0] != 200:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield front


def ask(port: int, method: str, target: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Return status and body of the answer; status 0 if nobody listens."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
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
    assert ask(balancer, "GET", target) == (200, f"{target} 0".encode())


@pytest.mark.parametrize("length", [0, 100, 100_000, 32 * 1024 * 1024])
def test_bodies_of_any_length_pass(balancer: int, length: int) -> None:
    assert ask(balancer, "POST", "/v1/completions", bytes(length)) == (200, f"/v1/completions {length}".encode())


@pytest.mark.parametrize("length", [9_000, 60_000])
@pytest.mark.parametrize("name", ["Cookie", "Authorization"])
def test_long_headers_pass(balancer: int, name: str, length: int) -> None:
    """HTTP-01."""
    assert ask(balancer, "GET", "/v1/models", **{name: "a" * length}) == (200, b"/v1/models 0")


def test_a_body_that_does_not_come_times_out(balancer: int) -> None:
    with socket.create_connection(("127.0.0.1", balancer), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        response = HTTPResponse(client)
        response.begin()
        with response:
            assert response.status == 408
            assert b"did not come in time" in response.read()
