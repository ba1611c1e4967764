"""Tests every socket of real processes under floods of hostile messages, while streams run.

The streams end with the tokens of an undisturbed run, no process ends or grows by more than `MAX_GROWTH`, and what was
dropped is counted. QUIRE_TEST_FRAMES=100000 sends that many messages to each
socket, instead of 3000. Times are measured elsewhere (`benchmarks/hostile_peers.py`).
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
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
from shared.unread import MAX_UNREAD
from tests.ports import free_ports
from tests.scripted_worker import CHAIN, Script, ScriptedRunner, expected_chain
from tests.shared.wire_examples import FROM_GATEWAY, FROM_WORKER, TO_GATEWAY, TO_WORKER
from tests.system.hostile_frames import HostileFrames, flood, hostile_listener, knock
from tests.system.http_client import Listening, chained, complete, talk
from tests.system.processes import Child, Engine, Gateway, engine, rest
from tests.system.processes import complete as complete_at
from tests.waiting import until

COUNT = int(os.environ.get("QUIRE_TEST_FRAMES", "3000"))
TIMEOUT = 120 + COUNT // 100  # seconds
pytestmark = pytest.mark.timeout(TIMEOUT)

MAX_GROWTH = 2 * MAX_UNREAD
"""Bytes that a process may grow: at each of two sockets, so much of a peer's messages may be unread."""

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

    def check(self) -> None:
        """Fail if a process has ended or grown too much."""
        print("most growth, MiB:", {name: growth >> 20 for name, growth in self.growth.items()})
        assert all(growth < MAX_GROWTH for growth in self.growth.values()), self.growth
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
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
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
            async with streaming(front, watched):
                floods = await asyncio.gather(*attack(system, Random(COUNT)))
            watched.check()
            sent = {role: flooded.malformed for flooded, role in zip(floods, ("gateway", "worker"), strict=False)}
            # libzmq loses what it has not read of a peer that leaves while its input is stopped, but never counts twice
            await until(lambda: all(dropped(port)[role, "malformed"] > number / 2 for role, number in sent.items()))
            counts = dropped(port)
            for role, number in sent.items():
                assert number / 2 < counts[role, "malformed"] <= number
                assert number > COUNT / 10
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


def attack(system: Engine, rng: Random) -> list[Any]:
    """Start floods of both sockets of an engine in threads: frames, and raw connections."""
    to_gateways, to_workers = gateway_messages(), worker_messages(system.worker.pid)
    from_gateways = HostileFrames((COUNT, "gateway"), to_gateways, [*TO_GATEWAY, *FROM_WORKER])
    from_workers = HostileFrames((COUNT, "worker"), to_workers, [*TO_WORKER, *FROM_GATEWAY])
    return [
        asyncio.to_thread(flood, system.address, from_gateways, COUNT, decode_from_gateway, to_gateways[0]),
        asyncio.to_thread(flood, system.workers, from_workers, COUNT, decode_from_worker, to_workers[0]),
        asyncio.to_thread(knock, system.address, rng, COUNT // 20),
        asyncio.to_thread(knock, system.workers, rng, COUNT // 20),
    ]


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
                watched.check()
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
        watched.check()
