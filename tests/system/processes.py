"""Real processes for system tests: gateways, a scheduler and a scripted worker, supervised by the test.

They use a temporary folder with a short path (paths of ipc sockets are limited) and end with the test, even if the test
is killed.
"""

import asyncio
import math
import os
import re
import shutil
import signal
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from quire.supervisor import is_healthy
from services.gateway.backend import Backend
from services.gateway.engine_request import EngineRequest
from shared.curve import load_connection_keys
from shared.protocol import FinishReason, Sampling, Snapshot
from tests.ports import free_ports
from tests.scripted_worker import Script
from tests.text.vocabulary import write_model_folder
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parent.parent.parent
FAULT_INJECTION_PATH = os.pathsep.join([str(ROOT / "tests/system/fault_injection"), str(ROOT)])
"""A PYTHONPATH with which Python processes load tests/system/fault_injection/sitecustomize.py."""


class Child:
    """A process that is restarted when it ends, until `stop`. `{life}` in its arguments counts the starts.

    `argv` are Python's arguments. The words of `entrance` come before Python, such as those that enter a namespace.
    """

    def __init__(self, name: str, folder: Path, argv: Sequence[str], entrance: Sequence[str] = ()) -> None:
        self.name = name
        self.restart = True
        self.lives = 0
        self.status: int | None = None  # of the last process that ended
        self.argv = argv
        self._command = [*entrance, sys.executable]
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._started = asyncio.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    async def start(self) -> None:
        self._started.clear()
        self._keeper = asyncio.create_task(self._keep())
        await self._started.wait()

    @asynccontextmanager
    async def absent(self, number: int = signal.SIGKILL) -> AsyncIterator[None]:
        """Have no process for the block: signal it, wait for its end, and start the next one after the block."""
        self.restart = False
        self.signal(number)
        await self.ended()
        yield
        self.restart = True
        await self.start()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait for the end of the process, which must not be restarted, and return its exit status."""
        assert self._keeper is not None
        await asyncio.wait_for(self._keeper, PATIENCE)
        assert self.status is not None
        return self.status

    async def stop(self) -> None:
        self.restart = False
        if self._keeper is None:
            return
        while not self._keeper.done():  # the next process may be starting just now
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            await asyncio.wait([self._keeper], timeout=0.1)
        await self._keeper
        print(f"--- {self.name}\n{self.log}")

    async def _keep(self) -> None:
        while self.restart or not self.lives:
            with self._log.open("a") as log:
                argv = [part.format(life=self.lives) for part in self.argv]
                self._process = await asyncio.create_subprocess_exec(*self._command, *argv, cwd=ROOT, stderr=log)
            self.lives += 1
            self._started.set()
            self.status = await self._process.wait()


class Engine:
    """A scheduler and its worker, and their addresses: over ipc, or over tcp at two free ports, if wanted with keys.

    The worker is a group of ranks of these tensor and pipeline parallel `sizes`; `worker` is the first of them.
    """

    def __init__(
        self,
        folder: Path,
        script: Script,
        flags: Sequence[str],
        *,
        tcp: bool = False,
        keys: str = "",
        sizes: tuple[int, int] = (1, 1),
    ) -> None:
        self.folder = folder
        self._keys = keys
        self._pace = folder / "pace"
        addresses = (f"tcp://127.0.0.1:{port}" for port in free_ports(2)) if tcp else None
        self.address, self.workers = addresses or (f"ipc://{folder}/gateways.sock", f"ipc://{folder}/workers.sock")
        workers = self.workers
        (folder / "script.json").write_bytes(msgspec.json.encode(script))
        supervisor = f"--supervisor={os.getpid()}"
        sockets = [f"--gateways={self.address}", f"--workers={workers}", f"--zmq-keys={keys}"]
        self.scheduler = Child("scheduler", folder, ["-m", "services.scheduler", *sockets, supervisor, *flags])
        self.ranks = [self.rank(rank, *sizes) for rank in range(math.prod(sizes))]
        self.worker = self.ranks[0]

    @contextmanager
    def slowed(self, seconds: float = 0.05) -> Iterator[None]:
        """Let each step take so long for the block, so that a stream outlasts what a test does to it meanwhile."""
        new, former = self._pace.with_suffix(".new"), self._pace.exists()
        new.write_text(str(seconds))
        new.rename(self._pace)
        try:
            yield
        finally:
            if not former:
                self._pace.unlink()

    def rank(self, rank: int, tensor_parallel_size: int, pipeline_parallel_size: int, name: str = "") -> Child:
        """Return a worker that is not started yet."""
        arguments = [f"--scheduler={self.workers}", f"--script={self.folder}/script.json", "--life={life}"]
        arguments.append(f"--pace={self._pace}")
        arguments += [f"--supervisor={os.getpid()}", f"--zmq-keys={self._keys}", f"--rank={rank}"]
        arguments.append(f"--tensor-parallel-size={tensor_parallel_size}")
        arguments.append(f"--pipeline-parallel-size={pipeline_parallel_size}")
        name = name or (f"worker {rank}" if tensor_parallel_size * pipeline_parallel_size > 1 else "worker")
        return Child(name, self.folder, ["tests/scripted_worker.py", *arguments])


class Gateway(Child):
    """A gateway in front of engines, on a port that the system chooses when it starts."""

    def __init__(self, folder: Path, engines: Sequence[str], flags: Sequence[str], name: str = "gateway") -> None:
        model = write_model_folder(folder / "model")
        fixed = [f"--model={model}", "--served-model-name=tiny", "--host=127.0.0.1", "--port=0"]
        arguments = [*fixed, *(f"--engines={address}" for address in engines), f"--supervisor={os.getpid()}", *flags]
        super().__init__(name, folder, ["-m", "services.gateway", *arguments])
        self.port = 0  # once it is healthy

    async def healthy(self, num_engines: int = 1) -> bool:
        """Return whether /health answers 200 because that many engines are ready."""
        ports = re.findall(r"listening on http://127\.0\.0\.1:(\d+)", self.log)
        self.port = int(ports[-1]) if ports else 0
        return self.port > 0 and await is_healthy(("127.0.0.1", self.port), num_engines)

    async def unhealthy(self) -> bool:
        return not await self.healthy()


class Server(Struct):
    """A gateway and the engine behind it."""

    engine: Engine
    gateway: Gateway

    @property
    def port(self) -> int:
        return self.gateway.port


@asynccontextmanager
async def engine(
    script: Script | None = None,
    *flags: str,
    worker: bool = True,
    tcp: bool = False,
    keys: str = "",
    sizes: tuple[int, int] = (1, 1),
) -> AsyncIterator[Engine]:
    """Run an engine for the block; `flags` are the scheduler's, `sizes` the tensor and pipeline parallel ones."""
    folder = Path(tempfile.mkdtemp(prefix="q"))
    running = Engine(folder, script or Script(), flags, tcp=tcp, keys=keys, sizes=sizes)
    try:
        await running.scheduler.start()
        for rank in running.ranks if worker else ():
            await rank.start()
        yield running
    finally:
        for rank in running.ranks:
            await rank.stop()
        await running.scheduler.stop()
        shutil.rmtree(folder)


@asynccontextmanager
async def serving(
    script: Script | None = None,
    *flags: str,
    tcp: bool = False,
    keys: str = "",
    loss_timeout: float = 60.0,
    sizes: tuple[int, int] = (1, 1),
) -> AsyncIterator[tuple[Engine, Backend]]:
    """Run an engine; yield it and a gateway's backend that is connected to it."""
    async with (
        engine(script, *flags, tcp=tcp, keys=keys, sizes=sizes) as running,
        Backend([running.address], loss_timeout=loss_timeout, keys=load_connection_keys(keys, "gateway")) as backend,
    ):
        await until(backend.ready)
        yield running, backend


@asynccontextmanager
async def gateway(behind: Engine, *flags: str, name: str = "gateway") -> AsyncIterator[Gateway]:
    """Run a gateway in front of an engine for the block; yield it once it is healthy."""
    front = Gateway(behind.folder, [behind.address], flags, name)
    try:
        await front.start()
        await until(front.healthy)
        yield front
    finally:
        await front.stop()


@asynccontextmanager
async def gateways(count: int, behind: Sequence[Engine], *flags: str) -> AsyncIterator[list[Gateway]]:
    """Run gateways in front of some engines for the block; yield them once each reaches all of these."""
    addresses = [one.address for one in behind]
    fronts = [Gateway(behind[0].folder, addresses, flags, f"gateway {number}") for number in range(count)]
    try:
        for front in fronts:
            await front.start()
        for front in fronts:
            await until(partial(front.healthy, len(behind)))
        yield fronts
    finally:
        for front in fronts:
            await front.stop()


@asynccontextmanager
async def server(script: Script, *flags: str, front: Sequence[str] = ()) -> AsyncIterator[Server]:
    """Run a whole server; `flags` are the scheduler's, `front` the gateway's."""
    async with engine(script, *flags) as behind, gateway(behind, *front) as gate:
        yield Server(behind, gate)


def snapshot(backend: Backend) -> Snapshot:
    """Return the last snapshot of the only engine."""
    (status,) = backend.statuses().values()
    return status.snapshot


async def rest(backend: Backend) -> Snapshot:
    """Wait for a new status of the only engine that says that it holds nothing, and return its snapshot."""
    last = next(iter(backend.statuses().values()), None)

    def at_rest() -> bool:
        status = next(iter(backend.statuses().values()), None)
        if status is None or status is last:
            return False
        now = status.snapshot
        return now.running == now.waiting == now.in_flight == 0 and now.blocks_free == now.blocks

    await until(at_rest)
    return snapshot(backend)


class Output(Struct):
    """The tokens and the end of a sample."""

    tokens: list[int] = []
    finish: FinishReason | None = None
    detail: str = ""


async def collect(request: EngineRequest, n: int = 1) -> list[Output]:
    """Return all samples of a request, run to their ends."""
    outputs = [Output() for _ in range(n)]
    while any(output.finish is None for output in outputs):
        for row in await request.rows():
            output = outputs[row.sample]
            assert output.finish is None
            assert not row.tokens or row.position == len(output.tokens)
            output.tokens += row.tokens
            output.finish, output.detail = row.finish_reason, row.detail
    return outputs


async def complete(backend: Backend, prompt: Sequence[int], count: int, *, stop: int | None = None) -> Output:
    """Run a greedy sample of at most `count` tokens, or up to the token `stop`."""
    sampling = Sampling(max_tokens=count, seed=0, temperature=0.0, stop_token_ids=[] if stop is None else [stop])
    async with backend.submit(array("i", prompt), sampling) as request:
        return (await collect(request))[0]
