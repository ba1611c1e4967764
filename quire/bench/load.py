"""Sends many requests: each at its arrival time, or later, when another ends, if the most allowed are running."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import NamedTuple

import aiohttp

from quire.bench.client import Outcome, Target, send
from quire.bench.workload import Request

SESSION_TIMEOUT = aiohttp.ClientTimeout(total=6 * 3600, sock_connect=60)  # seconds; --timeout applies as well
RETRY_INTERVAL = 1.0  # seconds between two requests to a server that is not ready


class Run(NamedTuple):
    """The outcomes of one run of the benchmark."""

    outcomes: list[Outcome]  # in the requests' order
    seconds: float  # from the first request to the end of the last
    began: datetime


def session(concurrency: int | None, *, insecure: bool = False) -> aiohttp.ClientSession:
    """Return a session that keeps a connection for each request that may run at once."""
    connector = aiohttp.TCPConnector(limit=concurrency or 0, keepalive_timeout=60, ssl=not insecure)
    return aiohttp.ClientSession(connector=connector, timeout=SESSION_TIMEOUT, trust_env=True)


async def run(
    http: aiohttp.ClientSession,
    target: Target,
    requests: Sequence[Request],
    times: Sequence[float],
    concurrency: int | None,
    *,
    prefix: str = "bench-",
    on_done: Callable[[], object] = lambda: None,
) -> Run:
    """Send each request at its time (seconds from now), at most `concurrency` at once. Call `on_done` after each."""
    slots = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
    began, start = datetime.now(), time.perf_counter()

    async def send_one(request: Request, id: str, due: float) -> Outcome:
        async with slots:
            outcome = await send(http, target, request, id)
        outcome.queued = outcome.started - due
        on_done()
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for index, (request, at) in enumerate(zip(requests, times, strict=True)):
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            due = time.perf_counter()  # not `start + at`: this client's own lateness is no queueing
            tasks.append(group.create_task(send_one(request, f"{prefix}{index}", due)))
    return Run([task.result() for task in tasks], time.perf_counter() - start, began)


async def wait_until_ready(http: aiohttp.ClientSession, target: Target, request: Request, seconds: float) -> str:
    """Send a request until it succeeds, for at most `seconds`. Return '', or the last error."""
    error = "it does not answer"
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                error = (await send(http, target, request, "bench-ready")).error
                if not error:
                    break
                await asyncio.sleep(RETRY_INTERVAL)
    return error
