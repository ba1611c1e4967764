"""Measure the time that a step costs the scheduler's core, and the part of the held KV memory that is wasted.

Run it with `python benchmarks/scheduler.py`. It prints two tables in Markdown. No worker runs: the benchmark makes each
result from its plan, outside the time that it measures.

- Time: median microseconds of `plan` and of `commit` in steady decode. Sequences stand at different offsets within
  their blocks, so that each step takes and publishes blocks as it does in service.
- Waste: positions of held blocks that hold nothing, on average over the steps of a queue of chats (prompts and
  outputs of log-normal lengths, medians 200 and 180 tokens) that keeps all slots busy.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from services.scheduler.core import Limits, Scheduler
from shared.protocol import Epoch, SampledRow, Sampling, StepPlan, StepResult, Submit, encode, pack_tokens

STEPS = 100
PROMPT = 32  # tokens, and up to a block more


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


def _row(running: int, blocks: int) -> str:
    plans, commits, sizes = _measure(running, blocks)
    plan, commit = statistics.median(plans) * 1e6, statistics.median(commits) * 1e6
    size = int(statistics.median(sizes))
    return f"| {running:,} | {blocks:,} | {plan:,.0f} | {commit:,.0f} | {plan + commit:,.0f} | {size:,} |"


def _measure(running: int, blocks: int) -> tuple[list[float], list[float], list[int]]:
    core = Scheduler(
        Limits(
            num_blocks=blocks,
            max_num_seqs=running,
            max_num_batched_tokens=running + 8192,
            max_model_len=min(blocks * 16, 2048),
            max_queued_requests=running,
        )
    )
    core.begin_epoch(Epoch("benchmark", 0), blocks)
    for id in range(running):
        prompt = [id + 1] * (PROMPT + id % 16)
        sampling = Sampling(max_tokens=1024, seed=id, stop_token_ids=[0])
        core.submit(Submit(id, pack_tokens(prompt), len(prompt), sampling, arrival=float(id + 1)), 1.0)
    while core.snapshot().waiting or core.in_flight:
        plan = core.plan(1.0)
        if plan is not None:
            core.commit(_result(plan))
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
