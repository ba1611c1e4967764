"""Measures how long streams pause when a process of a server is killed.

    python -m benchmarks.recovery [--victim scheduler|worker] [--streams 32] [--prompt 512] [--rounds 3]

In each round `quire serve` gets streams with prompts of random tokens, and when each has some tokens, a process is
killed (-9). Prints for each round the seconds from the first request to the last stream's first token (the prompts are
computed once), the seconds from the kill to the last stream's next token (the process starts again, and the prompts and
what followed are computed once more), and their ratio.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from shared.hub.checkpoint import locate
from tests.quire.quire_server import Server, serving
from tests.waiting import until

OUTPUT = 1000
"""Tokens of each stream, more than come before the measurement ends."""

BEFORE_THE_KILL = 8
"""Tokens that each stream has by then."""

VOCABULARY = range(100, 40_000)


class Stream:
    """A stream of random tokens, and the times at which its tokens came."""

    def __init__(self, num_tokens: int, random: random.Random) -> None:
        self.prompt = random.choices(VOCABULARY, k=num_tokens)
        self.times: list[float] = []

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        body = {"model": "smol", "prompt": self.prompt, "max_tokens": OUTPUT, "stream": True, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    assert "error" not in json.loads(line.removeprefix(b"data: ")), line
                    self.times.append(time.perf_counter())


async def measure(server: Server, options: argparse.Namespace, numbers: random.Random) -> tuple[float, float]:
    """Return the seconds for the prompts, and for the recovery."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        streams = [Stream(options.prompt, numbers) for _ in range(options.streams)]
        tasks = [asyncio.create_task(stream.run(session, server.url)) for stream in streams]
        await until(lambda: all(stream.times for stream in streams), 300)
        prompts = time.perf_counter() - began
        await until(lambda: min(len(stream.times) for stream in streams) >= BEFORE_THE_KILL, 300)
        server.children()[options.victim].kill()
        killed = time.perf_counter()
        await until(lambda: all(stream.times[-1] > killed for stream in streams), 300)
        recovery = time.perf_counter() - killed
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return prompts, recovery


def main(argv: Sequence[str]) -> None:
    """Parse the arguments, and print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", choices=["scheduler", "worker"], default="scheduler")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    numbers = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(
            locate(""), Path(folder), "--kv-cache-memory=1", f"--num-threads={os.cpu_count()}", name="smol"
        ) as server,
    ):
        print(f"{options.streams} streams, prompts of {options.prompt} tokens, the {options.victim} is killed")
        for _ in range(options.rounds):
            prompts, recovery = asyncio.run(measure(server, options, numbers))
            print(f"prompts {prompts:.1f} s, recovery {recovery:.1f} s, ratio {recovery / prompts:.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
