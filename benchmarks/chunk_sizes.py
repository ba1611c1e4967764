"""Measures what --max-num-batched-tokens or --max-step-ms do to streams while prompts arrive.

    python -m benchmarks.chunk_sizes [--sizes 64,128,256,512,1024,2048] [--streams 8] [--prompts 12] [--rounds 1]
    python -m benchmarks.chunk_sizes --step-ms 0,100 [...]

Each value has its own server: `--streams` long answers run, while prompts of `--length` random tokens arrive at
`--rate` a second. Prints the streams' times between two tokens while prompts came, the prompts' times to their first
token, and the rate of the streams' tokens. With several rounds, the values take turns; compare within a round.
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
from tests.waiting import until

TIMEOUT = aiohttp.ClientTimeout(total=3600)


class Seen(NamedTuple):
    """The timings of one size, in seconds."""

    gaps: list[float]  # between two tokens of the streams
    firsts: list[float]  # to the prompts' first tokens
    seconds: float  # from the first prompt to the last one's first token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", default="64,128,256,512,1024,2048", help="of a step in tokens, however long it takes"
    )
    parser.add_argument("--step-ms", default="", help="values of --max-step-ms, instead of sizes")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--rate", type=float, default=1.0, help="prompts a second")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--flags", default="", help="of `quire serve`, in one argument")
    options = parser.parse_args()
    if options.step_ms:
        settings = [[f"--max-step-ms={value}"] for value in options.step_ms.split(",")]
    else:
        settings = [[f"--max-num-batched-tokens={size}", "--max-step-ms=0"] for size in options.sizes.split(",")]
    print("| round | setting | ITL p50 / p99 / longest, ms | TTFT p50 / longest, ms | streams, tok/s |")
    print("|---|---|---|---|---|")
    for round, flags in itertools.product(range(options.rounds), settings):
        seen = asyncio.run(measure(flags, options))
        p50, p99, longest = (1000 * seconds for seconds in (*percentiles(seen.gaps), max(seen.gaps)))
        first, last = (1000 * seconds for seconds in (statistics.median(seen.firsts), max(seen.firsts)))
        times = f"{p50:.0f} / {p99:.0f} / {longest:.0f} | {first:.0f} / {last:.0f}"
        print(f"| {round} | `{flags[0]}` | {times} | {len(seen.gaps) / seen.seconds:.1f} |", flush=True)


async def measure(flags: Sequence[str], options: argparse.Namespace) -> Seen:
    flags = [*flags, "--max-num-seqs=32", *shlex.split(options.flags)]
    async with embedded(*flags) as url, aiohttp.ClientSession(timeout=TIMEOUT) as session:
        marks: list[list[float]] = [[] for _ in range(options.streams)]
        streams = [asyncio.create_task(ask(session, url, 64, 1800, mark)) for mark in marks]
        await until(lambda: all(marks), 60)
        await asyncio.sleep(1)
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


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    return statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]


if __name__ == "__main__":
    main()
