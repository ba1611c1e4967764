"""Measures whether a server survives a lack of CPU, and how soon a hung part of it is found.

    python -m benchmarks.starvation [--over ipc tcp] [--seconds 600] [--loops 4] [--nice 19] [--model PATH]
    python -m benchmarks.starvation --hangs [--over ipc tcp]

The first serves the embedded model, with every process at `--nice`, beside `--loops` busy loops of ordinary priority,
while `--streams` clients ask for completions all the time. It counts deaths: processes that were killed, and peers that
were given up. All of them are false. Over tcp the services connect over loopback and see nothing of each other's
processes, as between hosts; the supervisor always does.

The second makes a worker hang in different ways, on an idle host, and prints how long it takes to find it. (Where
others use the host, times may be those of a starved one.)
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import aiohttp
import msgspec
import psutil

from benchmarks.serving import ROOT
from quire import serve
from quire.local_services import LocalServices
from quire.settings import read
from tests.ports import free_ports
from tests.scripted_worker import CHAIN, Script, ScriptedFailure
from tests.system.processes import complete, serving
from tests.waiting import until

DEATHS = re.compile(
    r"is given up: .*|has left: (?!its connection ended).*|is killed: .*|the engine was lost: .*|; starts again.*"
)
BODY = {"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
READY = 300.0  # seconds
HANGS = {
    "stop": "stopped (SIGSTOP)",
    "hang": "a deadlock in a step",
    "hang_with_gil": "a deadlock that holds Python's lock",
    "loop": "an endless loop",
    "loop_with_gil": "an endless loop that holds Python's lock",
}
STUCK = 666


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", nargs="+", choices=["ipc", "tcp"], default=["ipc", "tcp"])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--nice", type=int, default=19)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--model", default="")
    parser.add_argument("--hangs", action="store_true")
    parser.add_argument("--serve", choices=["ipc", "tcp"], help=argparse.SUPPRESS)  # what the first starts, niced
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        sys.exit(serve_niced(options))
    for over in options.over:
        asyncio.run(find_hangs(over) if options.hangs else starve(over, options))


def serve_niced(options: argparse.Namespace) -> int:
    """Run `quire serve`, over tcp if asked, with all its processes at the given priority."""
    os.nice(options.nice)
    if options.serve == "tcp":
        connect = serve.connect_services
        serve.connect_services = lambda *args: over_tcp(connect(*args))
    flags = {"model": options.model, "host": "127.0.0.1", "port": options.port, "ready_timeout": READY}
    return serve.serve(read(flags, os.environ), time.monotonic())


def over_tcp(services: LocalServices) -> LocalServices:
    """Return the services of one engine, with sockets over tcp."""
    gateways, workers = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    replace = msgspec.structs.replace
    return LocalServices(
        gateways=[replace(gateway, engines=[gateways]) for gateway in services.gateways],
        schedulers=[replace(one, gateways=gateways, workers=workers) for one in services.schedulers],
        workers=[replace(worker, scheduler=workers) for worker in services.workers],
    )


async def starve(over: str, options: argparse.Namespace) -> None:
    """Run once; print a line, and each death."""
    (port,) = free_ports(1)
    inside = [f"--serve={over}", f"--port={port}", f"--nice={options.nice}", f"--model={options.model}"]
    argv = [sys.executable, "-m", "benchmarks.starvation", *inside]
    with tempfile.TemporaryFile("w+") as log, popen(argv, log) as server:
        loops: list[subprocess.Popen[bytes]] = []
        try:
            url = f"http://127.0.0.1:{port}"
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(READY)) as session:
                await ready(session, url)
                yield_sessions(server.pid, options.nice)
                loops = [popen(["sh", "-c", "while :; do :; done"], log) for _ in range(options.loops)]
                statuses = await ask(session, url, options.streams, options.seconds)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
            log.seek(0)
            deaths = DEATHS.findall(log.read())
            server.send_signal(signal.SIGTERM)
    fine = statuses.count(200)
    load = f"{options.seconds:.0f} s at nice {options.nice} beside {options.loops} loops"
    print(f"over {over}, {load}: {len(deaths)} deaths; {fine} answers, {len(statuses) - fine} failures", flush=True)
    for death in deaths:
        print("   ", death)


def yield_sessions(server: int, nice: int) -> None:
    """Lower the priority of sessions too, where the kernel schedules them as groups: `nice` acts within one."""
    for process in psutil.Process(server).children(recursive=True):
        with suppress(FileNotFoundError):
            Path(f"/proc/{process.pid}/autogroup").write_text(str(nice))


def popen(argv: list[str], log: IO[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(argv, stdout=log, stderr=log, cwd=ROOT)


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(READY):
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)


async def ask(session: aiohttp.ClientSession, url: str, streams: int, seconds: float) -> list[int]:
    """Request `at_once` completions at a time for `seconds`; return the statuses of the answers, 0 for none."""
    statuses: list[int] = []

    async def client() -> None:
        while True:
            try:
                async with session.post(f"{url}/v1/completions", json=BODY) as response:
                    await response.read()
                    statuses.append(response.status)
            except aiohttp.ClientError:
                statuses.append(0)
                await asyncio.sleep(1.0)

    clients = [asyncio.ensure_future(client()) for _ in range(streams)]
    await asyncio.sleep(seconds)
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return statuses


async def find_hangs(over: str) -> None:
    """Print a line for each way to hang."""
    for kind, words in HANGS.items():
        script = Script(delay=0.01, failures=[ScriptedFailure(STUCK, kind, lives=1)])
        async with serving(script, tcp=over == "tcp") as (running, backend):
            await complete(backend, [CHAIN], 9)
            task = asyncio.ensure_future(complete(backend, [CHAIN] if kind == "stop" else [CHAIN, STUCK], 1000))
            if kind == "stop":
                running.worker.signal(signal.SIGSTOP)
            began = time.monotonic()
            await until(lambda running=running: "is given up: " in running.scheduler.log, 60.0)
            deaths = DEATHS.findall(running.scheduler.log)
            print(f"over {over}, {words}: found after {time.monotonic() - began:.1f} s ({deaths[0]})", flush=True)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    main()
