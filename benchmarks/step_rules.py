"""Compares rules of how much of a step prompts get beside streams, on the scheduler's core with costs for a worker.

    python -m benchmarks.step_rules [--step 30 --row 2.1 --token 3.3]

A closed loop: `--concurrency` clients send prompts of `--input` tokens and read answers of `--output`, one after the
other. A step reads the weights, for `--step` milliseconds and `--row` more for each stream, or computes, for `--token`
with each stream and each token of a prompt, whichever takes longer. The times are those of this model, and no
measurement; `chunk_sizes.py` measures.
"""

import argparse
import itertools
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

from services.scheduler.core import Limits, Scheduler, WorkerResources
from services.scheduler.core.policy import CHUNK, EFFICIENT_CHUNK, budget_beside_streams
from shared.protocol import Epoch, SampledRow, Sampling, StepPlan, StepResult, Submit, pack_tokens

BLOCKS = 10_000
PLANNER = "services.scheduler.core.planner.budget_beside_streams"

Rule = Callable[[int, int], int]
"""What prompts get, of the positions that fit the time of a step and the number of prompts in line."""


class Costs(NamedTuple):
    """Of a step, in seconds."""

    step: float
    row: float
    token: float

    def seconds(self, rows: int, positions: int) -> float:
        """Return what a step takes of which `rows` have one position, and the others `positions` together."""
        return max(self.step + rows * self.row, (rows + positions) * self.token)


class Seen(NamedTuple):
    """What clients saw, in seconds."""

    firsts: list[float]  # to the first token
    gaps: list[float]  # between two tokens
    rate: float  # tokens a second


def chunk_for_every(number: int) -> Rule:
    """Return the rule by which there is a chunk for every `number` of prompts in line, however long it takes."""

    def budget(fitting: int, in_line: int) -> int:
        return max(fitting // CHUNK * CHUNK, min(-(-in_line // number) * CHUNK, EFFICIENT_CHUNK), CHUNK)

    return budget


RULES: dict[str, tuple[bool, Rule]] = {  # whether the time is bounded, and the rule
    "no bound": (False, chunk_for_every(1)),
    "the bound alone": (True, chunk_for_every(10**9)),
    "a chunk for each in line, as it is": (True, budget_beside_streams),
    "for every two": (True, chunk_for_every(2)),
    "for every four": (True, chunk_for_every(4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for cost, default in (("step", 30.0), ("row", 2.1), ("token", 3.3)):
        parser.add_argument(f"--{cost}", type=float, default=default, help="milliseconds")
    parser.add_argument("--max-step-ms", type=float, default=100.0)
    parser.add_argument("--concurrency", default="4,8,32")
    parser.add_argument("--lengths", default="128/64,512/128", help="tokens of prompt and answer")
    options = parser.parse_args()
    costs = Costs(options.step / 1e3, options.row / 1e3, options.token / 1e3)
    print("| in / out | at once | rule | tok/s | TTFT p50 / p99, s | ITL p50 / p99 / longest, ms |")
    print("|---|---|---|---|---|---|")
    for lengths, clients in itertools.product(options.lengths.split(","), map(int, options.concurrency.split(","))):
        for name, (bounded, rule) in RULES.items():
            input, output = map(int, lengths.split("/"))
            with patch(PLANNER, rule):
                seen = simulate(costs, options.max_step_ms / 1e3 if bounded else 0.0, clients, input, output)
            first, late = statistics.median(seen.firsts), statistics.quantiles(seen.firsts, n=100)[98]
            gap, long = statistics.median(seen.gaps), statistics.quantiles(seen.gaps, n=100)[98]
            gaps = f"{gap * 1e3:.0f} / {long * 1e3:.0f} / {max(seen.gaps) * 1e3:.0f}"
            print(
                f"| {lengths} | {clients} | {name} | {seen.rate:.1f} | {first:.1f} / {late:.1f} | {gaps} |", flush=True
            )


def simulate(costs: Costs, max_step_seconds: float, clients: int, input: int, output: int) -> Seen:
    """Let each client send six requests, one after the other."""
    limits = Limits(
        num_blocks=BLOCKS,
        max_num_seqs=128,
        max_num_batched_tokens=256,
        max_model_len=input + output,
        max_step_seconds=max_step_seconds,
    )
    core, now, firsts, gaps = Scheduler(limits), 0.0, list[float](), list[float]()
    core.begin_epoch(Epoch("benchmark", 0), BLOCKS, WorkerResources(costs.step, costs.token))
    last: dict[int, float] = {}  # when each request was sent, or its last token came
    plans: deque[StepPlan] = deque()

    def send() -> None:
        if len(last) < 6 * clients:
            id = len(last)
            core.submit(Submit(id, pack_tokens([id] * input), input, Sampling(output, id), arrival=now + 1), now)
            last[id] = now

    for _ in range(clients):
        send()
    while not core.idle:
        while (plan := core.plan(now)) is not None:
            plans.append(plan)
        plan = plans.popleft()
        single = sum(row.count == 1 for row in plan.rows)
        chunked = sum(row.count for row in plan.rows) - single
        seconds = costs.seconds(single, chunked)
        now += seconds
        sampled = [SampledRow(row.slot, [1]) for row in plan.rows if row.samples]
        for row in core.commit(StepResult(plan.epoch, plan.step, sampled, seconds)):
            (gaps if row.position else firsts).append(now - last[row.id])
            last[row.id] = now
            if row.finish_reason is not None:
                send()
    return Seen(firsts, gaps, len(last) * output / now)


if __name__ == "__main__":
    main()
