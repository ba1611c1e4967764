"""Measure what a step costs the scheduler's core and its recorder, and the part of held KV memory that is wasted.

Run it with `python benchmarks/scheduler.py`. It prints its tables in Markdown. No worker runs: the benchmark makes
each result from its plan, outside the time that it measures.

- Time: median microseconds of `plan` and of `commit` in steady decode. Sequences stand at different offsets within
  their blocks, so that each step takes and publishes blocks as it does in service.
- Waste: positions of held blocks that hold nothing, on average over the steps of a queue of chats (prompts and
  outputs of log-normal lengths, medians 200 and 180 tokens) that keeps all slots busy.
- Recording: CPU time of a step without and with `--record`, of two cores that take turns every 50 steps; and the time
  for which a full pool stops the core when the next file of the record begins.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from services.scheduler.core import Limits, Scheduler
from services.scheduler.core.state import dump_state
from services.scheduler.recorder import RecordedScheduler, Recorder
from shared.protocol import Epoch, SampledRow, Sampling, StepPlan, StepResult, Submit, encode, pack_tokens

STEPS = 100
PROMPT = 32  # tokens, and up to a block more
LENGTH = 2048  # tokens of a sequence, if the pool is large enough
TURNS = 25


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| running | pool, blocks | plan, µs | commit, µs | together, µs | plan's bytes |")
    print("|---|---|---|---|---|---|")
    for running in (64, 256, 1024):
        for blocks in (1_000, 10_000, 100_000):
            if blocks >= running * (PROMPT + 16 + STEPS) // 16:
                print(_row(running, blocks))
    print()
    print("| block size | running at most | steps | wasted of held memory |")
    print("|---|---|---|---|")
    for block_size in (8, 16, 32):
        print(_waste_row(block_size))
    print()
    print("| running | CPU of a step, µs | with `--record`, µs | more, for each token, µs |")
    print("|---|---|---|---|")
    for running in (1, 16, 64, 256):
        print(_recording_row(running))
    print()
    print("| pool, blocks | its state, bytes | written in, ms |")
    print("|---|---|---|")
    for blocks in (1_000, 10_000, 100_000):
        print(_state_row(blocks))


def _row(running: int, blocks: int) -> str:
    plans, commits, sizes = _measure(running, blocks)
    plan, commit = statistics.median(plans) * 1e6, statistics.median(commits) * 1e6
    size = int(statistics.median(sizes))
    return f"| {running:,} | {blocks:,} | {plan:,.0f} | {commit:,.0f} | {plan + commit:,.0f} | {size:,} |"


def _measure(running: int, blocks: int) -> tuple[list[float], list[float], list[int]]:
    core = start_core(running, blocks)
    plans, commits, sizes = [], [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        plan = core.plan(1.0)
        plans.append(time.perf_counter() - start)
        assert plan is not None
        result = _result(plan)
        start = time.perf_counter()
        core.commit(result)
        commits.append(time.perf_counter() - start)
        sizes.append(len(encode(plan)))
    return plans, commits, sizes


def start_core(running: int, blocks: int = 10_000) -> Scheduler:
    """Return a core in steady decode."""
    core = Scheduler(_limits(running, blocks))
    _start(core, running, blocks)
    return core


def _limits(running: int, blocks: int) -> Limits:
    return Limits(
        num_blocks=blocks,
        max_num_seqs=running,
        max_num_batched_tokens=running + 8192,
        max_model_len=min(blocks * 16, LENGTH),
        max_queued_requests=running,
    )


def _start(core: Scheduler, running: int, blocks: int) -> None:
    """Bring a core to steady decode."""
    core.begin_epoch(Epoch("benchmark", 0), blocks)
    for id in range(running):
        prompt = [id + 1] * (PROMPT + id % 16)
        sampling = Sampling(max_tokens=LENGTH - PROMPT - 16, seed=id, stop_token_ids=[0])
        core.submit(Submit(id, pack_tokens(prompt), len(prompt), sampling, arrival=float(id + 1)), 1.0)
    while core.snapshot().waiting or core.in_flight:
        plan = core.plan(1.0)
        if plan is not None:
            core.commit(_result(plan))


def _recording_row(running: int) -> str:
    blocks, now = running * LENGTH // 16 + 1, 1.0
    without = Scheduler(_limits(running, blocks))
    with TemporaryDirectory() as folder:
        recorded = RecordedScheduler(_limits(running, blocks), Recorder(folder, "0", "benchmark", lambda: now))
        for core in (without, recorded):
            _start(core, running, blocks)
        pairs = []
        for _ in range(TURNS):
            now += 0.5  # so that the buffer is flushed
            pairs.append((_cpu_seconds_of_step(without, now), _cpu_seconds_of_step(recorded, now)))
        recorded.end_record()
    base, with_record, more = (
        statistics.median(values) * 1e6
        for values in ([a for a, _ in pairs], [b for _, b in pairs], [b - a for a, b in pairs])
    )
    return f"| {running} | {base:.1f} | {with_record:.1f} | {more / running:.2f} |"


def _cpu_seconds_of_step(core: Scheduler, now: float) -> float:
    """Return the mean CPU time of 50 steps."""
    total = 0.0
    for _ in range(50):
        start = time.thread_time()
        plan = core.plan(now)
        total += time.thread_time() - start
        assert plan is not None
        result = _result(plan)
        start = time.thread_time()
        core.commit(result)
        total += time.thread_time() - start
    return total / 50


def _state_row(blocks: int) -> str:
    """Fill a pool's prefix index with prompts of random tokens, and write the state."""
    chance, core = random.Random(0), Scheduler(_limits(64, blocks))
    core.begin_epoch(Epoch("benchmark", 0), blocks)
    for id in range(2 * blocks * 16 // 2000):
        prompt = [chance.randrange(50_000) for _ in range(2000)]
        core.submit(Submit(id, pack_tokens(prompt), len(prompt), Sampling(max_tokens=1, seed=id)), 1.0)
        while (plan := core.plan(1.0)) is not None:
            core.commit(_result(plan))
    start = time.perf_counter()
    state = dump_state(core)
    return f"| {blocks:,} | {len(state):,} | {(time.perf_counter() - start) * 1e3:.1f} |"


def _waste_row(block_size: int) -> str:
    chance = random.Random(0)
    limits = Limits(
        block_size=block_size,
        num_blocks=100_000 // block_size,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        max_queued_requests=1000,
        prefix_caching=False,
    )
    core = Scheduler(limits)
    core.begin_epoch(Epoch("benchmark", 0), limits.num_blocks)
    for id in range(600):
        prompt, output = (min(int(chance.lognormvariate(mu, 0.9)) + 1, 2000) for mu in (5.3, 5.2))
        sampling = Sampling(max_tokens=output, seed=id)
        core.submit(Submit(id, pack_tokens([1] * prompt), prompt, sampling, arrival=float(id + 1)), 1.0)
    wastes = []
    while core.snapshot().waiting:
        plan = core.plan(1.0)
        if plan is None:
            raise RuntimeError(f"stands still: {core!r}")
        core.commit(_result(plan))
        state = core.snapshot()
        wastes.append(1 - state.tokens_held / ((state.blocks - state.blocks_free) * block_size))
    return f"| {block_size} | 64 | {len(wastes):,} | {statistics.mean(wastes):.1%} |"


def _result(plan: StepPlan) -> StepResult:
    return StepResult(plan.epoch, plan.step, [SampledRow(row.slot, [7]) for row in plan.rows if row.samples], 0.01)


if __name__ == "__main__":
    main()
