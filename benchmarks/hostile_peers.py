"""Measures what peers cost a scheduler that send nonsense, or try to connect with foreign keys, as fast as they can.

    python -m benchmarks.hostile_peers [--seconds 5] [--rounds 3] [--only garbage ...]

A scheduler with keys and a scripted worker, as real processes, serve a good gateway with 8 streams, while a process
attacks. Prints for each kind of attack the refused connections or messages a second, the CPU time of the scheduler's
process for each of them, beyond what the same streams take in peace, and the times between two tokens of a stream. The
attacker shares the machine's cores with the rest, and the times show that too.
"""

import argparse
import asyncio
import itertools
import signal
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.request import urlopen

import psutil
import zmq
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.backend import Backend
from shared.curve import ConnectionKeys, load_connection_keys, make_keys
from shared.protocol import VERSION, Abort, Hello, Sampling, Submit, encode, pack_tokens
from shared.transport import connect, new_identity
from tests.ports import free_ports
from tests.scripted_worker import CHAIN, Script
from tests.system.processes import ROOT, Engine, rest, serving
from tests.waiting import until

STREAMS = 8


class Load(NamedTuple):
    """What a scheduler did for some seconds."""

    attacks: float  # a second
    cpu: float  # seconds of the process a second
    tokens: float  # a second
    gaps: list[float]  # seconds between two tokens of a stream


def foreign_keys(parallel: int) -> Callable[[str, ConnectionKeys], None]:
    """Return an attack by so many connections at a time, over and over, with keys that are not admitted."""

    def attack(address: str, own: ConnectionKeys) -> None:
        public, secret = zmq.curve_keypair()
        keys = replace(own, public=public, secret=secret)
        with zmq.Context() as context:
            while True:
                with ExitStack() as stack:
                    strangers = [connect(context, address, new_identity("x"), keys) for _ in range(parallel)]
                    for _, monitor in [stack.enter_context(stranger) for stranger in strangers]:
                        while not monitor.drain() and monitor.socket.poll(2000):
                            pass

    return attack


def messages(bodies: Callable[[], Iterator[bytes]]) -> Callable[[str, ConnectionKeys], None]:
    """Return an attack by messages of a peer with an admitted key, which reads no answers."""

    def attack(address: str, own: ConnectionKeys) -> None:
        with zmq.Context() as context, connect(context, address, new_identity("gateway"), own) as (peer, _):
            peer.send(encode(Hello(VERSION, "hostile")))
            for body in bodies():
                peer.send(body)

    return attack


ATTACKS: dict[str, Callable[[str, ConnectionKeys], None]] = {
    "foreign keys, one at a time": foreign_keys(1),
    "foreign keys, 200 at a time": foreign_keys(200),
    "garbage": messages(lambda: itertools.repeat(b"\xff" * 200)),
    "hellos": messages(lambda: itertools.repeat(encode(Hello(VERSION + 1, "hostile")))),
    "aborts of others' requests": messages(lambda: (encode(Abort(id % 1000)) for id in itertools.count())),
    "invalid submits": messages(
        lambda: (encode(Submit(id, pack_tokens([5]), 1, Sampling(1, 0), n=1000)) for id in itertools.count())
    ),
}


async def stream(backend: Backend, number: int, gaps: list[float]) -> None:
    """Run one request after the other, and note the times between tokens."""
    while True:
        prompt = array("i", [CHAIN, 10 + number])
        async with backend.submit(prompt, Sampling(max_tokens=1500, seed=0, temperature=0.0)) as request:
            finished, last = False, 0.0
            while not finished:
                rows = await request.rows()
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now
                finished = rows[-1].finish_reason is not None


def count_attacks(port: int) -> float:
    """Return how many messages the scheduler dropped or refused, and how many connections it refused."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    names = ("quire:refused_connections_total", "quire:dropped_messages_total", "quire:requests_refused_total")
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name in names)


async def observe(system: Engine, backend: Backend, port: int, seconds: float) -> Load:
    """Return what the scheduler does in the next seconds."""
    process = psutil.Process(system.scheduler.pid)
    gaps: list[float] = []
    tasks = [asyncio.create_task(stream(backend, number, gaps)) for number in range(STREAMS)]
    await asyncio.sleep(0.5)
    gaps.clear()
    began, cpu, attacks = time.perf_counter(), sum(process.cpu_times()[:2]), count_attacks(port)
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - began
    result = Load(
        (count_attacks(port) - attacks) / elapsed,
        (sum(process.cpu_times()[:2]) - cpu) / elapsed,
        len(gaps) / elapsed,
        gaps.copy(),
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await rest(backend)
    return result


async def measure(kinds: Sequence[str], seconds: float, rounds: int) -> None:
    """Print the table."""
    (port,) = free_ports(1)
    with TemporaryDirectory(prefix="q") as keys:
        make_keys(Path(keys))
        script, flags = Script(delay=0.005), (f"--metrics-port={port}", "--max-num-seqs=16")
        async with serving(script, *flags, tcp=True, keys=keys) as (system, backend):
            for kind in kinds:
                pairs = [await pair(system, backend, port, kind, keys, seconds) for _ in range(rounds)]
                print(row(kind, pairs), flush=True)


async def pair(system: Engine, backend: Backend, port: int, kind: str, keys: str, seconds: float) -> tuple[Load, Load]:
    """Return the load in peace and then under an attack."""
    peace = await observe(system, backend, port, seconds)
    argv = [sys.executable, "-m", "benchmarks.hostile_peers", "--attack", kind, system.address, keys]
    attacker = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        before = count_attacks(port)
        await until(lambda: count_attacks(port) > before)
        return peace, await observe(system, backend, port, seconds)
    finally:
        attacker.send_signal(signal.SIGKILL)
        attacker.wait()


def row(kind: str, pairs: Sequence[tuple[Load, Load]]) -> str:
    each = statistics.median(
        (attack.cpu - peace.cpu * attack.tokens / peace.tokens) / attack.attacks for peace, attack in pairs
    )
    attacks = statistics.median(attack.attacks for _, attack in pairs)
    calm = [gap for peace, _ in pairs for gap in peace.gaps]
    attacked = [gap for _, attack in pairs for gap in attack.gaps]
    times = " | ".join(f"{quantile(gaps, part) * 1e3:.1f}" for part in (0.5, 0.99) for gaps in (calm, attacked))
    return f"| {kind} | {attacks:,.0f} | {each * 1e6:.0f} | {each * attacks:.2f} | {times} |"


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


def main(argv: Sequence[str]) -> None:
    """Parse the arguments, and print the table; or attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.attack:
        kind, address, keys = options.attack
        own = load_connection_keys(keys, "gateway")
        assert own is not None
        ATTACKS[kind](address, own)
    print("| attack | a second | CPU for each, µs | cores | between tokens, ms: p50 | attacked | p99 | attacked |")
    print("|---|---|---|---|---|---|---|---|")
    asyncio.run(measure(options.only, options.seconds, options.rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
