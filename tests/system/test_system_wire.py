"""Tests that a scheduler drops peers that are slow, strange or hostile, logs it, and serves the others."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest
import zmq.asyncio

from services.gateway.backend import Backend
from shared.errors import ProtocolError, Unavailable
from shared.protocol import (
    VERSION,
    Abort,
    Epoch,
    Heartbeat,
    Hello,
    ProcessStats,
    Refused,
    Register,
    Sampling,
    StepResult,
    Submit,
    decode_from_gateway,
    decode_to_gateway,
    encode,
    pack_tokens,
)
from shared.transport import MALFORMED_LIMIT, connect
from shared.unread import MAX_UNREAD
from tests.scripted_worker import CHAIN, Script, ScriptedRunner, expected_chain
from tests.shared.test_transport import frame, raw_peer
from tests.system.processes import Child, Engine, complete, engine, rest, serving
from tests.waiting import PATIENCE, until


@asynccontextmanager
async def stranger(address: str, name: bytes = b"stranger") -> AsyncIterator[zmq.asyncio.Socket]:
    """Connect to a socket of the scheduler. While a connection of that name ends, the next one goes unheard."""
    context = zmq.asyncio.Context()
    try:
        with connect(context, address, name) as (result, _):
            yield result
    finally:
        context.destroy(linger=0)


FLOOD = 30 * MAX_UNREAD
MALFORMED = "not a message of protocol version"
BEAT = encode(Heartbeat("nobody", ProcessStats()))


def workers(system: Engine) -> str:
    return system.address.replace("gateways", "workers")


def register(**changes: object) -> bytes:
    """Return the first message of a worker."""
    info = ScriptedRunner(Script()).info
    plain = Register(VERSION, "stranger", 0, 1, 1, "cpu", info.model, 1, 1 << 20, 0.001, 0.0)
    return encode(msgspec.structs.replace(plain, **changes))


async def refusal(backend: Backend) -> str:
    """Return the error that a client gets, or an empty string if it is served."""
    try:
        await complete(backend, [CHAIN], 1)
    except Unavailable as error:
        return str(error)
    return ""


async def test_garbage_at_both_sockets_harms_nobody() -> None:
    async with serving() as (system, backend):
        for address, malformed in ((system.address, 4), (workers(system), 5)):
            lines = system.scheduler.log.count(MALFORMED) + malformed
            async with stranger(address) as sender:
                for body in (b"", b"\x00" * 100, b"\xff" * 100_000, BEAT, encode(Abort(5)), b"\x91" * 5000):
                    await sender.send(body)
                await sender.send_multipart([b"many", b"frames", BEAT])
                raw = socket.socket(socket.AF_UNIX)
                raw.connect(address.removeprefix("ipc://"))
                raw.send(b"GET / HTTP/1.1\r\n\r\n" * 100)
                raw.close()
                assert (await complete(backend, [CHAIN], 9)).tokens == expected_chain([CHAIN], 9)
                await until(lambda lines=lines: system.scheduler.log.count(MALFORMED) == lines)
        assert (system.scheduler.lives, system.worker.lives) == (1, 1)
        await rest(backend)


async def test_a_peer_that_sends_nothing_but_nonsense_is_disconnected() -> None:
    async with serving() as (system, backend):
        for number, address in enumerate((system.address, workers(system)), start=1):
            async with stranger(address) as sender:
                for _ in range(MALFORMED_LIMIT):
                    await sender.send(b"\xff" * 100)
                await until(lambda number=number: system.scheduler.log.count("stranger sends nonsense") == number)
        assert (await complete(backend, [CHAIN], 9)).tokens == expected_chain([CHAIN], 9)
        await rest(backend)


async def test_a_gateway_whose_requests_have_values_out_of_range_stays_connected() -> None:
    invalid = encode(Submit(5, pack_tokens([5]), 1, Sampling(max_tokens=-1, seed=0)))
    with pytest.raises(ProtocolError):
        decode_from_gateway(invalid)
    async with engine() as system, stranger(system.address) as gateway:
        await gateway.send(encode(Hello(VERSION, "stranger")))
        for _ in range(2 * MALFORMED_LIMIT):
            await gateway.send(invalid)
        refused = 0
        while refused < 2 * MALFORMED_LIMIT:
            body = await asyncio.wait_for(gateway.recv(), PATIENCE)
            refused += bool(body) and isinstance(decode_to_gateway(body), Refused)
        assert "sends nonsense" not in system.scheduler.log


@pytest.mark.parametrize("kind", ["endless message", "long submits"])
async def test_floods_over_tcp_neither_fill_the_memory_nor_hold_up_the_others(kind: str) -> None:
    """PRC-28."""
    async with serving(tcp=True) as (system, backend):
        scheduler = psutil.Process(system.scheduler.pid)
        before, peak = scheduler.memory_info().rss, 0
        flood = asyncio.create_task(asyncio.to_thread(send_flood, int(system.address.rpartition(":")[2]), kind))
        while not flood.done():
            async with asyncio.timeout(PATIENCE):
                assert (await complete(backend, [CHAIN], 9)).tokens == expected_chain([CHAIN], 9)
            peak = max(peak, scheduler.memory_info().rss)
        assert flood.result() < FLOOD
        assert peak - before < 5 * MAX_UNREAD
        assert system.scheduler.lives == system.worker.lives == 1
        await rest(backend)


def send_flood(port: int, kind: str) -> int:
    """Send until the other side ends the connection, and return the number of bytes sent."""
    long = encode(Submit(0, bytes(8 << 20), 1, Sampling(max_tokens=5, seed=0)))
    data = frame(bytes(1 << 20), more=True) if kind == "endless message" else frame(long, more=False)
    with raw_peer(port) as peer:
        peer.sendall(frame(encode(Hello(VERSION, "flood")), more=False))
        for sent in range(0, FLOOD, len(data)):
            try:
                peer.sendall(data)
            except ConnectionError:
                return sent
    return FLOOD


async def test_a_gateway_that_sends_nonsense_loses_its_requests_and_no_other_does() -> None:
    async with serving(Script(delay=0.01)) as (system, backend), stranger(system.address) as sender:
        await sender.send(encode(Hello(VERSION, "stranger")))
        prompt = pack_tokens([5])
        await sender.send(encode(Submit(0, prompt, 1, Sampling(max_tokens=1500, seed=0))))
        await until(lambda: "stranger connected" in system.scheduler.log)
        await sender.send(b"nonsense")
        assert (await complete(backend, [CHAIN], 30)).tokens == expected_chain([CHAIN], 30)
        result = await rest(backend)
        assert result.finished_abort == 1


async def test_other_versions_of_the_protocol_are_not_served() -> None:
    async with engine(worker=False) as system:
        async with stranger(system.address) as gateway:
            await gateway.send(encode(Hello(VERSION + 1, "stranger")))
            said = f"gateway stranger is not served: it speaks version {VERSION + 1}"
            await until(lambda: said in system.scheduler.log)
            assert await gateway.recv() == b""  # by which the scheduler sees that the sender is there
            assert not await gateway.poll(600)  # longer than two Status
        async with stranger(workers(system)) as worker:
            await worker.send(register(version=VERSION + 1))
            await until(lambda: f"it speaks version {VERSION + 1}" in system.scheduler.log)


async def test_an_engine_that_has_loaded_another_model_than_the_gateway_gets_no_requests() -> None:
    async with engine(Script(text="theirs")) as system:
        async with Backend([system.address], text_digest="theirs") as backend:
            await until(backend.ready)
        async with Backend([system.address], text_digest="ours") as backend:
            for _ in range(2):
                assert "its files have changed" in await refusal(backend)
            assert not backend.ready()


async def test_workers_that_do_not_fit_are_sent_away() -> None:
    async with engine() as system:
        await until(lambda: "is ready" in system.scheduler.log)
        for name, changes, said in (
            (b"a", {"world_size": 2}, "rank 0 of 2"),
            (b"b", {"kv_bytes_per_token": 0}, "cannot be"),
        ):
            async with stranger(workers(system), name) as worker:
                await worker.send(register(**changes))
                await until(lambda said=said: said in system.scheduler.log)
                assert await worker.poll(PATIENCE * 1000)
        async with stranger(workers(system), b"c") as worker:  # it waits for its turn, and then sends what it must not
            other = msgspec.structs.replace(ScriptedRunner(Script()).info.model, vocab_size=7)
            await worker.send(register(model=other))
            await until(lambda: system.scheduler.log.count("registered") == 2)
            system.worker.signal(9)
            await until(lambda: "it has loaded another model" in system.scheduler.log)
            assert await worker.poll(PATIENCE * 1000)


async def test_results_of_a_worker_that_has_nothing_to_do_are_dropped() -> None:
    async with serving(Script(delay=0.05)) as (system, backend):
        async with stranger(workers(system)) as impostor:
            await impostor.send(register())
            await until(lambda: system.scheduler.log.count("registered") == 2)
            task = asyncio.create_task(complete(backend, [CHAIN], 20))
            for step in range(40):
                await impostor.send(encode(StepResult(Epoch("boot", 1), step, [])))
            assert (await task).tokens == expected_chain([CHAIN], 20)
        await rest(backend)


async def test_an_address_that_is_taken_is_one_clear_line_and_not_stolen() -> None:
    async with serving() as (system, backend):
        argv = ["-m", "services.scheduler", f"--gateways={system.address}", "--workers=tcp://127.0.0.1:1"]
        thief = Child("thief", system.folder, argv)
        thief.restart = False
        await thief.start()
        assert await thief.ended() == 2
        assert thief.log == f"scheduler: cannot bind {system.address}: another process is listening there\n"
        assert (await complete(backend, [CHAIN], 9)).tokens == expected_chain([CHAIN], 9)
        async with Backend([system.address]) as late:
            await until(late.ready)


async def test_a_gateway_that_does_not_read_for_two_seconds_gets_everything() -> None:
    """The steps go on meanwhile, and what the gateway cannot read waits for it."""
    async with serving(None, "--max-num-seqs=64", "--max-num-queued-reqs=5000") as (_, backend):
        prompts = [[CHAIN, at] for at in range(300)]
        running = [asyncio.create_task(complete(backend, prompt, 60)) for prompt in prompts]
        await asyncio.sleep(0.1)
        time.sleep(2.0)  # noqa: ASYNC251  (the point)
        outputs = await asyncio.gather(*running)
        assert [output.tokens for output in outputs] == [expected_chain(prompt, 60) for prompt in prompts]
        await rest(backend)
