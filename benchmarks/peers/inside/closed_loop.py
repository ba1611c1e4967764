"""What is measured in process: a closed loop, in which a request begins as soon as another has ended.

This runs inside each peer's own environment: the standard library alone.
"""

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TypedDict

from jobs import Answer, answer


class Request(TypedDict):
    """One request; its text is there too, for those who take text."""

    tokens: list[int]
    output_tokens: int


class Figures(TypedDict):
    """What came of a job. Only tokens that were asked for count."""

    seconds: float
    output_tokens: int
    ttfts: list[float]  # seconds from the request's begin, one a request
    itls: list[float]  # seconds between two tokens of a request, all requests' together


Run = Callable[[list[Request], int], Figures]


class Engine(Protocol):
    """An engine that is moved step by step."""

    def add(self, id: int, tokens: list[int], output: int) -> None:
        """Take in a request for exactly so many tokens."""

    def step(self) -> Iterator[tuple[int, int]]:
        """Compute once; the ids of requests with news, and how many tokens are new."""


def serve(load: Callable[[], Run]) -> None:
    """Load, run one tiny request, and then jobs: a `file` of requests, a line of JSON each, and a `concurrency`."""

    def loaded() -> Answer:
        run = load()
        run([Request(tokens=list(range(1000, 1016)), output_tokens=1)], 1)
        return lambda job: run(_read(job["file"]), job["concurrency"])

    answer(loaded)


def _read(path: str) -> list[Request]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def closed_loop(engine: Engine) -> Run:
    """A run that keeps `concurrency` requests in the engine."""
    ids = itertools.count()  # never used again: some engines remember them

    def run(requests: list[Request], concurrency: int) -> Figures:
        waiting = deque(requests)
        left: dict[int, int] = {}
        times: dict[int, list[float]] = {}
        began = time.perf_counter()
        while waiting or left:
            while waiting and len(left) < concurrency:
                id, request = next(ids), waiting.popleft()
                left[id], times[id] = request["output_tokens"], [time.perf_counter()]
                engine.add(id, request["tokens"], request["output_tokens"])
            for id, count in engine.step():
                times[id] += [time.perf_counter()] * count
                left[id] -= count
                if not left[id]:
                    del left[id]
        return figures(time.perf_counter() - began, list(times.values()))

    return run


def figures(seconds: float, times: list[list[float]]) -> Figures:
    """From each request's begin and the times of its tokens."""
    return Figures(
        seconds=seconds,
        output_tokens=sum(len(one) - 1 for one in times),
        ttfts=[one[1] - one[0] for one in times],
        itls=[after - before for one in times for before, after in itertools.pairwise(one[1:])],
    )
