"""Measures a start: the time from the command to healthy, and to the first token of a first request.

    python -m benchmarks.start [--repeats 5] [--flags "--quantization gguf"]

Serves the embedded model, which one start before made ready in the cache ("warm"). The first token is of a streamed
completion that is sent as soon as `/health` says 200. Shown are the medians and the best, in seconds,
and the CPU time that all processes took until they had ended again, which says more where others use the machine.
"""

import argparse
import asyncio
import resource
import shlex
import statistics
import sys
import time
from contextlib import suppress

import aiohttp

from benchmarks.serving import ROOT
from tests.ports import free_ports

PROBE = 0.02  # seconds between two looks
BODY = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "stream": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--flags", default="", help="of `quire serve`, in one argument")
    options = parser.parse_args()
    flags = shlex.split(options.flags)
    asyncio.run(start(flags))  # makes what a warm start finds
    times = [asyncio.run(start(flags)) for _ in range(options.repeats)]
    print("| s | median | best |\n|---|---|---|")
    names = ("command to healthy", "command to first token", "CPU time")
    for name, values in zip(names, zip(*times, strict=True), strict=True):
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} |")


async def start(flags: list[str]) -> tuple[float, float, float]:
    """Run one server; return the seconds from the command to healthy and to the first token, and its CPU seconds."""
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    began, used = time.perf_counter(), children_seconds()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire", "serve", "--host=127.0.0.1", f"--port={port}", *flags),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        async with aiohttp.ClientSession() as session:
            while not await healthy(session, url):
                if process.returncode is not None:
                    raise SystemExit(f"the server ended with status {process.returncode}")
                await asyncio.sleep(PROBE)
            ready = time.perf_counter() - began
            async with session.post(f"{url}/v1/completions", json=BODY) as response:
                response.raise_for_status()
                await response.content.readline()
            first = time.perf_counter() - began
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
    return ready, first, children_seconds() - used


async def healthy(session: aiohttp.ClientSession, url: str) -> bool:
    with suppress(aiohttp.ClientError):
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    return False


def children_seconds() -> float:
    """Return the CPU seconds of all ended child processes and their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
