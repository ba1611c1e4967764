"""Measures what the gateway's choice of an engine does to prefix hits and to the time to the first token.

    python -m benchmarks.routing [--engines 2 4] [--rounds 3] [--seconds 30]
    python -m benchmarks.routing --real [--users 6] [--think 4]

Users chat: each picks one of `--prompts` system prompts, the first ones more often, asks some questions, each of which
has the whole chat before it, thinks between them, and begins a new chat. The gateway's `Backend` runs in this process,
so neither HTTP nor text is in the figures. By default the workers are scripted and sleep for as long as a model would
compute: 10 ms a step and 1 ms a token. With `--real` there are two engines with the embedded model, a thread each.

The policies take turns within a round, on the same engines and with chats of the same lengths and thoughts, but of
other tokens, so that nothing is left in the caches for the next one. Prints for each policy the median of its rounds,
and their least and most. Prints first what a choice costs, with no engine behind it.
"""

import argparse
import asyncio
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, redirect_stdout
from pathlib import Path
from typing import NamedTuple, get_args

from services.gateway.backend import Backend
from services.gateway.routing import Router, RoutingPolicy
from shared.hub.checkpoint import locate
from shared.protocol import VERSION, ModelInfo, Sampling, Snapshot, Status, Welcome
from tests.scripted_worker import Script
from tests.system.processes import Child, Engine
from tests.waiting import until

POLICIES: Sequence[RoutingPolicy] = get_args(RoutingPolicy)
SCRIPT = Script(vocab_size=30_000, max_positions=4096, blocks=1024, delay=0.01, token_delay=0.001)
FLAGS = ["--max-num-seqs=16", "--max-num-batched-tokens=256", "--max-model-len=4096"]
KV_MEMORY = 0.7  # GiB of each real worker, about as many blocks as the scripted ones have
HEADER, SYSTEM, TURNS, QUESTION, ANSWER = 32, (200, 600), (1, 7), (20, 90), (20, 80)
"""Tokens of a template's beginning, which all chats share, and of the others the least and the most."""


class Measured(NamedTuple):
    """One policy's turn."""

    hit_rate: float  # tokens found in the prefix caches, of those looked up
    ttfts: list[float]  # seconds
    rate: float  # finished requests a second

    @property
    def figures(self) -> list[float]:
        """Return what the table shows: percents, milliseconds and requests a second."""
        ttfts = sorted(self.ttfts)
        median, high = ttfts[len(ttfts) // 2], ttfts[len(ttfts) * 95 // 100]
        return [100 * self.hit_rate, 1000 * statistics.mean(ttfts), 1000 * median, 1000 * high, self.rate]


class User:
    """Chats over and over. `shape` determines lengths and pauses, `tokens` the content."""

    def __init__(self, backend: Backend, systems: list["array[int]"], think: float, seed: int, content: int) -> None:
        self.ttfts: list[float] = []
        self.finished = 0
        self._backend, self._systems, self._think = backend, systems, think
        self._shape, self._content = random.Random(seed), random.Random(content)

    async def run(self) -> None:
        while True:
            system = min(int(self._shape.paretovariate(1.0)) - 1, len(self._systems) - 1)
            chat = self._systems[system][:]
            for _ in range(self._shape.randint(*TURNS)):
                await asyncio.sleep(self._shape.expovariate(1 / self._think))
                chat += random_tokens(self._content, self._shape.randint(*QUESTION))
                chat += await self._ask(chat, self._shape.randint(*ANSWER))

    async def _ask(self, chat: "array[int]", count: int) -> "array[int]":
        output, began = array("i"), time.perf_counter()
        async with self._backend.submit(chat, Sampling(max_tokens=count, seed=0, temperature=0.0)) as request:
            while len(output) < count:
                for row in await request.rows():
                    if row.tokens and not output:
                        self.ttfts.append(time.perf_counter() - began)
                    output.extend(row.tokens)
        self.finished += 1
        return output


def random_tokens(numbers: random.Random, count: int) -> "array[int]":
    return array("i", (numbers.randrange(100, 30_000) for _ in range(count)))


async def measure(addresses: list[str], policy: RoutingPolicy, round: int, options: argparse.Namespace) -> Measured:
    """Let the users chat for some seconds."""
    shape, content = random.Random(round), random.Random(f"{round} {policy} {len(addresses)}")
    header = random_tokens(content, HEADER)
    systems = [header + random_tokens(content, shape.randint(*SYSTEM)) for _ in range(options.prompts)]
    async with Backend(addresses, routing_policy=policy) as backend:
        await until(lambda: backend.ready(len(addresses)), 300)
        users = [
            User(backend, systems, options.think, shape.getrandbits(32), content.getrandbits(32))
            for _ in range(options.users * len(addresses))
        ]
        tasks = [asyncio.create_task(user.run()) for user in users]
        await asyncio.sleep(options.warm)
        warm, before = [(len(user.ttfts), user.finished) for user in users], counts(backend)
        await asyncio.sleep(options.seconds)
        queries, hits = (after - earlier for after, earlier in zip(counts(backend), before, strict=True))
        failed = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(task for task in tasks if task not in failed), return_exceptions=True)
        await asyncio.gather(*failed)  # raises what has ended a user
        await until(lambda: not any(one.running + one.waiting for one in snapshots(backend)), 60)
    ttfts = [ttft for user, (begun, _) in zip(users, warm, strict=True) for ttft in user.ttfts[begun:]]
    finished = sum(user.finished - earlier for user, (_, earlier) in zip(users, warm, strict=True))
    return Measured(hits / queries, ttfts, finished / options.seconds)


def snapshots(backend: Backend) -> list[Snapshot]:
    return [status.snapshot for status in backend.statuses().values()]


def counts(backend: Backend) -> tuple[int, int]:
    """Return the tokens that engines have looked up in their caches so far, and those found."""
    shown = snapshots(backend)
    return sum(one.prefix_queries for one in shown), sum(one.prefix_hits for one in shown)


@asynccontextmanager
async def engines(count: int, *, real: bool) -> AsyncIterator[list[str]]:
    """Run engines for the block, and yield their addresses."""
    async with AsyncExitStack() as stack:
        addresses = []
        for index in range(count):
            folder = Path(tempfile.mkdtemp(prefix="q"))
            stack.callback(shutil.rmtree, folder)
            engine = Engine(folder, SCRIPT, [*FLAGS, f"--engine={index}"])
            if real:
                engine.worker = real_worker(engine)
            for child in (engine.scheduler, engine.worker):
                stack.push_async_callback(child.stop)
                await child.start()
            addresses.append(engine.address)
        yield addresses


def real_worker(engine: Engine) -> Child:
    """Return a worker with the embedded model on one core."""
    own = [f"--scheduler={engine.workers}", f"--model={locate('')}", f"--supervisor={os.getpid()}"]
    size = ["--num-threads=1", f"--kv-cache-memory={KV_MEMORY}", *FLAGS]
    return Child("worker", engine.folder, ["-m", "services.worker", *own, *size])


async def compare(count: int, options: argparse.Namespace) -> None:
    """Print a table for so many engines."""
    measured: dict[str, list[list[float]]] = {policy: [] for policy in POLICIES}
    with redirect_stdout(sys.stderr):  # for the engines' logs
        async with engines(count, real=options.real) as addresses:
            for round in range(options.rounds):
                for shift in range(len(POLICIES)):  # another one begins in each round
                    policy = POLICIES[(round + shift) % len(POLICIES)]
                    measured[policy].append((await measure(addresses, policy, round, options)).figures)
    kind = "real" if options.real else "scripted"
    print(f"\n{count} engines with {kind} workers, {options.users * count} users, {options.rounds} rounds\n")
    print("| policy | hit rate, % | TTFT mean, ms | TTFT median, ms | TTFT p95, ms | requests/s |")
    print("|---|---|---|---|---|---|")
    for name, rounds in measured.items():
        cells = [f"{statistics.median(of):.1f} ({min(of):.1f}–{max(of):.1f})" for of in zip(*rounds, strict=True)]
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


class IdleEngine:
    """An engine as a connection shows it, with a cache of 8192 blocks."""

    welcome: Welcome | None = Welcome(VERSION, "", "", ModelInfo("", "", "", 0, 0, ""), 8192, 256)
    status: Status | None = Status(True, False, Snapshot(blocks=8192, block_size=16, prefix_caching=True))
    load = 0


def print_cost() -> None:
    """Print what a choice among four engines with full caches costs, and what it costs to note what was computed."""
    numbers, router, idle = random.Random(0), Router(), [IdleEngine() for _ in range(4)]
    for engine in idle:
        for _ in range(20):
            router.note(engine, random_tokens(numbers, 8000), [array("i", [1])])
    sampling, output = Sampling(max_tokens=100, seed=0), random_tokens(numbers, 100)
    print("| tokens of the prompt | to choose, µs | to note prompt and 100 tokens, µs |\n|---|---|---|")
    for length in (100, 1000, 8000):
        prompts = [random_tokens(numbers, length) for _ in range(200)]
        choose = microseconds(prompts, lambda prompt: router.choose(idle, prompt, sampling))
        note = microseconds(prompts, lambda prompt: router.note(idle[0], prompt, [output]))
        print(f"| {length} | {choose:.0f} | {note:.0f} |")


def microseconds(prompts: list["array[int]"], act: Callable[["array[int]"], object]) -> float:
    """Return the median time of a call."""
    times = []
    for prompt in prompts:
        began = time.perf_counter()
        act(prompt)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def main() -> None:
    """Parse the arguments, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--real", action="store_true", help="two engines with the embedded model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each policy in each round")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds before these, which are not measured")
    parser.add_argument("--users", type=int, default=12, help="for each engine")
    parser.add_argument("--think", type=float, default=2.0, help="mean seconds of a pause")
    parser.add_argument("--prompts", type=int, default=12, help="system prompts")
    options = parser.parse_args()
    print_cost()
    for count in [2] if options.real else options.engines:
        asyncio.run(compare(count, options))


if __name__ == "__main__":
    main()
