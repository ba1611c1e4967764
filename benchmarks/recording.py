"""Measures what `--record` costs: CPU time a token, in pairs of runs without and with it, in turns.

    python -m benchmarks.recording scheduler [--pairs 40] [--streams 32] [--tokens 400]
    python -m benchmarks.recording server [--pairs 6] [--tokens 48]

`scheduler` runs two schedulers with a scripted worker each, as real processes, and takes the CPU time of the
scheduler's process alone. `server` runs two of `quire serve` with the embedded model, and takes that of all their
processes. In each pair both serve the same requests, one after the other, and which is the first changes. Two that do
not record show how far apart equal ones are (`--control`).
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp

from services.gateway.backend import Backend
from shared.hub.checkpoint import locate
from shared.protocol import Sampling
from tests.quire.quire_server import Server
from tests.quire.quire_server import serving as running_server
from tests.scripted_worker import CHAIN, Script
from tests.system.processes import collect
from tests.system.processes import serving as running_engine


class Subject(NamedTuple):
    """What is measured."""

    run: Callable[[], Awaitable[int]]  # serves the requests, and returns the number of tokens
    pids: Sequence[int]  # whose CPU time counts


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of processes, all threads included."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # the number of a process's clock


@asynccontextmanager
async def scheduler(options: argparse.Namespace, flags: Sequence[str]) -> AsyncIterator[Subject]:
    """Run a scheduler with a scripted worker."""
    script = Script(blocks=options.streams * 64)
    async with running_engine(script, f"--max-num-seqs={options.streams}", *flags) as (engine, backend):

        async def run() -> int:
            await asyncio.gather(*(stream(backend, number, options.tokens) for number in range(options.streams)))
            return int(options.streams * options.tokens)

        yield Subject(run, [engine.scheduler.pid])


async def stream(backend: Backend, number: int, tokens: int) -> None:
    sampling = Sampling(max_tokens=tokens, seed=0, temperature=0.0)
    async with backend.submit(array("i", [CHAIN, 10 + number]), sampling) as request:
        await collect(request)


@asynccontextmanager
async def server(options: argparse.Namespace, flags: Sequence[str]) -> AsyncIterator[Subject]:
    """Run a server with the embedded model."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ("--kv-cache-memory=0.3", f"--max-num-seqs={options.streams}", *flags)
        with running_server(locate(""), Path(folder), *settings, name="smol") as running:
            url = running.url

            async def run() -> int:
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                    await asyncio.gather(*(post(session, url, number, options) for number in range(options.streams)))
                return int(options.streams * options.tokens)

            yield Subject(run, processes(running))


def processes(running: Server) -> list[int]:
    return [running.process.pid, *(child.pid for child in running.process.children())]


async def post(session: aiohttp.ClientSession, url: str, number: int, options: argparse.Namespace) -> None:
    body = {"model": "smol", "prompt": [1000 + number] * 16, "max_tokens": options.tokens, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body | {"temperature": 0, "stream": True}) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def measure(options: argparse.Namespace) -> None:
    """Print the result of all pairs."""
    subject = {"scheduler": scheduler, "server": server}[options.what]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        without = await stack.enter_async_context(subject(options, ()))
        flags = () if options.control else (f"--record={folder}",)
        recording = await stack.enter_async_context(subject(options, flags))
        for warm in (without, recording):
            await warm.run()
        pairs = []
        for number in range(options.pairs):
            order = ((0, without), (1, recording)) if number % 2 else ((1, recording), (0, without))
            costs = {index: await microseconds_a_token(one) for index, one in order}
            pairs.append((costs[0], costs[1]))
    print(row(options, pairs))


async def microseconds_a_token(subject: Subject) -> float:
    before = cpu_seconds(subject.pids)
    tokens = await subject.run()
    return (cpu_seconds(subject.pids) - before) / tokens * 1e6


def row(options: argparse.Namespace, pairs: Sequence[tuple[float, float]]) -> str:
    """Return a row of the table: medians of both, of their differences, and the quartiles of their ratios."""
    without, recording = (statistics.median(values) for values in zip(*pairs, strict=True))
    more = statistics.median(b - a for a, b in pairs)
    low, middle, high = statistics.quantiles([b / a - 1 for a, b in pairs], n=4)
    what = options.what + (", neither records" if options.control else "")
    ratio = f"{middle:+.1%} | {low:+.1%} to {high:+.1%}"
    return f"| {what} | {options.streams} | {len(pairs)} | {without:.2f} | {recording:.2f} | {more:.2f} | {ratio} |"


def main(argv: Sequence[str]) -> None:
    """Parse the arguments, and print a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scheduler", "server"])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--control", action="store_true", help="let neither record")
    options = parser.parse_args(argv)
    print("| what | streams | pairs | without, µs a token | with, µs | more, µs | ratio | its quartiles |")
    print("|---|---|---|---|---|---|---|---|")
    asyncio.run(measure(options))


if __name__ == "__main__":
    main(sys.argv[1:])
