"""Measures what host memory behind the KV pool is worth: on prompts that come again, on preemptions, and on neither.

    python -m benchmarks.swap [--parts prefixes,victims,unique] [--factors 2,4,8] [--prompt 1024] [--rounds 1]

An engine in this process has room for `--pool` tokens. All ways take turns within a round, on one loaded model:

- `prefixes`: conversations whose prompts are a factor of the pool together come in turn, twice; each begins with the
  same quarter. The second time is measured, one conversation after the other.
- `victims`: requests that begin together and outgrow the pool, with `--preemption-mode` recompute, swap and auto.
- `unique`: prompts that never come again. What they push out of the pool is copied in vain.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from services.scheduler.config import SchedulerConfig
from services.scheduler.engine import Engine
from services.worker.config import WorkerConfig
from services.worker.runner import ModelRunner
from services.worker.start import start_runner
from shared.protocol import Sampling, Snapshot, Submit, pack_tokens

BLOCK: Literal[16] = 16


class Way(NamedTuple):
    """A setting of the engine."""

    tier: str  # what the table calls it
    host: bool  # it has host memory
    mode: Literal["auto", "swap", "recompute"]


OFF = Way("off: recompute", False, "recompute")
ON = Way("on", True, "auto")
WAYS = {"prefixes": [OFF, ON], "victims": [OFF, Way("on: swap", True, "swap"), ON], "unique": [OFF, ON]}


class Seen(NamedTuple):
    """The timings of some requests, in seconds."""

    firsts: list[float]  # to each one's first token
    seconds: float  # for all
    tokens: int  # of prompts and outputs
    snapshot: Snapshot


class Client:
    """An engine over a runner, which may have served another before."""

    def __init__(self, runner: ModelRunner, tokens: int, way: Way) -> None:
        info = runner.info if way.host else replace(runner.info, host_kv_memory=0)
        config = SchedulerConfig(
            num_gpu_blocks_override=-(-tokens // BLOCK),
            block_size=BLOCK,
            async_scheduling=False,
            max_step_ms=0,
            preemption_mode=way.mode,
        )
        self._runner = runner
        self._engine = Engine(config, info)
        runner.configure(self._engine.configure(info))
        self._ids = itertools.count()
        self.pool = tokens
        self.way = way

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> Seen:
        """Run requests together."""
        began = time.perf_counter()
        firsts: dict[int, float] = {}
        for prompt in prompts:
            sampling = Sampling(max_tokens=max_tokens, seed=0, temperature=0.0)
            refused = self._engine.submit(Submit(next(self._ids), pack_tokens(prompt), len(prompt), sampling), began)
            assert refused is None, refused
        while (plan := self._engine.plan(time.perf_counter())) is not None:
            for row in self._engine.commit(self._runner.execute(plan)):
                firsts.setdefault(row.id, time.perf_counter() - began)
        tokens = sum(len(prompt) + max_tokens for prompt in prompts)
        return Seen(list(firsts.values()), time.perf_counter() - began, tokens, self._engine.snapshot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="prefixes,victims,unique")
    parser.add_argument("--factors", default="2,4,8", help="of the pool, that the prompts of `prefixes` are together")
    parser.add_argument("--pool", type=int, default=1040, help="tokens of KV on the device")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens of an output in `prefixes` and `unique`")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", default="", help="folder or name; empty: the embedded model")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    runner = start_runner(
        WorkerConfig(model=options.model, device="cpu", num_threads=options.threads, kv_cache_memory=1, swap_space=2)
    )
    info = runner.info
    block = info.kv_bytes_per_token * BLOCK
    print(
        f"{info.token_seconds * BLOCK * 1000:.2f} ms to compute a block of {BLOCK} tokens, "
        f"{block / info.swap_bytes_per_second * 1000:.2f} ms to copy it once ({block} bytes)\n"
    )
    print("| round | what | tier | TTFT p50 / longest, ms | tok/s | preemptions, swapped | blocks out / in |")
    print("|---|---|---|---|---|---|---|")
    for round, part in itertools.product(range(options.rounds), options.parts.split(",")):
        for name, tier, seen in measure(part, runner, options):
            print(f"| {round} | {name} | {tier} | {line(seen)} |", flush=True)


def line(seen: Seen) -> str:
    """Return the figures of one way as columns of the table."""
    state = seen.snapshot
    times = f"{1000 * statistics.median(seen.firsts):.0f} / {1000 * max(seen.firsts):.0f}"
    preempted = f"{state.preemptions}, {state.preemptions_swapped}"
    moved = f"{state.blocks_swapped_out} / {state.blocks_swapped_in}"
    return f"{times} | {seen.tokens / seen.seconds:.0f} | {preempted} | {moved}"


def measure(part: str, runner: ModelRunner, options: argparse.Namespace) -> Iterator[tuple[str, str, Seen]]:
    """Yield the name of each workload of a part, and its figures in each of the `WAYS`."""
    rng, pool = random.Random(7), options.pool
    for factor in map(int, options.factors.split(",")) if part == "prefixes" else [1]:
        match part:
            case "prefixes":
                name, output = f"{factor} × the pool comes again", options.output
                prompts = conversations(rng, round(factor * pool / options.prompt), options.prompt)
                run: Callable[[Client, list[list[int]], int], Seen] = revisit
            case "victims":  # all begin in the pool, and each doubles
                name, output, run = "4 requests outgrow the pool", pool // 4, Client.run
                prompts = conversations(rng, 4, pool // 4 - BLOCK, shared=0)
            case _:
                name, output, run = "prompts that never come again", options.output, one_by_one
                prompts = conversations(rng, 4, options.prompt, shared=0)
        for way in WAYS[part]:
            yield name, way.tier, run(Client(runner, pool, way), prompts, output)


def conversations(rng: random.Random, count: int, length: int, shared: float = 0.25) -> list[list[int]]:
    """Return prompts of `length` random tokens, of which the first `shared` part is the same."""
    common = [rng.randrange(1000, 40_000) for _ in range(int(shared * length))]
    return [common + [rng.randrange(1000, 40_000) for _ in range(length - len(common))] for _ in range(count)]


def revisit(client: Client, prompts: list[list[int]], output: int) -> Seen:
    """Return what the second time is like. Without host memory, only the last prompts of the first can matter."""
    one_by_one(client, prompts if client.way.host else prompts[-(client.pool // len(prompts[0])) - 1 :], output)
    return one_by_one(client, prompts, output)


def one_by_one(client: Client, prompts: list[list[int]], output: int) -> Seen:
    """Run requests one after the other. Times to first tokens are each one's own."""
    seens = [client.run([prompt], output) for prompt in prompts]
    firsts = [first for seen in seens for first in seen.firsts]
    return Seen(firsts, sum(seen.seconds for seen in seens), sum(seen.tokens for seen in seens), seens[-1].snapshot)


if __name__ == "__main__":
    main()
