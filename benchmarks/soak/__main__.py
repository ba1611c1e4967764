"""Keeps a server under load for an hour, kills a part of it every 20 seconds, and looks for what was lost or leaked.

    make soak                 # an hour
    make soak MINUTES=10
    python -m benchmarks.soak --minutes 2 --data-parallel-size 1 --api-server-count 1

`quire serve` serves the embedded model, by default with two engines and two gateways. Clients ask for twice as many
streams as it runs at once, a limited set of distinct ones: greedy and seeded, with n > 1, stop strings, penalties and
log-probabilities, long and short, with a shared beginning. Some clients stall (they read nothing for seconds), some
leave in the middle, and half of those come back. They try again after status 429, and when their gateway is killed.
Every 20 seconds a random worker, scheduler or gateway is killed (-9) or frozen (SIGSTOP), and the supervisor replaces
it.

Each stream's text, log-probabilities, finish reasons and usage must be those of the same request alone on the idle
server before. Prints a page of tables, writes it to `benchmarks/results/soak.md`, and exits with status 1 if a stream
was lost, or if blocks, requests, file descriptors, files or memory are left at the end.
"""

import argparse
import asyncio
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from yarl import URL

from benchmarks.soak.clients import Client, undisturbed_answer
from benchmarks.soak.faults import FaultInjector
from benchmarks.soak.processes import ProcessWatch
from benchmarks.soak.report import Measurement, Remains, failures, page
from benchmarks.soak.tally import Tally
from benchmarks.soak.workload import make_requests
from shared.hub.checkpoint import locate
from tests.quire.quire_server import Server, health, serving
from tests.system.http_client import figures, idle

PAGE = Path(__file__).parents[1] / "results" / "soak.md"
MODEL = "smol"
OVERLOAD = 2
"""Streams that clients ask for, as a multiple of the sequences that the server runs at once."""

REST_WITHIN = 120.0
"""Seconds after the last fault within which the server must be whole and idle again."""


class Http(NamedTuple):
    """Holds the address at which the server listens, as `figures` wants to know it."""

    port: int


def main(argv: Sequence[str]) -> int:
    """Run a soak, write its page, and return the exit status. A failed run keeps its log and its records."""
    options = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="quire-soak-"))
    flags = [
        f"--data-parallel-size={options.data_parallel_size}",
        f"--api-server-count={options.api_server_count}",
        f"--max-num-seqs={options.max_num_seqs}",
        f"--max-num-queued-reqs={options.max_num_seqs}",
        f"--record={folder}/records",
    ]
    with serving(locate(""), folder, *flags, name=MODEL) as server:
        measurement = asyncio.run(soak(server, options))
        status = server.stop(signal.SIGTERM)
    measurement.exit_status = status
    text = page(measurement, shlex.join(["python", "-m", "benchmarks.soak", *argv]))
    print(text)
    options.out.write_text(text)
    if wrong := failures(measurement):
        print(*wrong, f"log and records: {folder}", sep="\n", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0, help="of requests, clients and faults")
    parser.add_argument("--data-parallel-size", type=int, default=2, help="engines")
    parser.add_argument("--api-server-count", type=int, default=2, help="gateways")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="sequences that an engine runs at once")
    parser.add_argument("--requests", type=int, default=24, help="distinct ones")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    return parser.parse_args(argv)


async def soak(server: Server, options: argparse.Namespace) -> Measurement:
    """Run the soak against a server that is starting, and return what was seen."""
    url, watch, tally = server.url, ProcessWatch(server), Tally()
    http = Http(URL(url).port or 80)
    requests = make_requests(options.requests, options.seed)
    expected = [(request, await undisturbed_answer(url, request)) for request in requests]
    await at_rest(http, url, options.data_parallel_size)
    before, files = watch.look(), server.files()
    engines, gateways = options.data_parallel_size, options.api_server_count
    faults = FaultInjector(
        server, http.port, {"gateway": gateways, "scheduler": engines, "worker": engines}, options.seed
    )
    count = OVERLOAD * engines * options.max_num_seqs
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        injecting = tasks.create_task(faults.run(60 * options.minutes, options.every))
        clients = [
            Client(url, expected, tally, faults.broke, injecting.done, random.Random(f"client {options.seed} {number}"))
            for number in range(count)
        ]
        await asyncio.gather(injecting, *(client.run() for client in clients))
        watching.cancel()
    seconds = time.monotonic() - began
    left = await at_rest(http, url, engines)
    return Measurement(
        seconds=seconds,
        clients=count,
        tally=tally,
        faults=faults.faults,
        histories=watch.histories,
        before=before,
        after=watch.look(),
        left=left,
        new_files=sorted(server.files() - files),
        tracebacks=server.err.read_text().count("Traceback"),
    )


async def at_rest(http: Http, url: str, num_engines: int) -> Remains:
    """Wait until all engines are ready and idle, but not for ever. Return what they still hold."""
    deadline = time.monotonic() + REST_WITHIN
    while True:
        whole = await asyncio.to_thread(health, url, num_engines) == 200
        now = await figures(http)
        if (whole and idle(now)) or time.monotonic() > deadline:
            return Remains(
                whole=whole,
                running=int(now["vllm:num_requests_running"]),
                waiting=int(now["vllm:num_requests_waiting"]),
                blocks=int(now["quire:kv_blocks"] - now["quire:kv_blocks_free"]),
            )
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
