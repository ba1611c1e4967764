"""Measure what it costs to divide a model among ranks: on this machine's CPUs, and in the scheduler.

    python -m benchmarks.parallel [--batches 1,8,32] [--context 128] [--steps 30]

- Steps: decodes of one rank that has two CPUs, and of two tensor parallel ranks that have one each. The steps are
  planned as a scheduler would, without one. The table shows the median step, and the part of it that the first rank
  spends in exchanges: sending, and waiting for the other.
- Scheduler: time of the scheduler's thread for one step's plan, its messages to all ranks, and their answers. The ranks
  are sockets without a model.

The model has the embedded one's sizes and random weights, but eight heads: two ranks cannot divide nine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq

from benchmarks.scheduler import LENGTH, start_core
from benchmarks.worker_threads import MODES, begin, execute, sequence
from quire.group_runner import GroupRunner
from services.scheduler.core import Scheduler
from services.scheduler.worker_group import WorkerResult
from services.scheduler.workers import Workers
from services.worker.config import WorkerConfig
from services.worker.rank_group import RankGroup
from services.worker.start import start_runner
from shared.hub.checkpoint import locate
from shared.protocol import (
    VERSION,
    Configure,
    Configured,
    Epoch,
    ModelInfo,
    Register,
    Row,
    SampledRow,
    StepResult,
    encode,
)
from shared.transport import connect, listen, new_identity

GREEDY = MODES["greedy"]
PLAN_STEPS = 200


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ranks", type=int, default=0, help="measure so many ranks, and print JSON")
    parser.add_argument("--model", default="", help="folder of the model that they have")
    options = parser.parse_args()
    if options.ranks:
        print(json.dumps(measure(options, options.ranks)))
        return
    print("| | rows | ms/step | in exchanges | exchanges a step | tok/s |\n|---|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        make_model(Path(folder))
        for name, ranks in (("one rank of two threads", 1), ("two ranks of one thread", 2)):
            own = ["--ranks", str(ranks), "--model", folder]
            command = [sys.executable, "-m", "benchmarks.parallel", *sys.argv[1:], *own]
            for rows, step, exchange, count in json.loads(subprocess.check_output(command, text=True)):
                shown = f"{exchange:.2f} ms, {exchange / step:.0%}" if count else "-"
                print(f"| {name} | {rows} | {step:.1f} | {shown} | {count:.0f} | {rows / step * 1e3:.0f} |")
    print("\n| ranks | running | plan, µs | messages, µs | answers and commit, µs |\n|---|---|---|---|---|")
    for running in (64, 256):
        for ranks in (1, 2, 4):
            plan, send, answers = scheduler_step(running, ranks)
            print(f"| {ranks} | {running} | {plan:.0f} | {send:.0f} | {answers:.0f} |")


def measure(options: argparse.Namespace, ranks: int) -> list[tuple[int, float, float, float]]:
    """Return (rows, median ms of a step, median ms in exchanges, exchanges a step) for each number of rows."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    settings = {"load_format": "dummy", "device": "cpu", "dtype": options.dtype, "swap_space": 0}
    config = WorkerConfig(model=options.model, tensor_parallel_size=ranks, **settings)
    exchanges: list[float] = []
    time_exchanges(exchanges)
    runner = start_runner(config) if ranks == 1 else GroupRunner(config)
    results, sizes = [], [int(size) for size in options.batches.split(",")]
    begin(runner, max(sizes), options.context + options.steps)  # once, since it is an epoch in which the ranks meet
    for size in sizes:
        new = [sequence(slot, size, options.context, options.context + options.steps, GREEDY) for slot in range(size)]
        execute(runner, [], new)
        for slot in range(size):
            execute(runner, [Row(slot, 0, options.context - 1, 0)])
        steps = []
        for position in range(options.context - 1, options.context - 1 + options.steps):
            exchanges.clear()
            seconds = execute(runner, [Row(slot, position, 1, 1) for slot in range(size)])
            steps.append((seconds * 1e3, sum(exchanges) * 1e3, len(exchanges)))
        step, exchange, count = (statistics.median(column) for column in zip(*steps[1:], strict=True))
        results.append((size, step, exchange, count))
    runner.close()
    return results


def make_model(folder: Path) -> None:
    """Make a folder of the embedded model's configuration and tokenizer, with eight heads."""
    embedded = locate("")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(embedded / name)
    config = json.loads((embedded / "config.json").read_text())
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))


def time_exchanges(seconds: list[float]) -> None:
    """Let each exchange of a rank of this process add its duration to `seconds`."""

    def timed(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = exchange(*arguments)
            seconds.append(time.perf_counter() - began)
            return result

        return call

    for name in ("all_reduce", "all_gather"):
        setattr(RankGroup, name, timed(getattr(RankGroup, name)))


def scheduler_step(running: int, num_ranks: int) -> tuple[float, float, float]:
    """Return median µs of a plan, of sending it to all ranks, and of reading their answers and committing them."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="q", dir="/tmp"))
        context = stack.enter_context(zmq.Context())
        listener = stack.enter_context(listen(context, f"ipc://{folder}/w"))
        workers = Workers(listener, 60.0, lambda now: False)
        ranks = [
            stack.enter_context(connect(context, f"ipc://{folder}/w", new_identity("w")))[0] for _ in range(num_ranks)
        ]
        for number, rank in enumerate(ranks):
            rank.send(encode(register(number, num_ranks)))
        core, epoch = start_core(running), Epoch("benchmark", 0)
        while workers.candidate is None:
            workers.receive(time.monotonic())
        workers.configure(Configure(epoch, 16, 10_000, running, LENGTH, running + 8192), time.monotonic())
        for rank in ranks:
            rank.recv()
            rank.send(encode(Configured(epoch)))
        while not workers.ready:
            workers.receive(time.monotonic())
        steps = [timed_step(core, workers, ranks) for _ in range(PLAN_STEPS)]
    plan, send, answers = (statistics.median(column) * 1e6 for column in zip(*steps, strict=True))
    return plan, send, answers


def timed_step(core: Scheduler, workers: Workers, ranks: "list[zmq.Socket[bytes]]") -> tuple[float, float, float]:
    """Make a plan, send it, let all ranks answer, and commit. Return the seconds of each, without the ranks'."""
    times = [time.perf_counter()]
    plan = core.plan(1.0)
    assert plan is not None
    times.append(time.perf_counter())
    workers.send(plan, encode(plan), time.monotonic())
    times.append(time.perf_counter())
    for number, rank in enumerate(ranks):
        rank.recv()
        rows = [] if number else [SampledRow(row.slot, [7]) for row in plan.rows if row.samples]
        rank.send(encode(StepResult(plan.epoch, plan.step, rows, 0.01)))
    time.sleep(0.002)  # then all answers are there
    times.append(time.perf_counter())
    while core.in_flight:
        for event in workers.receive(time.monotonic()):
            assert isinstance(event, WorkerResult)
            core.commit(event.result)
    times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1], times[4] - times[3]


def register(rank: int, world_size: int) -> Register:
    model = ModelInfo("benchmark", "none", "none", LENGTH, 1000, "benchmark")
    return Register(VERSION, "benchmark", rank, world_size, 2**31 - 1, "cpu", model, 1, 2**20, 0.01, 0.0)


if __name__ == "__main__":
    main()
