"""Tests every socket of real processes under floods of hostile messages, while streams run.

The streams end with the tokens of an undisturbed run, no process ends, and what was dropped is counted. A scheduler is
flooded in rounds: it may grow by what was sent to it in one, since all of that may be unread at a time, and by nothing
more in the later ones. QUIRE_TEST_FRAMES=100000 sends that many messages to each socket, instead of 3000. Times are
measured elsewhere (`benchmarks/hostile_peers.py`).
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from urllib.request import urlopen

import msgspec
import psutil
import pytest
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.backend import Backend
from shared.protocol import (
    VERSION,
    Abort,
    Configure,
    Heartbeat,
    Hello,
    ProcessStats,
    Register,
    Sampling,
    Stop,
    Submit,
    UnknownGateway,
    Welcome,
    decode_from_gateway,
    decode_from_worker,
    decode_to_gateway,
    decode_to_worker,
    pack_tokens,
)
from tests.ports import free_ports
from tests.scripted_worker import CHAIN, Script, ScriptedRunner, expected_chain
from tests.shared.wire_examples import FROM_GATEWAY, FROM_WORKER, TO_GATEWAY, TO_WORKER
from tests.system.hostile_frames import Flood, HostileFrames, flood, hostile_listener, knock
from tests.system.http_client import Listening, chained, complete, talk
from tests.system.processes import Child, Engine, Gateway, engine, rest
from tests.system.processes import complete as complete_at
from tests.waiting import PATIENCE, until

COUNT = int(os.environ.get("QUIRE_TEST_FRAMES", "3000"))
TIMEOUT = 300 + COUNT // 100  # seconds
pytestmark = pytest.mark.timeout(TIMEOUT)

ROUNDS = 4
"""Floods of a scheduler's sockets, one after the other has been read."""

READING = PATIENCE + COUNT / 1_000  # seconds for which a flood may be read

OWN_GROWTH = 32 << 20
"""Bytes that a process may grow apart from unread messages: the streams' requests, hostile ones, and the allocator."""

LATER_GROWTH = 4 << 20
"""Bytes that it may grow after the second round, apart from a quarter of the unread messages: how many of them wait at
a time differs by chance, and the allocator keeps the most."""

ROLES = ("gateway", "worker")  # of a scheduler's peers

STREAMS = 8
TOKENS = 60


class Watched:
    """Processes, and how much they have grown at most since the start."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._processes = {child.name: psutil.Process(child.pid) for child in children}
        self._before = self._sizes()
        self.growth = dict.fromkeys(self._before, 0)

    def look(self) -> None:
        for name, size in self._sizes().items():
            self.growth[name] = max(self.growth[name], size - self._before[name])

    def check(self, unread: int) -> None:
        """Fail if a process has ended, or has grown too much although only so many bytes were unread at a time."""
        print("most growth, MiB:", {name: growth >> 20 for name, growth in self.growth.items()})
        print("most that may be unread, MiB:", unread >> 20)
        assert all(growth < OWN_GROWTH + unread for growth in self.growth.values()), self.growth
        assert [child.lives for child in self._children] == [1] * len(self._children)

    def _sizes(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self._processes.items()}


class Streams:
    """Clients of a gateway, each with one request after the other, whose texts are compared."""

    def __init__(self, at: Listening) -> None:
        self._at = at
        self.ended = 0

    async def run(self, client: int, until_done: asyncio.Event) -> None:
        while not until_done.is_set():
            prompt = [CHAIN, 10 + client, *[9] * (self.ended % 50)]
            answer = await complete(self._at, prompt, TOKENS)
            if answer.status == 429:  # hostile requests fill the queue: this one comes back, as clients do
                await asyncio.sleep(0.05)
                continue
            assert answer.json["choices"][0]["text"] == chained(prompt, TOKENS)
            self.ended += 1


@asynccontextmanager
async def streaming(at: Listening, watched: Watched) -> AsyncIterator[Streams]:
    """Run streams during the block, and look at the processes."""
    done, streams = asyncio.Event(), Streams(at)

    async def look() -> None:
        while not done.is_set():
            watched.look()
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as tasks:
        for client in range(STREAMS):
            tasks.create_task(streams.run(client, done))
        tasks.create_task(look())
        await until(lambda: streams.ended >= STREAMS)
        before = streams.ended
        yield streams
        await until(lambda: streams.ended >= before + STREAMS)
        done.set()


def dropped(port: int) -> dict[tuple[str, str], int]:
    """Return the metric of dropped messages at a port, by role of the sender and reason."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as response:
        text = response.read().decode()
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name == "quire:dropped_messages_total":
                counts[labels["role"], labels["reason"]] += int(value)
    return counts


def gateway_messages() -> list[Struct]:
    """Return what a hostile gateway may say: requests of its own, and aborts of those of others."""
    sampling = Sampling(max_tokens=1, seed=0)
    own = [Submit(id, pack_tokens([5, id]), 2, sampling, n=n) for id, n in ((0, 1), (1, 2), (2, 1))]
    resumed = Submit(3, pack_tokens([5, 6]), 1, Sampling(max_tokens=2, seed=0), resumed=True)
    foreign = [Abort(id, sample) for id in range(8) for sample in (-1, 0)]
    hello = [Hello(VERSION, "hostile")] * 4
    return [*hello, *own, resumed, *foreign, Heartbeat("gateway-1-0", ProcessStats(9e8, 1e9)), *FROM_GATEWAY]


def worker_messages(victim: int) -> list[Struct]:
    """Return what a hostile worker may say: that it is the process `victim`, and results of other epochs."""
    info = ScriptedRunner(Script()).info
    register = Register(VERSION, "hostile", 0, 1, victim, "cpu", info.model, 1, 1 << 20, 0.001, 0.0)
    return [absurd(register), register, register, Heartbeat("worker-1-0", ProcessStats(9e8, 1e9)), *FROM_WORKER]


def absurd(register: Register) -> Register:
    """Return the registration of a worker that is told to stop."""
    return msgspec.structs.replace(register, kv_memory=2**62)


@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
async def test_both_sockets_of_a_scheduler(tcp: bool) -> None:
    (port,) = free_ports(1)
    script = talk(delay=0.002)
    async with engine(script, f"--metrics-port={port}", tcp=tcp) as system:
        front = Gateway(system.folder, [system.address], ())
        try:
            await front.start()
            await until(front.healthy)
            watched = Watched([system.scheduler, system.worker, front])
            scheduler = psutil.Process(system.scheduler.pid)
            floods, sizes = [], []
            async with streaming(front, watched):
                for number in range(ROUNDS):
                    with ExitStack() as peers:
                        floods.append(await attack(system, peers, number))
                        await until(lambda: counted(dropped(port), floods, exactly=not tcp), READING)
                    sizes.append(scheduler.memory_info().rss)
            most = max(gateway.memory + worker.memory for gateway, worker in floods)
            watched.check(most)
            print("growth after each round since the first, MiB:", [(size - sizes[0]) >> 20 for size in sizes])
            assert sizes[-1] - sizes[1] < most / 4 + LATER_GROWTH, sizes
            counts = dropped(port)
            for role in ROLES:
                assert counts[role, "malformed"] > COUNT / 10
                assert counts[role, "unknown_sender"] > COUNT / 100
                assert counts[role, "not_admitted"] > 0
            assert counts["gateway", "unexpected"] > 0, "aborts of the requests of others"
            assert len(system.scheduler.log) < 20_000_000
            async with Backend([system.address]) as late:  # and a newcomer is served at once
                await until(late.ready)
                prompt = [CHAIN, 7]
                assert (await complete_at(late, prompt, 9)).tokens == expected_chain(
                    prompt, 9, vocab_size=script.vocab_size
                )
                assert (await rest(late)).worker_losses == 0
        finally:
            await front.stop()


async def attack(system: Engine, peers: ExitStack, number: int) -> tuple[Flood, Flood]:
    """Flood both sockets of an engine from threads, with messages and raw connections. Leave some of `peers` open."""
    to_gateways, to_workers = gateway_messages(), worker_messages(system.worker.pid)
    from_gateways = HostileFrames((number, "gateway"), to_gateways, [*TO_GATEWAY, *FROM_WORKER])
    from_workers = HostileFrames((number, "worker"), to_workers, [*TO_WORKER, *FROM_GATEWAY])
    size = COUNT // ROUNDS
    gateways = flood(system.address, from_gateways, size, decode_from_gateway, to_gateways[0])
    workers = flood(system.workers, from_workers, size, decode_from_worker, to_workers[0])
    sent = await asyncio.gather(
        asyncio.to_thread(peers.enter_context, gateways),
        asyncio.to_thread(peers.enter_context, workers),
        asyncio.to_thread(knock, system.address, Random(number), size // 20),
        asyncio.to_thread(knock, system.workers, Random(number), size // 20),
    )
    return sent[0], sent[1]


def counted(counts: Mapping[tuple[str, str], int], floods: Sequence[Sequence[Flood]], *, exactly: bool) -> bool:
    """Return whether the malformed messages of all floods have been counted.

    If not `exactly`, those of peers that have left need not be: over tcp, the kernel discards what a peer has sent and
    nobody has read if the peer closes its connection while answers wait for it.
    """
    result = True
    for role, sent in zip(ROLES, zip(*floods, strict=True), strict=True):
        number, most = counts[role, "malformed"], sum(flood.malformed for flood in sent)
        assert number <= most, (role, number, most)
        result &= number >= (most if exactly else sum(flood.staying_malformed for flood in sent))
    return result


def would_be_obeyed_by_a_gateway(message: object) -> bool:
    """Return whether a message makes an engine one to which requests go, or ends the connection in good order."""
    return isinstance(message, UnknownGateway) or (isinstance(message, Welcome) and not message.model.text_digest)


async def test_a_gateway_with_a_hostile_engine_beside_a_good_one() -> None:
    async with engine(talk(delay=0.002)) as system:
        address = f"ipc://{system.folder}/hostile.sock"
        frames = HostileFrames((COUNT, "engine"), TO_GATEWAY, [*FROM_GATEWAY, *TO_WORKER])
        front = Gateway(system.folder, [system.address, address], ())
        with hostile_listener(address, frames, decode_to_gateway) as hostile:
            try:
                await front.start()
                await until(front.healthy)
                watched = Watched([system.scheduler, system.worker, front])
                async with streaming(front, watched):
                    sent = await asyncio.to_thread(hostile.flood, COUNT, would_be_obeyed_by_a_gateway)
                watched.check(0)
                await until(lambda: dropped(front.port)["scheduler", "malformed"] == sent.malformed > 0)
                assert dropped(front.port)["scheduler", "unexpected"] > COUNT / 10
            finally:
                await front.stop()


def redirect(address: str, target: str) -> None:
    """Let connections to one ipc address reach another one."""
    path = Path(address.removeprefix("ipc://"))
    path.unlink(missing_ok=True)
    path.symlink_to(target.removeprefix("ipc://"))


async def test_a_worker_with_a_hostile_scheduler_serves_a_good_one_afterwards() -> None:
    async with engine(Script(), worker=False) as system:
        good, address = system.workers, f"ipc://{system.folder}/hostile.sock"
        system.worker.argv = [part.replace(good, address) for part in system.worker.argv]
        frames = HostileFrames((COUNT, "scheduler"), TO_WORKER, [*FROM_WORKER, *TO_GATEWAY])
        with hostile_listener(address, frames, decode_to_worker) as hostile:
            await system.worker.start()
            await until(lambda: hostile.has_peer)
            watched = Watched([system.worker])
            flooding = asyncio.create_task(
                asyncio.to_thread(hostile.flood, COUNT, lambda message: isinstance(message, Stop | Configure))
            )
            while not flooding.done():
                watched.look()
                await asyncio.sleep(0.1)
            assert (await flooding).sent >= COUNT
        redirect(address, good)
        async with Backend([system.address]) as backend:
            await until(backend.ready)
            assert (await complete_at(backend, [CHAIN], 20)).tokens == expected_chain([CHAIN], 20)
        watched.check(0)
