"""Measures with how many threads the worker should compute when gateway, scheduler and clients share its cores.

Serves the embedded model with each number of threads in turn, in alternation, and prints output tokens/s and the
median time between two tokens at several concurrencies. 128 random tokens in, `--output` out, greedy, EOS ignored.

    python benchmarks/serve_threads.py --threads 1 2 --concurrency 1 8 32 --rounds 2
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp


@contextmanager
def serving(threads: int) -> Iterator[str]:
    """Run a server whose worker has `threads` threads; yield its URL."""
    argv = [sys.executable, "-m", "quire", "serve", "--host=127.0.0.1", "--port=0", f"--num-threads={threads}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(match[1] for line in process.stdout if (match := re.search(r"at (http://\S+) \(ready", line)))
        finally:
            process.terminate()


async def one(session: aiohttp.ClientSession, url: str, output: int) -> list[float]:
    """Return the times at which the chunks of one stream arrived."""
    prompt = [random.randrange(1000, 40000) for _ in range(128)]
    body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    times = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                assert "error" not in json.loads(line[6:]), line
                times.append(time.perf_counter())
    return times


async def load(url: str, concurrency: int, output: int) -> tuple[float, float]:
    """Return output tokens/s, and the median milliseconds between two chunks of a stream."""
    async with aiohttp.ClientSession() as session:
        await one(session, url, 4)
        begun = time.perf_counter()
        streams = await asyncio.gather(*(one(session, url, output) for _ in range(concurrency)))
        seconds = time.perf_counter() - begun
    gaps = [after - before for times in streams for before, after in itertools.pairwise(times)]
    return concurrency * output / seconds, 1000 * statistics.median(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print("| round | threads | concurrency | output tok/s | ITL p50, ms |\n|---|---|---|---|---|")
    for round in range(args.rounds):
        for threads in args.threads:
            with serving(threads) as url:
                for concurrency in args.concurrency:
                    rate, gap = asyncio.run(load(url, concurrency, args.output))
                    print(f"| {round} | {threads} | {concurrency} | {rate:.1f} | {gap:.0f} |", flush=True)


if __name__ == "__main__":
    main()
