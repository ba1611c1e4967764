"""`ProcessWatch`: memory and file descriptors of a server's processes, from their first sight to their end."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from statistics import linear_regression
from typing import NamedTuple

import psutil
from msgspec import Struct

from tests.quire.quire_server import Server

INTERVAL = 2.0  # seconds
WARM_UP = 120.0
"""Seconds of a process's life in which its memory may grow: it touches KV memory and caches for the first time."""

MIN_OBSERVED = 180.0
"""Seconds behind the warm-up from which a growth can be told: a worker still takes a few MiB at once now and then."""


class Sample(NamedTuple):
    """The resources that a process had at a moment (monotonic seconds)."""

    at: float
    resident: int  # bytes
    descriptors: int


class ProcessHistory(Struct):
    """All samples of one process, `name` such as "gateway 0"."""

    name: str
    pid: int
    samples: list[Sample] = []

    @property
    def role(self) -> str:
        return self.name.split()[0]

    @property
    def seconds(self) -> float:
        return self.samples[-1].at - self.samples[0].at

    def growth(self) -> float | None:
        """Return by how many bytes its memory grew a minute after its warm-up, or None if it did not live so long."""
        began = self.samples[0].at + WARM_UP
        warm = [sample for sample in self.samples if sample.at >= began]
        if not warm or warm[-1].at - began < MIN_OBSERVED:
            return None
        return 60.0 * linear_regression([one.at for one in warm], [float(one.resident) for one in warm]).slope


class ProcessWatch:
    """Looks at the supervisor and at every service, and at those that replace them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._histories: dict[int, ProcessHistory] = {}  # by process id

    @property
    def histories(self) -> list[ProcessHistory]:
        return list(self._histories.values())

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(INTERVAL)

    def look(self) -> dict[str, Sample]:
        """Take a sample of each process, and return them by name."""
        samples: dict[str, Sample] = {}
        for name, process in self._processes():
            with suppress(psutil.Error):  # it has just ended
                sample = Sample(time.monotonic(), process.memory_info().rss, process.num_fds())
                history = self._histories.setdefault(process.pid, ProcessHistory(name, process.pid))
                history.samples.append(sample)
                samples[name] = sample
        return samples

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        yield "supervisor", self._server.process
        yield from sorted(self._server.all_children().items())
