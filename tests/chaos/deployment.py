"""A deployment of real processes for the matrix: two gateways, one or two engines, and gated workers of a tiny model.

It is used for many cells: `Child` starts a process again when it ends. Over tcp, each scheduler and each worker has a
network namespace of its own, and the gateways share one, so that each link can be cut.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from quire.supervisor import is_healthy
from shared.curve import make_keys
from tests.chaos.cells import Fault, Layout, Strike, Target, Transport
from tests.chaos.client import MODEL
from tests.chaos.gate import Gate
from tests.chaos.network import Link, Namespace, obstacle
from tests.chaos.workload import CHUNK, SLOTS, TOKENIZER
from tests.models.tiny_models import llama, save
from tests.ports import free_ports
from tests.system.http_client import Figures, idle
from tests.system.processes import Child
from tests.text.vocabulary import write_model_folder
from tests.waiting import until

PATIENCE = 120.0
"""Seconds for a start, or for a fault to be noticed: on a busy machine, what is silent gets half a minute more."""

STATUS_AGE = 0.5
"""Seconds after which a gateway's figures of an engine are newer, as an engine sends them four times a second."""

STEP_DELAY = 0.004
"""Seconds by which a worker delays each step, so that outputs last longer than it takes to do something to them."""

MODEL_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": TOKENIZER.eos_token_ids[0],
}
SCHEDULER_FLAGS = [
    f"--max-num-seqs={SLOTS}",
    f"--max-num-batched-tokens={CHUNK}",
    "--block-size=8",
    "--num-gpu-blocks-override=96",  # so few that sequences are preempted when all slots are in use
    "--drain-timeout=0.1",  # outputs last longer
    "--worker-timeout=5",  # several times as long as a worker is held until its requests have come
]
NUMBERS = {Fault.KILL: signal.SIGKILL, Fault.FREEZE: signal.SIGSTOP, Fault.DRAIN: signal.SIGTERM}


def write_model(folder: Path) -> Path:
    """Write a tiny random Llama that has the tokenizer of tests/text/vocabulary.py."""
    write_model_folder(folder)
    return save(llama(vocab_size=TOKENIZER.vocab_size, **MODEL_SIZES), folder)  # its config.json replaces the other


class GatedEngine(Struct):
    """A scheduler, a worker that a gate can hold, the scheduler's records, and the links if there are namespaces."""

    name: str
    address: str  # for gateways
    scheduler: Child
    worker: Child
    gate: Gate
    records: Path
    gateway_link: Link | None = None
    worker_link: Link | None = None


class EngineLosses(Struct):
    """The losses of engines that a gateway has noticed, and the seconds of silence before it did."""

    count: float
    seconds: float

    def mean_since(self, earlier: "EngineLosses") -> float | None:
        """Return the mean seconds of the losses since then; None if there were none."""
        count = self.count - earlier.count
        return (self.seconds - earlier.seconds) / count if count else None


class Gateway(Struct):
    """A gateway that listens on a Unix socket."""

    process: Child
    socket: Path


class Deployment:
    """The running processes. `gateways[0]` is the one that may fail."""

    def __init__(self, layout: Layout, folder: Path, engines: list[GatedEngine], gateways: list[Gateway]) -> None:
        self.layout = layout
        self.folder = folder
        self.engines, self.gateways = engines, gateways
        self._descriptors: dict[str, int] = {}  # of each process, when all was at rest for the first time

    @property
    def processes(self) -> list[Child]:
        of_engines = [child for engine in self.engines for child in (engine.scheduler, engine.worker)]
        return of_engines + [gateway.process for gateway in self.gateways]

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    def child(self, target: Target, engine: GatedEngine) -> Child | None:
        """Return the process that a strike is at; None if it is at a link."""
        match target:
            case Target.WORKER:
                return engine.worker
            case Target.SCHEDULER:
                return engine.scheduler
            case Target.GATEWAY:
                return self.gateways[0].process
        return None

    async def strike(self, strike: Strike, engine: GatedEngine) -> None:
        """Let a part fail: of this engine, unless it is the gateway."""
        if child := self.child(strike.target, engine):
            child.signal(NUMBERS[strike.fault])
        else:
            await self._link(strike.target, engine).cut()

    async def repair(self, strike: Strike, engine: GatedEngine) -> None:
        """Thaw what is frozen, or heal what is cut. Who was killed or has drained starts again by itself."""
        if strike.fault is Fault.FREEZE and (child := self.child(strike.target, engine)):
            with suppress(ProcessLookupError):  # its watcher may have killed it
                child.signal(signal.SIGCONT)
        elif strike.fault is Fault.CUT:
            await self._link(strike.target, engine).heal()

    def watch(self, strike: Strike, engine: GatedEngine) -> Callable[[], bool]:
        """Return a function that tells whether the others have given up a part since now. Their logs say so."""
        gateways = [gateway.process for gateway in self.gateways]
        match strike.target:
            case Target.WORKER | Target.WORKER_LINK:
                watchers, said = [engine.scheduler], "is given up"
            case Target.SCHEDULER | Target.GATEWAY_LINK:
                watchers, said = gateways, "was lost"
            case Target.GATEWAY:
                watchers, said = [engine.scheduler for engine in self.engines], "has left"
        before = [child.log.count(said) for child in watchers]
        return lambda: all(child.log.count(said) > count for child, count in zip(watchers, before, strict=True))

    async def healthy(self) -> bool:
        """Return whether each gateway has all engines ready."""
        return all([await is_healthy(str(one.socket), len(self.engines)) for one in self.gateways])

    async def figures(self) -> dict[str, Figures]:
        """Return the second gateway's metrics of each engine, by the engine's name."""
        connector = aiohttp.UnixConnector(str(self.gateways[-1].socket))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://gateway/metrics") as answer,
        ):
            text = await answer.text()
        values: dict[str, Figures] = defaultdict(lambda: Figures(float))
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                values[labels.get("engine", "")][name] += value
        return values

    async def engine_losses(self) -> EngineLosses:
        """Return what the second gateway has noticed, which is not the one that may fail."""
        engines, name = (await self.figures()).values(), "quire:engine_detection_seconds"
        return EngineLosses(sum(one[f"{name}_count"] for one in engines), sum(one[f"{name}_sum"] for one in engines))

    async def rest(self) -> None:
        """Wait until all processes run and engines hold nothing: no request, no block, no more descriptors than before.

        Raise TimeoutError with what is held.
        """
        try:
            await until(self.healthy, PATIENCE)
        except TimeoutError:
            raise TimeoutError("the deployment is not healthy again") from None
        await asyncio.sleep(STATUS_AGE)
        try:
            await until(self._idle, PATIENCE)
        except TimeoutError:
            raise TimeoutError(f"engines are not at rest: {await self.figures()}") from None
        self._descriptors = self._descriptors or await self._steady_descriptors()
        try:
            await until(lambda: not self._descriptor_growth(), PATIENCE)
        except TimeoutError:
            raise TimeoutError(f"descriptors have leaked: {self._descriptor_growth()}") from None

    async def _idle(self) -> bool:
        figures = await self.figures()
        return all(idle(figures[engine.name]) for engine in self.engines)

    async def _steady_descriptors(self) -> dict[str, int]:
        """Return the descriptors once none was added for a second, as those of the first heartbeats are."""
        before: dict[str, int] = {}
        while before != (now := self._count_descriptors()):
            before = now
            await asyncio.sleep(1.0)
        return now

    def _count_descriptors(self) -> dict[str, int]:
        return {child.name: len(os.listdir(f"/proc/{child.pid}/fd")) for child in self.processes}

    def _descriptor_growth(self) -> dict[str, str]:
        now = self._count_descriptors()
        return {
            name: f"{self._descriptors[name]} to {now[name]}" for name in now if now[name] > self._descriptors[name]
        }

    @staticmethod
    def _link(target: Target, engine: GatedEngine) -> Link:
        link = engine.gateway_link if target is Target.GATEWAY_LINK else engine.worker_link
        assert link is not None, "without namespaces, cells that cut links must be skipped"
        return link


@asynccontextmanager
async def deployment(layout: Layout, model: Path, *, step_delay: float = STEP_DELAY) -> AsyncIterator[Deployment]:
    """Run a deployment of a model for the block; yield it once it is at rest."""
    folder = Path(tempfile.mkdtemp(prefix="q"))  # the paths of ipc sockets are limited
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        builder = _Builder(layout, folder, model, step_delay)
        running = await builder.build(stack)
        await asyncio.gather(*(child.start() for child in running.processes))
        await running.rest()
        yield running


class _Builder:
    """Makes the parts of a deployment, and registers their ends."""

    def __init__(self, layout: Layout, folder: Path, model: Path, step_delay: float) -> None:
        self._layout, self._folder = layout, folder
        self._model, self._step_delay = f"--model={model}", step_delay
        self._fixed = [f"--supervisor={os.getpid()}"]
        if layout.transport is Transport.TCP:
            make_keys(folder / "keys")
            self._fixed.append(f"--zmq-keys={folder}/keys")

    async def build(self, stack: AsyncExitStack) -> Deployment:
        hub = None
        if self._layout.transport is Transport.TCP and not await obstacle():
            hub = await self._namespace(stack)
        engines = [await self._engine(stack, "ab"[at], hub) for at in range(self._layout.engines)]
        addresses = [f"--engines={engine.address}" for engine in engines]
        gateways = [self._gateway(f"gateway{at}", addresses, hub) for at in range(2)]
        running = Deployment(self._layout, self._folder, engines, gateways)
        for child in running.processes:
            stack.push_async_callback(child.stop)
        return running

    async def _engine(self, stack: AsyncExitStack, name: str, hub: Namespace | None) -> GatedEngine:
        folder = self._folder / name
        folder.mkdir()
        near = far = gateway_link = worker_link = None
        if hub is not None:
            near, far = await self._namespace(stack), await self._namespace(stack)
            gateway_link = Link(hub, near, f"gw-{name}", f"10.{ord(name)}.1")
            worker_link = Link(near, far, f"wk-{name}", f"10.{ord(name)}.2")
            await gateway_link.open()
            await worker_link.open()
            front, back = f"tcp://{gateway_link.far_address}:5557", f"tcp://{worker_link.near_address}:5558"
        elif self._layout.transport is Transport.TCP:
            front, back = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        else:
            front, back = f"ipc://{folder}/g.sock", f"ipc://{folder}/w.sock"
        scheduler = ["-m", "services.scheduler", f"--gateways={front}", f"--workers={back}", f"--engine={name}"]
        scheduler += [*SCHEDULER_FLAGS, f"--record={folder}/records", *self._fixed]
        worker = ["tests/chaos/gated_worker.py", str(folder), str(self._step_delay), f"--scheduler={back}", self._model]
        worker += ["--num-threads=1", "--kv-cache-memory=0.05", *self._fixed]
        return GatedEngine(
            name,
            front,
            self._child(f"scheduler-{name}", scheduler, near),
            self._child(f"worker-{name}", worker, far),
            Gate(folder),
            folder / "records",
            gateway_link,
            worker_link,
        )

    def _gateway(self, name: str, addresses: Sequence[str], hub: Namespace | None) -> Gateway:
        socket = self._folder / f"{name}.sock"
        argv = ["-m", "services.gateway", *addresses, self._model, f"--served-model-name={MODEL}", f"--uds={socket}"]
        argv += ["--engine-loss-timeout=120", *self._fixed]
        return Gateway(self._child(name, argv, hub), socket)

    def _child(self, name: str, argv: Sequence[str], namespace: Namespace | None) -> Child:
        return Child(name, self._folder, argv, namespace.entrance if namespace else ())

    @staticmethod
    async def _namespace(stack: AsyncExitStack) -> Namespace:
        namespace = Namespace()
        stack.push_async_callback(namespace.close)
        await namespace.open()
        return namespace
