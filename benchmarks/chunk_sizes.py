"""Measures what --max-num-batched-tokens does to streams while prompts arrive.

    python -m benchmarks.chunk_sizes [--sizes 64,128,256,512,1024,2048] [--streams 8] [--prompts 12] [--rounds 1]

Each size has its own server: `--streams` long answers run, while prompts of `--length` random tokens arrive at
`--rate` a second. Prints the streams' times between two tokens while prompts came, the prompts' times to their first
token, and the rate of the streams' tokens. With several rounds, the sizes take turns; compare within a round.
"""

import argparse
import asyncio
import itertools
import random
import shlex
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp

from benchmarks.serving import embedded

TIMEOUT = aiohttp.ClientTimeout(total=3600)


class Seen(NamedTuple):
    """The timings of one size, in seconds."""

    gaps: list[float]  # between two tokens of the streams
    firsts: list[float]  # to the prompts' first tokens
    seconds: float  # from the first prompt to the last one's first token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64,128,256,512,1024,2048")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--rate", type=float, default=1.0, help="prompts a second")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--flags", default="", help="of `quire serve`, in one argument")
    options = parser.parse_args()
    print("| round | batched tokens | ITL p50 / p99, ms | TTFT p50 / p99, ms | streams, tok/s |\n|---|---|---|---|---|")
    for round, size in itertools.product(range(options.rounds), map(int, options.sizes.split(","))):
        seen = asyncio.run(measure(size, options))
        itl, ttft = percentiles(seen.gaps), percentiles(seen.firsts)
        rate = len(seen.gaps) / seen.seconds
        print(f"| {round} | {size} | {itl} | {ttft} | {rate:.1f} |", flush=True)


async def measure(size: int, options: argparse.Namespace) -> Seen:
    flags = [f"--max-num-batched-tokens={size}", "--max-num-seqs=32", *shlex.split(options.flags)]
    async with embedded(*flags) as url, aiohttp.ClientSession(timeout=TIMEOUT) as session:
        marks: list[list[float]] = [[] for _ in range(options.streams)]
        streams = [asyncio.create_task(ask(session, url, 64, 1800, mark)) for mark in marks]
        await asyncio.sleep(2)  # until they run
        began = time.perf_counter()
        prompts = []
        for _ in range(options.prompts):
            prompts.append(asyncio.create_task(ask(session, url, options.length, 1, [])))
            await asyncio.sleep(1 / options.rate)
        firsts = [await prompt for prompt in prompts]
        ended = time.perf_counter()
        for stream in streams:
            stream.cancel()
        for end in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(end, Exception):  # a cancellation is none
                raise end
    inside = [[mark for mark in times if began <= mark <= ended] for times in marks]
    gaps = [after - before for times in inside for before, after in itertools.pairwise(times)]
    return Seen(gaps, firsts, ended - began)


async def ask(session: aiohttp.ClientSession, url: str, length: int, tokens: int, marks: list[float]) -> float:
    """Return the seconds to the first chunk of an answer; append the time of each chunk to `marks`."""
    prompt = [random.randrange(1000, 40000) for _ in range(length)]
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                marks.append(time.perf_counter())
    return marks[0] - began


def percentiles(seconds: Sequence[float]) -> str:
    """Return median and 99th percentile in milliseconds."""
    return f"{1000 * statistics.median(seconds):.0f} / {1000 * statistics.quantiles(seconds, n=100)[98]:.0f}"


if __name__ == "__main__":
    main()
