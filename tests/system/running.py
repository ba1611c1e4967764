"""Real processes for system tests: gateways, a scheduler and a scripted worker, and a stand-in for their supervisor.

Everything lives in a short temporary folder (paths of ipc sockets are limited) and ends with the test, also if the
test itself is killed.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from quire.supervisor import is_healthy
from services.gateway.backend import Backend
from services.gateway.engine_request import EngineRequest
from shared.protocol import FinishReason, Sampling, Snapshot
from tests.quire.serving import free_ports
from tests.scripted import Script
from tests.text.vocabulary import write_model_folder

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 20.0  # seconds; reached only by tests that fail
UNSTEADY = os.pathsep.join([str(ROOT / "tests/system/unsteady"), str(ROOT)])  # a PYTHONPATH, see there


class Child:
    """A process that is started again when it ends, until `stop`. `{life}` in its arguments counts the starts."""

    def __init__(self, name: str, folder: Path, argv: Sequence[str]) -> None:
        self.name = name
        self.restart = True
        self.lives = 0
        self.status: int | None = None  # of the last life that ended
        self.argv = argv
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
        self._keeper = asyncio.create_task(self._keep())
        await self._started.wait()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def ended(self) -> int:
        """Waits for the process to end, if it is not to be restarted; its exit status."""
        assert self._keeper is not None
        await asyncio.wait_for(self._keeper, PATIENCE)
        assert self.status is not None
        return self.status

    async def stop(self) -> None:
        self.restart = False
        if self._keeper is None:
            return
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        await self._keeper
        print(f"--- {self.name}\n{self.log}")

    async def _keep(self) -> None:
        while self.restart or not self.lives:
            with self._log.open("a") as log:
                argv = [part.format(life=self.lives) for part in self.argv]
                self._process = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=ROOT, stderr=log)
            self.lives += 1
            self._started.set()
            self.status = await self._process.wait()


class Engine:
    """A scheduler and its worker, and their addresses: over ipc, or over tcp at two free ports."""

    def __init__(self, folder: Path, script: Script, flags: Sequence[str], *, tcp: bool = False) -> None:
        self.folder = folder
        places = (f"tcp://127.0.0.1:{port}" for port in free_ports(2)) if tcp else None
        self.address, self.workers = places or (f"ipc://{folder}/gateways.sock", f"ipc://{folder}/workers.sock")
        workers = self.workers
        (folder / "script.json").write_bytes(msgspec.json.encode(script))
        me = f"--supervisor={os.getpid()}"
        addresses = [f"--gateways={self.address}", f"--workers={workers}"]
        self.scheduler = Child("scheduler", folder, ["-m", "services.scheduler", *addresses, me, *flags])
        given = [f"--scheduler={workers}", f"--script={folder}/script.json", "--life={life}", me]
        self.worker = Child("worker", folder, ["tests/scripted.py", *given])


class Gateway(Child):
    """A gateway before some engines, on a port that the system chooses when it starts."""

    def __init__(self, folder: Path, engines: Sequence[str], flags: Sequence[str], name: str = "gateway") -> None:
        model = write_model_folder(folder / "model")
        places = [f"--model={model}", "--served-model-name=tiny", "--host=127.0.0.1", "--port=0"]
        given = [*places, *(f"--engines={address}" for address in engines), f"--supervisor={os.getpid()}", *flags]
        super().__init__(name, folder, ["-m", "services.gateway", *given])
        self.port = 0  # once it is healthy

    async def healthy(self) -> bool:
        """Whether /health says so."""
        said = re.findall(r"listening on http://127\.0\.0\.1:(\d+)", self.log)
        self.port = int(said[-1]) if said else 0
        return self.port > 0 and await is_healthy("127.0.0.1", self.port)

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
    script: Script | None = None, *flags: str, worker: bool = True, tcp: bool = False
) -> AsyncIterator[Engine]:
    """A running engine, for the time of the block; `flags` are the scheduler's."""
    folder = Path(tempfile.mkdtemp(prefix="q"))
    made = Engine(folder, script or Script(), flags, tcp=tcp)
    try:
        await made.scheduler.start()
        if worker:
            await made.worker.start()
        yield made
    finally:
        await made.worker.stop()
        await made.scheduler.stop()
        shutil.rmtree(folder)


@asynccontextmanager
async def serving(
    script: Script | None = None, *flags: str, tcp: bool = False
) -> AsyncIterator[tuple[Engine, Backend]]:
    """A running engine and a gateway's backend that is connected to it."""
    async with engine(script, *flags, tcp=tcp) as made, Backend([made.address]) as backend:
        await until(backend.ready)
        yield made, backend


@asynccontextmanager
async def gateway(made: Engine, *flags: str, name: str = "gateway") -> AsyncIterator[Gateway]:
    """A running gateway before an engine, for the time of the block; healthy at its beginning."""
    front = Gateway(made.folder, [made.address], flags, name)
    try:
        await front.start()
        await until(front.healthy)
        yield front
    finally:
        await front.stop()


@asynccontextmanager
async def server(script: Script, *flags: str, front: Sequence[str] = ()) -> AsyncIterator[Server]:
    """A whole server; `flags` are the scheduler's, those of `front` the gateway's."""
    async with engine(script, *flags) as made, gateway(made, *front) as found:
        yield Server(made, found)


async def until(holds: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = PATIENCE) -> None:
    """Waits until something holds."""
    async with asyncio.timeout(seconds):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


def snapshot(backend: Backend) -> Snapshot:
    """Of the only engine."""
    (status,) = backend.statuses().values()
    return status.snapshot


async def rest(backend: Backend) -> Snapshot:
    """Waits until the only engine says, from now on, that it holds nothing and all its blocks are free."""
    last = next(iter(backend.statuses().values()), None)

    def at_rest() -> bool:
        status = next(iter(backend.statuses().values()), None)
        if status is None or status is last:
            return False
        found = status.snapshot
        return found.running == found.waiting == found.in_flight == 0 and found.blocks_free == found.blocks

    await until(at_rest)
    return snapshot(backend)


class Output(Struct):
    """What one sample came to."""

    tokens: list[int] = []
    finish: FinishReason | None = None
    detail: str = ""


async def collect(request: EngineRequest, n: int = 1) -> list[Output]:
    """Return the outputs of all samples of a request, at their ends."""
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
    """One greedy sample of at most `count` tokens, or up to the token `stop`."""
    sampling = Sampling(max_tokens=count, seed=0, temperature=0.0, stop_token_ids=[] if stop is None else [stop])
    async with backend.submit(array("i", prompt), sampling) as request:
        return (await collect(request))[0]
