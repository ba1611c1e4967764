"""Measures how many chunks one gateway process writes per second of its core.

    python -m benchmarks.gateway [--streams 256 32 1] [--seconds 10]

A real gateway with the embedded model's tokenizer has the first core to itself. This process, on the second, is both
the engine behind it (the scheduler's side of the wire, each step one token for each request) and its clients, which
stream completions over bare sockets and only count what comes. Each number of streams is measured as fast as they go
and at `--rate` steps a second; the engine is never more than `--ahead` steps ahead of what the clients have. Tokens of
a stream that wait together make one chunk, so tokens and chunks are counted apart. CPU time is that of the gateway's
whole process, by the kernel's clock.
"""

import argparse
import http.client
import itertools
import math
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import zmq

from shared import protocol as wire
from shared.hub.checkpoint import locate
from shared.hub.embedded import EMBEDDED
from shared.text.tokenizer import Tokenizer
from shared.transport import Listener, listen

ROOT = Path(__file__).resolve().parents[1]
TEXT, CHUNK = b"~", b"["
"""The text of every token, and a byte of `"choices":[`, which each chunk has once. Nothing else has them, and two reads
cannot split a single byte."""

ENDLESS = 1_000_000_000  # tokens
BODY = msgspec.json.encode({"prompt": [1, 2, 3], "max_tokens": ENDLESS // 2, "ignore_eos": True, "stream": True})
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
WARM = 1.0  # seconds before measuring
BEAT = 0.25  # seconds between two heartbeats
PATIENCE = 30.0  # seconds


class Engine:
    """The scheduler's side of the wire, to one gateway. `running` are the unfinished requests."""

    def __init__(self, listener: Listener, token: int) -> None:
        self.running: set[int] = set()
        self.steps = 0  # since there was nothing to run
        self._listener = listener
        self._token = token
        self._gateway = b""
        self._spoke = 0.0

    def step(self) -> None:
        """Send the next token of every request."""
        self._say(wire.Progress([wire.ProgressRow(id, 0, self.steps, [self._token]) for id in self.running]))
        self.steps += 1

    def attend(self) -> None:
        """Receive what the gateway sent, and send a heartbeat."""
        while message := self._listener.receive():
            match wire.decode_from_gateway(message.body):
                case wire.Hello():
                    self._gateway = message.peer
                    model = wire.ModelInfo(EMBEDDED, "Scripted", "none", ENDLESS, 49152, "scripted")
                    self._say(wire.Welcome(wire.VERSION, "scripted", "0", model, ENDLESS, 1024))
                case wire.Submit(id=id):
                    self.running.add(id)
                    self._say(wire.Accepted([id]))
                case wire.Abort(id=id):
                    self.running.discard(id)
        if self._gateway and time.monotonic() - self._spoke > BEAT:
            self._spoke = time.monotonic()
            self._say(wire.Status(True, False, wire.Snapshot(running=len(self.running))))

    def until(self, holds: Callable[[], bool]) -> None:
        """Serve the gateway until a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                raise SystemExit("the gateway does not do what it should")
            self.attend()
            time.sleep(0.005)

    def _say(self, message: msgspec.Struct) -> None:
        self._listener.send(self._gateway, wire.encode(message))


class Clients:
    """Client connections with one stream each, and the counts of what they received."""

    def __init__(self, port: int, count: int) -> None:
        self.tokens = self.chunks = 0
        self._epoll = select.epoll()
        self._sockets = {}
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(REQUEST)
            self._epoll.register(connection, select.EPOLLIN)
            self._sockets[connection.fileno()] = connection

    def __len__(self) -> int:
        return len(self._sockets)

    def read(self, wait: float) -> None:
        """Count what has arrived; wait at most `seconds` if nothing has."""
        for number, _ in self._epoll.poll(wait):
            data = self._sockets[number].recv(65536)
            if not data:
                raise SystemExit("the gateway ended a stream")
            self.tokens += data.count(TEXT)
            self.chunks += data.count(CHUNK)

    def close(self) -> None:
        self._epoll.close()
        for one in self._sockets.values():
            one.close()


@contextmanager
def gateway(core: int, model: Path, engine: str) -> Iterator[tuple[int, int]]:
    """Run a gateway process on one core; yield its pid and port."""
    names = (f"--model={model}", f"--served-model-name={EMBEDDED}", "--host=127.0.0.1", "--port=0")
    argv = (sys.executable, "-m", "services.gateway", *names, f"--engines={engine}", f"--supervisor={os.getpid()}")
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        os.sched_setaffinity(process.pid, {core})  # it has no threads yet, and later ones inherit this
        try:
            assert process.stderr is not None
            port = next(int(at[1]) for line in process.stderr if (at := re.search(r"listening.*:(\d+)", line)))
            yield process.pid, port
        finally:
            process.terminate()


def healthy(port: int) -> bool:
    """Return whether the gateway would take requests."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200


def drive(engine: Engine, clients: Clients, seconds: float, ahead: int, rate: float) -> None:
    """Make `rate` steps per second for `seconds`, or as many as `ahead` allows."""
    due = now = time.monotonic()
    end = now + seconds
    while now < end:
        engine.attend()
        if now >= due and clients.tokens >= (engine.steps + 1 - ahead) * len(clients):
            engine.step()
            due += 1 / rate
        else:
            clients.read(due - now if due > now else BEAT)
        now = time.monotonic()


def measure(engine: Engine, clients: Clients, pid: int, seconds: float, ahead: int, rate: float) -> str:
    """Return a row of the table."""

    def read() -> tuple[float, float, int, int]:
        clock = (~pid << 3) | 2  # the CPU time of a process, as the kernel numbers it: see clock_getcpuclockid(3)
        return time.monotonic(), time.clock_gettime(clock), clients.tokens, clients.chunks

    drive(engine, clients, WARM, ahead, rate)
    before = read()
    drive(engine, clients, seconds, ahead, rate)
    took, cpu, tokens, chunks = (b - a for a, b in zip(before, read(), strict=True))
    pace = "as they go" if rate == math.inf else f"{rate:g}/s"
    rates = f"{tokens / took:,.0f} | {chunks / took:,.0f} | {cpu / took:.0%}"
    costs = f"{1e6 * cpu / tokens:.1f} | {1e6 * cpu / chunks:.1f} | {tokens / cpu:,.0f} | {chunks / cpu:,.0f}"
    return f"| {len(clients)} | {pace} | {rates} | {costs} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 32, 1])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--ahead", type=int, default=1, help="steps; from 2 on, tokens share chunks")
    parser.add_argument("--rate", type=float, default=30.0, help="steps a second")
    args = parser.parse_args()
    first, second, *_ = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {second})
    model = locate("")
    token = Tokenizer.load(model).encode(TEXT.decode())[0]
    print("| streams | steps | tokens/s | chunks/s | CPU | µs a token | µs a chunk | tokens/core-s | chunks/core-s |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = f"ipc://{folder}/engine.sock"
        with listen(context, address) as listener, gateway(first, model, address) as (pid, port):
            engine = Engine(listener, token)
            engine.until(lambda: healthy(port))
            for streams, rate in itertools.product(args.streams, (math.inf, args.rate)):
                engine.steps = 0
                with closing(Clients(port, streams)) as clients:
                    engine.until(lambda: len(engine.running) == streams)  # noqa: B023
                    print(measure(engine, clients, pid, args.seconds, args.ahead, rate), flush=True)
                engine.until(lambda: not engine.running)


if __name__ == "__main__":
    main()
