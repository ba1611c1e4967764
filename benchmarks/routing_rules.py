"""Compares rules by which a gateway may choose an engine, in virtual time: the same figures on any machine.

    python -m benchmarks.routing_rules [--only NAME]

The engines are the scheduler's real core, and a worker that takes `base` seconds a step and `token` seconds for each
token of it. Users chat as in `benchmarks.routing`. The rules are

- Quire's three policies, and `cache_aware` with another number in place of its 100 tokens of output;
- `noted when sent`: `cache_aware`, but a prompt counts as cached as soon as it is sent, not with its first token;
- `threshold`: as SGLang's router, the longest prefix if it is more than 0.3 of the prompt, else the emptiest cache; the
  least loaded engine if another has 64 requests more, and 1.5 times as many;
- `sum`: as NVIDIA Dynamo's router, where tokens to compute and tokens of the engine's requests together are fewest.
"""

import argparse
import heapq
import itertools
import random
import statistics
from array import array
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from msgspec import Struct

from services.gateway import routing
from services.gateway.routing import E, Router, hash_blocks
from services.scheduler.core import Limits, Scheduler
from shared.protocol import (
    VERSION,
    Epoch,
    ModelInfo,
    ProgressRow,
    SampledRow,
    Sampling,
    Status,
    StepResult,
    Submit,
    Welcome,
    pack_tokens,
)

HEADER = 32
"""Tokens with which every prompt begins."""

SEED = 1


class Workload(Struct, frozen=True):
    """Engines, and users that chat. Lengths are in tokens, times in seconds."""

    engines: int
    users: int
    systems: int  # number of system prompts; the first ones are used more often
    system: int  # length of each
    turns: int  # of a chat, on average
    question: int
    answer: int
    think: float
    requests: int
    blocks: int = 1024
    slots: int = 16
    batched: int = 256
    base: float = 0.01
    token: float = 0.001


WORKLOADS = {
    "medium load": Workload(4, 32, 12, 400, 5, 60, 50, 5.0, 800),
    "high load": Workload(4, 80, 12, 400, 5, 60, 50, 3.0, 1000),
    "long prompts": Workload(4, 24, 4, 1500, 4, 100, 60, 4.0, 600, blocks=2048),
    "one prompt": Workload(2, 24, 1, 600, 1, 40, 40, 1.0, 600),
    "as on a GPU": Workload(4, 100, 20, 800, 6, 150, 100, 2.0, 800, 8192, 256, 2048, 0.008, 0.00005),
}


def num_cached(router: Router, engine: E, prompt: "array[int]") -> int:
    """Return how many tokens of a prompt a router takes to be cached at an engine."""
    blocks = router._cached_blocks(engine)
    return blocks.match_prefix(hash_blocks(prompt, blocks.block_size)) * blocks.block_size


class NotedWhenSent(Router):
    """Expects a prompt to be cached where it was sent, although it is not computed yet."""

    def choose(self, engines: Sequence[E], prompt: "array[int]", sampling: Sampling) -> E:
        engine = super().choose(engines, prompt, sampling)
        self.note(engine, prompt, [array("i", [0])])
        return engine


class Threshold(Router):
    """Follows the longest prefix until the loads are too different. It notes prompts when they are sent."""

    def choose(self, engines: Sequence[E], prompt: "array[int]", sampling: Sampling) -> E:
        engine = self._follow(engines, prompt)
        self.note(engine, prompt, [array("i", [0])])
        return engine

    def _follow(self, engines: Sequence[E], prompt: "array[int]") -> E:
        loads = sorted(engine.load for engine in engines)
        if loads[-1] - loads[0] > 64 and loads[-1] > 1.5 * loads[0]:
            return min(engines, key=lambda engine: engine.load)
        best = max(engines, key=lambda engine: num_cached(self, engine, prompt))
        if num_cached(self, best, prompt) > 0.3 * len(prompt):
            return best
        return min(engines, key=lambda engine: len(self._cached_blocks(engine)))


class Sum(Router):
    """Adds up tokens."""

    def choose(self, engines: Sequence[E], prompt: "array[int]", sampling: Sampling) -> E:
        def tokens(engine: Any) -> int:
            num_tokens: int = engine.num_tokens
            return num_tokens - num_cached(self, engine, prompt)

        return min(engines, key=tokens)


RULES: dict[str, tuple[Callable[[], Router], int]] = {
    "round_robin": (lambda: Router("round_robin"), routing.OUTPUT),
    "least_loaded": (lambda: Router("least_loaded"), routing.OUTPUT),
    "cache_aware": (Router, routing.OUTPUT),
    "cache_aware, 50": (Router, 50),
    "cache_aware, 200": (Router, 200),
    "noted when sent": (NotedWhenSent, routing.OUTPUT),
    "threshold": (Threshold, routing.OUTPUT),
    "sum": (Sum, routing.OUTPUT),
}


class Request(Struct, eq=False):
    """A request at an engine."""

    prompt: "array[int]"
    sent: float
    on_end: Callable[["array[int]"], None]
    output: "array[int]"


class Engine:
    """A core, and a worker that takes time. `later` calls a function after some seconds."""

    def __init__(self, workload: Workload, later: Callable[[float, Callable[[], None]], None]) -> None:
        self.core = Scheduler(
            Limits(
                num_blocks=workload.blocks,
                max_num_seqs=workload.slots,
                max_num_batched_tokens=workload.batched,
                max_model_len=min(8192, workload.blocks * 16),
                max_queued_requests=100_000,
                depth=1,
            )
        )
        self.core.begin_epoch(Epoch("", 0), workload.blocks)
        self.welcome: Welcome | None = Welcome(VERSION, "", "", ModelInfo("", "", "", 0, 0, ""), 8192, workload.slots)
        self.status: Status | None = Status(True, False, self.core.snapshot())
        self.requests: dict[int, Request] = {}
        self.on_row: Callable[[Engine, ProgressRow], None]
        self._workload, self._later, self._busy = workload, later, False

    @property
    def load(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(len(request.prompt) + len(request.output) for request in self.requests.values())

    def work(self) -> None:
        """Compute a step, if there is one and none runs."""
        if self._busy or (plan := self.core.plan(0.0)) is None:
            return
        self._busy = True
        seconds = self._workload.base + self._workload.token * sum(row.count for row in plan.rows)
        rows = [SampledRow(row.slot, [7]) for row in plan.rows if row.samples]
        self._later(seconds, lambda: self._finish(StepResult(plan.epoch, plan.step, rows, seconds)))

    def _finish(self, result: StepResult) -> None:
        self._busy = False
        for row in self.core.commit(result):
            self.on_row(self, row)
        self.work()


class Simulation:
    """One run of a workload under one rule."""

    def __init__(self, workload: Workload, router: Router, seed: int) -> None:
        self.now = 0.0
        self.ttfts: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count(1)
        self._workload, self._router, self._random = workload, router, random.Random(seed)
        self._left = workload.requests
        self.engines = [Engine(workload, self._later) for _ in range(workload.engines)]
        header = self._tokens(HEADER)
        self._systems = [header + self._tokens(workload.system) for _ in range(workload.systems)]

    def run(self) -> tuple[float, float, float, float]:
        """Return the hit rate, and seconds to the first token: mean, median and 95th percentile."""
        for engine in self.engines:
            engine.on_row = self._take_row
        for _ in range(self._workload.users):
            self._later(self._random.uniform(0, self._workload.think), self._begin_chat)
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        shown, ttfts = [engine.core.snapshot() for engine in self.engines], sorted(self.ttfts)
        hit_rate = sum(one.prefix_hits for one in shown) / sum(one.prefix_queries for one in shown)
        return hit_rate, statistics.mean(ttfts), statistics.median(ttfts), ttfts[len(ttfts) * 95 // 100]

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._counter), act))

    def _tokens(self, count: int) -> "array[int]":
        return array("i", (self._random.randrange(100, 40_000) for _ in range(count)))

    def _begin_chat(self) -> None:
        system = min(int(self._random.paretovariate(1.0)) - 1, len(self._systems) - 1)
        self._ask(self._systems[system], self._random.randint(1, 2 * self._workload.turns - 1))

    def _ask(self, chat: "array[int]", turns: int) -> None:
        if self._left == 0:
            return
        self._left -= 1

        def on_end(chat: "array[int]") -> None:
            pause = self._random.expovariate(1 / self._workload.think)
            self._later(pause, (lambda: self._ask(chat, turns - 1)) if turns > 1 else self._begin_chat)

        question, answer = self._workload.question, self._workload.answer
        prompt = chat + self._tokens(self._random.randint(question // 2, question * 3 // 2))
        sampling = Sampling(max_tokens=self._random.randint(answer // 2, answer * 3 // 2), seed=0)
        engine, id = self._router.choose(self.engines, prompt, sampling), next(self._counter)
        engine.requests[id] = Request(prompt, self.now, on_end, array("i"))
        engine.core.submit(Submit(id, pack_tokens(prompt), len(prompt), sampling, arrival=1.0 + self.now), self.now)
        engine.work()

    def _take_row(self, engine: Engine, row: ProgressRow) -> None:
        request = engine.requests[row.id]
        if not request.output:
            self.ttfts.append(self.now - request.sent)
            self._router.note(engine, request.prompt, [array("i", row.tokens)])
        request.output.extend(row.tokens)
        if row.finish_reason is not None:
            del engine.requests[row.id]
            self._router.note(engine, request.prompt, [request.output])
            request.on_end(request.prompt + request.output)


def main() -> None:
    """Print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKLOADS, help="one workload")
    only = parser.parse_args().only
    for name in [only] if only else WORKLOADS:
        print(f"\n{name}\n\n| rule | hit rate, % | TTFT mean, ms | TTFT median, ms | TTFT p95, ms |")
        print("|---|---|---|---|---|")
        for rule, (make, output) in RULES.items():
            with patch.object(routing, "OUTPUT", output):
                hit_rate, *ttfts = Simulation(WORKLOADS[name], make(), SEED).run()
            print(
                f"| {rule} | {100 * hit_rate:.1f} | {' | '.join(f'{1000 * ttft:.0f}' for ttft in ttfts)} |", flush=True
            )


if __name__ == "__main__":
    main()
