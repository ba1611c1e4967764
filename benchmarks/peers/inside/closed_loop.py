"""Measures an engine in process, in a closed loop: a request begins as soon as another has ended.

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
    """A request, as token ids and as text."""

    tokens: list[int]
    output_tokens: int


class Figures(TypedDict):
    """The figures of a job. Only requested tokens count."""

    seconds: float
    input_tokens: int
    output_tokens: int
    ttfts: list[float]  # seconds from the request's begin, one a request
    itls: list[float]  # seconds between two tokens of a request, all requests' together


Run = Callable[[list[Request], int], Figures]


class Engine(Protocol):
    """An engine that computes step by step."""

    def add(self, id: int, tokens: list[int], output: int) -> None:
        """Add a request for exactly the number of tokens it names."""

    def step(self) -> Iterator[tuple[int, int]]:
        """Compute a step; return the ids of requests with new tokens, and how many tokens each has."""


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
    """Run a job that keeps `concurrency` requests in the engine."""
    ids = itertools.count()  # ids are never reused, since some engines remember them

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
        return figures(requests, time.perf_counter() - began, list(times.values()))

    return run


def figures(requests: list[Request], seconds: float, times: list[list[float]]) -> Figures:
    """Return the figures of requests, from each one's start and the times of its tokens."""
    return Figures(
        seconds=seconds,
        input_tokens=sum(len(request["tokens"]) for request in requests),
        output_tokens=sum(len(one) - 1 for one in times),
        ttfts=[one[1] - one[0] for one in times],
        itls=[after - before for one in times for before, after in itertools.pairwise(one[1:])],
    )
