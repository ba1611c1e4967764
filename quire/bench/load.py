"""Sends many requests, each at its time or as soon as the concurrency allows."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import NamedTuple

import aiohttp

from quire.bench.client import Outcome, Target, send
from quire.bench.workload import Request

TIMEOUT = aiohttp.ClientTimeout(total=6 * 3600, sock_connect=60)  # besides --timeout
RETRY = 1.0  # seconds between two tries of a server that is not ready


class Run(NamedTuple):
    """A finished load."""

    outcomes: list[Outcome]  # in the requests' order
    seconds: float  # from the first to the end of the last
    began: datetime


def session(concurrency: int | None, *, insecure: bool = False) -> aiohttp.ClientSession:
    """Return a session that keeps a connection for each request that may run at once."""
    connector = aiohttp.TCPConnector(limit=concurrency or 0, keepalive_timeout=60, ssl=not insecure)
    return aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, trust_env=True)


async def run(
    http: aiohttp.ClientSession,
    target: Target,
    requests: Sequence[Request],
    times: Sequence[float],
    concurrency: int | None,
    *,
    prefix: str = "bench-",
    done: Callable[[], object] = lambda: None,
) -> Run:
    """Send each request at its time in seconds from now, at most `concurrency` together; `done` after each."""
    slots = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
    date, began = datetime.now(), time.perf_counter()

    async def one(request: Request, id: str, due: float) -> Outcome:
        async with slots:
            outcome = await send(http, target, request, id)
        outcome.queued = outcome.started - due
        done()
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for index, (request, at) in enumerate(zip(requests, times, strict=True)):
            if (wait := began + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            due = time.perf_counter()  # a delay of this client is not blamed on the server
            tasks.append(group.create_task(one(request, f"{prefix}{index}", due)))
    return Run([task.result() for task in tasks], time.perf_counter() - began, date)


async def ready(http: aiohttp.ClientSession, target: Target, request: Request, seconds: float) -> str:
    """Try for `seconds` until a request is answered; return the last error, or '' if it was answered."""
    error = "it does not answer"
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                error = (await send(http, target, request, "bench-ready")).error
                if not error:
                    break
                await asyncio.sleep(RETRY)
    return error
