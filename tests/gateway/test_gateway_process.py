"""Tests of the gateway's process: its start, clients that leave, and its stop. Its engine is a thread here."""

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import zmq

from services.gateway.body import CONTINUE
from services.gateway.config import GatewayConfig
from shared.protocol import (
    VERSION,
    Abort,
    Accepted,
    FinishReason,
    Hello,
    ModelInfo,
    Progress,
    ProgressRow,
    Refusal,
    Refused,
    Snapshot,
    Status,
    Submit,
    Welcome,
    decode_from_gateway,
    encode,
)
from tests.gateway.fakes import events, ids, texts
from tests.ports import free_ports
from tests.text.vocabulary import make_tokenizer, write_model_folder
from tests.waiting import PATIENCE, wait_until

FACTS = ModelInfo("tiny", "Tiny", "float32", 256, make_tokenizer().vocab_size, "f")


class Engine(threading.Thread):
    """Accepts each `Submit` and answers with one token at once, and with its end once `go_on` is set.

    With an `answer`, it says that instead, after `delay` seconds.
    """

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.aborted: queue.Queue[int] = queue.Queue()
        self.go_on = threading.Event()
        self.answer: Callable[[int], list[bytes]] | None = None  # what is sent, by the id of the request
        self.delay = 0.0
        self._over = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._waiting: list[tuple[bytes, int]] = []
        self._gateways: set[bytes] = set()

    def run(self) -> None:
        while not self._over.is_set():
            while self._socket.poll(20):
                gateway, data = self._socket.recv_multipart()
                self._take(gateway, decode_from_gateway(data))
            for gateway in self._gateways:
                self._send(gateway, Status(True, False, Snapshot()))
            if self.go_on.is_set():
                for gateway, id in self._waiting:
                    self._row(gateway, ProgressRow(id, 0, 1, ids(" two"), finish_reason=FinishReason.LENGTH))
                self._waiting = []
        self._context.destroy(linger=0)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _take(self, gateway: bytes, message: Any) -> None:
        match message:
            case Hello():
                self._gateways.add(gateway)
                self._send(gateway, Welcome(VERSION, "0", "boot", FACTS, 256, 8))
            case Submit() if self.answer is not None:
                time.sleep(self.delay)
                for body in self.answer(message.id):
                    self._socket.send_multipart([gateway, body])
            case Submit():
                self._send(gateway, Accepted([message.id]))
                self._waiting.append((gateway, message.id))
                self._row(gateway, ProgressRow(message.id, 0, 0, ids("one")))
            case Abort():
                self._waiting = [one for one in self._waiting if one[1] != message.id]
                self.aborted.put(message.id)

    def _row(self, gateway: bytes, row: ProgressRow) -> None:
        self._send(gateway, Progress([row]))

    def _send(self, gateway: bytes, message: Any) -> None:
        self._socket.send_multipart([gateway, encode(message)])


class Server:
    """A gateway process on its own port."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process, self.port = process, port
        self.connections: list[http.client.HTTPConnection] = []

    def open(self, body: dict[str, Any] | None = None, path: str = "/health") -> http.client.HTTPResponse:
        """Send a GET, or a POST of `body`. Return the response with its body unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        self.connections.append(connection)
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def wait_for_status(self, status: int) -> None:
        """Wait until /health has this status."""

        def has_status() -> bool:
            try:
                return self.open().status == status
            except ConnectionError:
                return False

        wait_until(has_status)


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "services.gateway", "--model", str(folder), "--host", "127.0.0.1", *flags]


@contextmanager
def gateway(folder: Path, *flags: str, port: int | None = None) -> Iterator[Server]:
    port = port or free_ports(1)[0]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    argv = command(folder, "--port", str(port), *flags)
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        server = Server(process, port)
        try:
            yield server
        finally:
            process.kill()
            for connection in server.connections:
                connection.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(f"ipc://{tmp_path}/g.sock")
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def server(folder: Path, tmp_path: Path, engine: Engine) -> Iterator[Server]:
    with gateway(folder, "--engines", f"ipc://{tmp_path}/g.sock") as server:
        server.wait_for_status(200)
        yield server


@pytest.fixture
def impatient(folder: Path, tmp_path: Path, engine: Engine) -> Iterator[Server]:
    """Run a gateway that hardly waits for an engine to come back."""
    with gateway(folder, "--engines", f"ipc://{tmp_path}/g.sock", "--engine-loss-timeout=0.5") as server:
        server.wait_for_status(200)
        yield server


STREAM: dict[str, Any] = {"prompt": "hi", "stream": True}


def read_event(response: http.client.HTTPResponse) -> str:
    line = response.readline().decode()
    assert response.readline() == b"\n"
    return line


def refusal(argv: list[str]) -> str:
    """Return the one line on stderr of a gateway that does not start."""
    result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    return line


def test_a_port_in_use_is_one_line(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refusal(command(folder, "--port", port))
    assert "in use" in line
    assert port in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--engines", "carrier-pigeon"], "carrier-pigeon"),
        (["--max-body-size", "0"], "--max-body-size"),
        (["--generation-config", "auto", "--chat-template", "/nowhere.jinja"], "/nowhere.jinja"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_settings_are_one_line(folder: Path, flags: list[str], words: str) -> None:
    assert words in refusal(command(folder, "--port", str(free_ports(1)[0]), *flags))


def test_without_an_engine_it_is_unhealthy_but_stops_well(folder: Path, tmp_path: Path) -> None:
    with gateway(folder, "--engines", f"ipc://{tmp_path}/nobody.sock", "--engine-loss-timeout=0.5") as server:
        server.wait_for_status(503)
        assert server.open({"prompt": "x"}, "/v1/completions").status == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0


def get_version(connection: socket.socket) -> None:
    connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200
    response.read()


def test_an_idle_connection_is_kept_for_longer_than_proxies_keep_theirs(folder: Path, tmp_path: Path) -> None:
    """GTW-08: and no longer than --keep-alive-timeout says."""
    assert GatewayConfig().keep_alive_timeout >= 75, "proxies close theirs after 60 to 75 s, and must be the first to"
    engines = ("--engines", f"ipc://{tmp_path}/nobody.sock")
    for flags, kept in (((), True), (("--keep-alive-timeout=0.5",), False)):
        with gateway(folder, *engines, *flags) as server:
            server.wait_for_status(503)
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
                get_version(connection)
                connection.settimeout(1.5 if kept else PATIENCE / 3)
                with pytest.raises(TimeoutError) if kept else nullcontext():
                    assert connection.recv(1) == b""
                if kept:
                    connection.settimeout(PATIENCE)
                    get_version(connection)


def test_a_client_that_leaves_is_noticed(server: Server, engine: Engine) -> None:
    response = server.open(STREAM, "/v1/completions")
    assert '"one"' in read_event(response)
    server.connections[-1].sock.shutdown(socket.SHUT_RDWR)
    assert engine.aborted.get(timeout=PATIENCE) == 0


def posted(server: Server, body: dict[str, Any]) -> socket.socket:
    """Return a connection that has sent a completion request and shut down its sending side."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    connection.sendall(head.encode() + data)
    connection.shutdown(socket.SHUT_WR)
    return connection


@pytest.mark.parametrize("body", [STREAM, {"prompt": "hi"}])
def test_a_client_that_only_ends_its_sending_side_is_answered(
    server: Server, engine: Engine, body: dict[str, Any]
) -> None:
    """HTTP-03: on uvloop."""
    engine.go_on.set()
    for _ in range(10):
        with posted(server, body) as connection, connection.makefile("rb") as file:
            answer = file.read()
        answer = answer.removeprefix(CONTINUE)  # which asks whether the client is there, if the answer takes long
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b" two" in answer
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if "stream" in body else b"}")
    assert engine.aborted.empty()


@pytest.mark.parametrize("body", [STREAM, {"prompt": "hi"}])
def test_a_client_that_is_gone_is_noticed_without_a_token(server: Server, engine: Engine, body: dict[str, Any]) -> None:
    """HTTP-03: its connection looks like that of a client that still listens."""
    with posted(server, body):
        pass
    assert engine.aborted.get(timeout=PATIENCE) == 0
    assert server.open({"prompt": "x" * 1000}, "/v1/completions").status == 400, "the gateway goes on"


def test_what_strangers_send_cannot_forge_log_lines(folder: Path, tmp_path: Path) -> None:
    """HTTP-07."""
    with gateway(folder, "--engines", f"ipc://{tmp_path}/nobody.sock", "--enable-log-requests") as server:
        server.wait_for_status(503)
        paths = [b"/%0aFAKE%1b[2J", b"/%0d%0aFAKE", b"/%E2%80%A8FAKE", b"/%C2%9B2JFAKE"]
        for data in [*(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in paths), b"\x1b[2J\n"]:
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
                connection.sendall(data)
                assert connection.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr is not None
        lines = server.process.stderr.read().split("\n")
    assert sum("FAKE" in line for line in lines) == len(paths)
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith(("FAKE", "\x1b")) for line in lines)


def test_sigterm_lets_a_stream_finish_and_refuses_new_ones(server: Server, engine: Engine) -> None:
    response = server.open(STREAM, "/v1/completions")
    read_event(response)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_status(503)
    refused = server.open({"prompt": "x"}, "/v1/completions")
    assert (refused.status, refused.headers["Connection"]) == (503, "close")
    engine.go_on.set()
    assert response.read().decode().strip().endswith("data: [DONE]")
    assert server.process.wait(PATIENCE) == 0


def test_the_second_sigterm_tells_the_streams(server: Server, engine: Engine) -> None:
    response = server.open(STREAM, "/v1/completions")
    read_event(response)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_status(503)
    server.process.send_signal(signal.SIGTERM)
    error, done = response.read().decode().strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "ServiceUnavailableError"
    assert done == "data: [DONE]"
    assert engine.aborted.get(timeout=PATIENCE) == 0
    assert server.process.wait(PATIENCE) == 0


def test_a_drain_has_an_end(folder: Path, tmp_path: Path, engine: Engine) -> None:
    with gateway(folder, "--engines", f"ipc://{tmp_path}/g.sock", "--drain-timeout", "0.2") as server:
        server.wait_for_status(200)
        response = server.open(STREAM, "/v1/completions")
        read_event(response)
        server.process.send_signal(signal.SIGTERM)
        assert "shutting down" in response.read().decode()
        assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_refusal_has_its_status_and_the_time_to_come_back(server: Server, engine: Engine, stream: bool) -> None:
    """HTTP-05: a scheduler that answers after 0.6 s with a full queue."""
    engine.answer, engine.delay = lambda id: [encode(Refused(id, Refusal.QUEUE_FULL, "full", 6.5))], 0.6
    response = server.open(STREAM | {"stream": stream}, "/v1/completions")
    assert (response.status, response.headers["Retry-After"]) == (429, "7")
    assert json.loads(response.read())["error"]["message"] == "full"


def test_an_engine_that_dies_before_it_accepts_is_a_status(impatient: Server, engine: Engine) -> None:
    """HTTP-05: the same as without a stream."""
    submitted = threading.Event()

    def note(_: int) -> list[bytes]:
        submitted.set()
        return []

    engine.answer = note
    stopping = threading.Thread(target=lambda: (submitted.wait(PATIENCE), engine.stop()))
    stopping.start()
    response = impatient.open(STREAM, "/v1/completions")
    stopping.join()
    assert response.status == 503
    assert "no engine was ready for 0.5 s" in json.loads(response.read())["error"]["message"]


def test_the_headers_of_an_accepted_stream_do_not_wait_for_a_token(server: Server, engine: Engine) -> None:
    """HTTP-05: the engine's acceptance is enough."""
    engine.answer = lambda id: [encode(Accepted([id]))]
    assert server.open(STREAM, "/v1/completions").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_says_what_is_no_message_is_given_up_and_nobody_waits_for_it(
    server: Server, engine: Engine, stream: bool
) -> None:
    """PRC-26: values out of their range are no message in this direction either. What they should have said is lost, so
    the request is submitted again on a new connection.
    """
    engine.go_on.set()

    def answer(id: int) -> list[bytes]:
        engine.answer = None  # the next time it accepts
        return [encode(Refused(id, Refusal.QUEUE_FULL, "full", float("nan")))]

    engine.answer = answer
    response = server.open(STREAM | {"stream": stream}, "/v1/completions")
    assert response.status == 200
    body = response.read().decode()
    assert (texts(events(body))[0] if stream else json.loads(body)["choices"][0]["text"]) == "one two"


def test_an_engine_that_dies_under_a_stream_is_told(impatient: Server, engine: Engine) -> None:
    response = impatient.open(STREAM, "/v1/completions")
    read_event(response)
    engine.stop()
    error, done = response.read().decode().strip().split("\n\n")
    message = json.loads(error.removeprefix("data: "))["error"]
    assert message["code"] == 500
    assert "the engine was lost, and no engine was ready for 0.5 s" in message["message"]
    assert done == "data: [DONE]"


def test_two_gateways_share_a_port_if_they_are_told_to(folder: Path, tmp_path: Path, engine: Engine) -> None:
    port, flags = free_ports(1)[0], ("--engines", f"ipc://{tmp_path}/g.sock", "--reuse-port")
    with gateway(folder, *flags, port=port) as first:
        first.wait_for_status(200)
        with gateway(folder, *flags, port=port) as second:
            assert second.process.stderr is not None
            while "listening" not in second.process.stderr.readline():
                assert second.process.poll() is None
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(PATIENCE) == 0
            second.wait_for_status(200)
