"""Tests real processes that speak over tcp with keys: deaths are pauses as ever, and strangers change nothing."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import msgspec
import pytest
import zmq
import zmq.asyncio

from services.gateway.backend import Backend
from shared.curve import ConnectionKeys, load_connection_keys, make_keys
from shared.protocol import VERSION, Hello, encode
from shared.transport import connect, new_identity
from tests.ports import free_ports
from tests.scheduler.examples import REGISTER
from tests.scripted_worker import CHAIN, expected_chain
from tests.system.processes import Child, complete, gateway, rest, serving, snapshot
from tests.waiting import PATIENCE, found_dead, until

TOKENS = 200


@pytest.fixture
def keys() -> Iterator[Path]:
    with TemporaryDirectory(prefix="q") as folder:
        make_keys(Path(folder))
        yield Path(folder)


def gateway_keys(folder: Path) -> ConnectionKeys:
    keys = load_connection_keys(str(folder), "gateway")
    assert keys is not None
    return keys


def refused(port: int) -> dict[str, int]:
    """Return the scheduler's metric of refused connections, by role."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if line.startswith("quire:refused_connections_total{")]
    return {line.split('role="')[1].split('"')[0]: int(float(line.rpartition(" ")[2])) for line in found}


async def test_streams_survive_the_deaths_of_worker_and_scheduler(keys: Path) -> None:
    async with serving(None, "--max-num-seqs=8", tcp=True, keys=str(keys)) as (system, backend):
        prompts = [[CHAIN, 10 + at] for at in range(16)]
        with system.slowed():
            running = [asyncio.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts]
            await until(lambda: snapshot(backend).generation_tokens > 50)
            system.worker.signal(signal.SIGKILL)
            await until(lambda: snapshot(backend).worker_losses == 1 and backend.ready())
            worker = system.worker.pid
            system.scheduler.signal(signal.SIGKILL)
            await until(lambda: system.scheduler.lives == 2)
            assert not any(task.done() for task in running)
        outputs = await asyncio.gather(*running)
        assert [output.tokens for output in outputs] == [expected_chain(prompt, TOKENS) for prompt in prompts]
        assert system.worker.pid == worker, "it kept its weights"
        assert (await rest(backend)).worker_losses == 0


async def test_a_frozen_worker_is_replaced_and_a_frozen_scheduler_is_left(keys: Path) -> None:
    async with serving(None, "--worker-timeout=1", tcp=True, keys=str(keys)) as (system, backend):
        prompts = [[CHAIN, 10 + at] for at in range(8)]
        with system.slowed():
            running = [asyncio.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts]
            await until(lambda: snapshot(backend).generation_tokens > 50)
            system.worker.signal(signal.SIGSTOP)  # over tcp it is told to stop, and not killed
            said = "(?:silent|busy with one step)"
            await until(lambda: found_dead(system.scheduler.log, said, 1, remote=True))
            system.worker.signal(signal.SIGKILL)
            await until(lambda: snapshot(backend).worker_losses == 1 and backend.ready())
            system.scheduler.signal(signal.SIGSTOP)
            await until(lambda: not backend.ready())
            system.scheduler.signal(signal.SIGKILL)
            assert not any(task.done() for task in running)
        outputs = await asyncio.gather(*running)
        assert [output.tokens for output in outputs] == [expected_chain(prompt, TOKENS) for prompt in prompts]


async def intrude(address: str, keys: ConnectionKeys | None, message: msgspec.Struct) -> str:
    """Send a message to a socket of the scheduler. Return why the connection was refused."""
    with zmq.asyncio.Context() as context, connect(context, address, new_identity("intruder"), keys) as peers:
        peer, monitor = peers
        for _ in range(50):
            await peer.send(encode(message))
        async with asyncio.timeout(PATIENCE):
            while not monitor.drain():
                await monitor.socket.poll(50)
        assert not await peer.poll(0)
        return monitor.refusal


async def test_strangers_are_refused_and_counted_and_streams_do_not_notice(keys: Path) -> None:
    (port,) = free_ports(1)
    async with serving(None, f"--metrics-port={port}", tcp=True, keys=str(keys)) as (system, backend):
        prompts = [[CHAIN, 10 + at] for at in range(8)]
        with system.slowed():
            running = [asyncio.create_task(complete(backend, prompt, TOKENS)) for prompt in prompts]
            await until(lambda: snapshot(backend).generation_tokens > 50)
            public, secret = zmq.curve_keypair()
            own = gateway_keys(keys)
            hello = Hello(VERSION, "intruder")
            assert await intrude(system.workers, own, REGISTER), "a gateway is no worker"
            assert await intrude(system.address, msgspec.structs.replace(own, public=public, secret=secret), hello)
            assert await intrude(system.address, None, hello)
            assert await intrude(system.workers, None, REGISTER)
            host, _, number = system.workers.removeprefix("tcp://").rpartition(":")
            for _ in range(20):
                with socket.create_connection((host, int(number))) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            await until(lambda: refused(port) == {"gateway": 2, "worker": 22})
            assert not any(task.done() for task in running)
        outputs = await asyncio.gather(*running)
        assert [output.tokens for output in outputs] == [expected_chain(prompt, TOKENS) for prompt in prompts]
        result = await rest(backend)
        assert (result.worker_losses, result.finished_length) == (0, 8)
        assert "intruder" not in system.scheduler.log


@pytest.fixture
def other_keys(keys: Path) -> Iterator[Path]:
    """Keys that know the same scheduler, which does not admit them."""
    with TemporaryDirectory(prefix="q") as folder:
        make_keys(Path(folder))
        for role in ("gateway", "worker"):
            (Path(folder) / role / "scheduler.key").write_bytes((keys / role / "scheduler.key").read_bytes())
        yield Path(folder)


def admit(keys: Path, other_keys: Path, role: str) -> None:
    """Admit another key of a role when the scheduler starts next."""
    (keys / f"scheduler/{role}s/other.key").write_bytes((other_keys / f"{role}/{role}.key").read_bytes())


async def test_a_refused_gateway_serves_once_its_key_is_admitted(keys: Path, other_keys: Path) -> None:
    async with (
        serving(None, tcp=True, keys=str(keys)) as (system, _),
        Backend([system.address], keys=gateway_keys(other_keys)) as newcomer,
    ):
        await asyncio.sleep(1.5)
        assert newcomer.welcome is None
        admit(keys, other_keys, "gateway")
        system.scheduler.signal(signal.SIGKILL)
        await until(newcomer.ready)
        assert (await complete(newcomer, [CHAIN], 9)).tokens == expected_chain([CHAIN], 9)


async def test_a_refused_worker_serves_once_its_key_is_admitted(keys: Path, other_keys: Path) -> None:
    """Its heartbeats were refused as well, and come through then: without them it would be given up."""
    async with serving(None, "--worker-timeout=1", tcp=True, keys=str(keys)) as (system, backend):
        arguments = [f"--scheduler={system.workers}", f"--zmq-keys={other_keys}"]
        worker = Child("other", system.folder, ["tests/scripted_worker.py", *arguments])
        try:
            await worker.start()
            await until(lambda: "(--zmq-keys)" in worker.log)
            await asyncio.sleep(0.6)  # time for a heartbeat
            admit(keys, other_keys, "worker")
            await system.worker.stop()
            system.scheduler.signal(signal.SIGKILL)
            await until(lambda: "configured" in worker.log and backend.ready())
            await asyncio.sleep(2.5)
            await until(backend.ready)
            assert "is given up" not in system.scheduler.log.rpartition("registered")[2]
            assert (await complete(backend, [CHAIN], 9)).tokens == expected_chain([CHAIN], 9)
            assert worker.lives == 1
        finally:
            await worker.stop()


async def test_a_worker_that_is_refused_ends_after_its_scheduler_timeout(keys: Path) -> None:
    async with serving(None, tcp=True, keys=str(keys)) as (system, _):
        arguments = [f"--scheduler={system.workers}", "--scheduler-timeout=3"]
        worker = Child("without", system.folder, ["tests/scripted_worker.py", *arguments])
        worker.restart = False
        try:
            await worker.start()
            assert await worker.ended() == 1
            assert "no scheduler for 3 s" in worker.log
        finally:
            await worker.stop()


async def test_the_programs_say_what_is_wrong_with_their_keys(keys: Path) -> None:
    async with serving(None, tcp=True, keys=str(keys)) as (system, backend):
        worker = Child("without", system.folder, ["tests/scripted_worker.py", f"--scheduler={system.workers}"])
        gate = gateway(system, f"--zmq-keys={keys}")
        try:
            await worker.start()
            await until(lambda: "(--zmq-keys)" in worker.log)
            async with gate:
                await asyncio.sleep(2.0)
            assert worker.log.count("no connection to the scheduler") == 1
            await until(backend.ready)
        finally:
            await worker.stop()
