"""Measures how much of the KV memory of running requests is waste, from the server's own metrics.

Starts `quire serve` with each block size, sends it the long-tail mix through `quire bench serve`'s client, and reads
/metrics all the while. Averages are over time, while anything ran:

- *waste*: what the scheduler says of its held blocks (`quire:kv_waste_perc`; shared blocks count once).
- *to 2048* and *to the longest*: the same for memory reserved in one piece a request, as long as the context or as the
  longest request; the running requests and the positions that they store are those of the same readings.

    python benchmarks/kv_waste.py
    python benchmarks/kv_waste.py --step 0.03     # a worker that sleeps in each step and computes nothing

Waste depends on lengths and on the scheduler, not on how fast tokens come: `--step` gives the same answer in a minute
where the CPU would take a quarter of an hour.
"""

import argparse
import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving import CONTEXT, embedded, sleeping
from quire.bench.client import Target
from quire.bench.load import Run, run, session
from quire.bench.options import WorkloadOptions
from quire.bench.workload import Request, RequestGenerator
from shared.hub.checkpoint import locate
from shared.hub.embedded import EMBEDDED
from shared.text.tokenizer import Tokenizer

INTERVAL = 0.1  # seconds between two readings; the engine renews its figures four times a second
NAMES = ("vllm:num_requests_running", "quire:kv_tokens_held", "quire:kv_waste_perc", "quire:kv_block_size")


class Reading(NamedTuple):
    """The engine's gauges at one moment."""

    at: float
    running: float
    tokens: float
    waste: float
    block_size: float


async def read(http: aiohttp.ClientSession, url: str) -> Reading:
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    return Reading(time.perf_counter(), *(values[name] for name in NAMES))


async def measure(url: str, requests: list[Request], concurrency: int) -> tuple[Run, list[Reading]]:
    """Send the requests; return the load and the engine's readings meanwhile."""
    target = Target(
        f"{url}/v1/completions",
        False,
        EMBEDDED,
        {"Content-Type": "application/json"},
        {"ignore_eos": True, "temperature": 0},
        timeout=3600.0,
    )
    readings: list[Reading] = []

    async def watch(http: aiohttp.ClientSession) -> None:
        while True:
            readings.append(await read(http, url))
            await asyncio.sleep(INTERVAL)

    async with session(concurrency) as http, session(None) as other:
        watcher = asyncio.create_task(watch(other))
        load = await run(http, target, requests, [0.0] * len(requests), concurrency)
        watcher.cancel()
    return load, [reading for reading in readings if reading.running and reading.tokens]


def over_time(readings: list[Reading], shares: list[float]) -> float:
    """Return the average of the shares, each weighted by the time until the next reading."""
    spans = [after.at - before.at for before, after in itertools.pairwise(readings)]
    return sum(share * span for share, span in zip(shares, spans, strict=False)) / sum(spans)


async def row(block_size: int, args: argparse.Namespace) -> str:
    options = WorkloadOptions(dataset_name="long-tail", num_prompts=args.num_prompts, seed=args.seed)
    requests = RequestGenerator(options, Tokenizer.load(locate("")), seed=args.seed).generate()
    blocks, length = f"--block-size={block_size}", f"--max-model-len={CONTEXT}"
    async with sleeping(args.step, blocks) if args.step else embedded(blocks, length) as url:
        load, readings = await measure(url, requests, args.concurrency)
    failed = [one.error for one in load.outcomes if not one.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, such as: {failed[0]}")
    longest = max(request.prompt_len + request.output_len for request in requests)
    if {reading.block_size for reading in readings} != {block_size}:
        raise SystemExit("the server has blocks of another size")
    paged = over_time(readings, [reading.waste for reading in readings])
    to_context, to_longest = (
        over_time(readings, [1 - reading.tokens / (reading.running * length) for reading in readings])
        for length in (CONTEXT, longest)
    )
    outputs = [one.output_tokens for one in load.outcomes]
    mix = f"{min(outputs)}-{max(outputs)}, {sum(outputs) / len(outputs):.0f}"
    share = f"{paged:.1%} | {to_context:.0%} | {to_longest:.0%}"
    return f"| {block_size} | {mix} | {load.seconds:.0f} | {len(readings)} | {share} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=float, help="seconds a step, of a worker without a model")
    args = parser.parse_args()
    print(f"| block size | output tokens, mean | seconds | readings | waste | to {CONTEXT} | to the longest |")
    print("|---|---|---|---|---|---|---|")
    for block_size in args.block_size:
        print(asyncio.run(row(block_size, args)), flush=True)


if __name__ == "__main__":
    main()
