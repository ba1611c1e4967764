"""Measure the worker alone for several numbers of threads: decoding at some batch sizes, and prefill.

    python -m benchmarks.worker_threads [MODEL FOLDER] [--threads 1,2] [--batches 1,8,32] [--context 256]

Each number of threads has a process of its own. Steps run as a scheduler would plan them, without one; the table shows
tokens a second, and the best and the median of the steps. Without a folder, it measures the embedded model.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

from services.worker.config import WorkerConfig
from services.worker.cpu_tuning import pin_threads
from services.worker.interface import Runner
from services.worker.start import start_runner
from shared.protocol import Configure, Epoch, NewSequence, Row, Sampling, StepPlan, pack_tokens

BLOCK = 16
VOCABULARY = 30000  # tokens of prompts are below
EPOCH = Epoch(boot_id="benchmark", count=1)
MODES = {
    "greedy": Sampling(max_tokens=1, seed=0, temperature=0.0),
    "sampled": Sampling(max_tokens=1, seed=0, temperature=0.8),
    "top_p": Sampling(max_tokens=1, seed=0, temperature=0.8, top_p=0.95),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", action="store_true", help="print a line of JSON a case, for one number of threads")
    options = parser.parse_args()
    if options.json:
        for case in measure(options):
            print(json.dumps(case), flush=True)
        return
    print(f"| threads | what | rows | ms/step median (best) | tok/s |\n|{'---|' * 5}", flush=True)
    for threads in options.threads.split(","):
        command = [sys.executable, "-m", "benchmarks.worker_threads", *sys.argv[1:], "--json", "--threads", threads]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:  # each row as soon as it is known: what is ended early shows those before
                name, rows, tokens, median, best = json.loads(line)
                cells = [threads, name, rows, f"{median:.1f} ({best:.1f})", f"{tokens / median * 1e3:.0f}"]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if process.returncode:
            raise SystemExit(process.returncode)


def measure(options: argparse.Namespace) -> Iterator[tuple[str, int, int, float, float]]:
    """Yield (name, rows, tokens a step, median ms, best ms) of each case, with one number of threads."""
    config = WorkerConfig(
        model=options.model,
        num_threads=int(options.threads),
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    runner = start_runner(config)
    pin_threads()
    model, positions = runner.info.model, max(options.context + options.steps, options.prefill)
    if model.vocab_size < VOCABULARY or model.max_positions < positions:
        raise SystemExit(f"the model must have at least {VOCABULARY} tokens and {positions} positions")
    batches = [int(size) for size in options.batches.split(",")]
    for mode in options.modes.split(","):
        sampling = MODES[mode]
        for size in batches:
            times = decode(runner, size, options.context, options.steps, sampling)
            yield f"decode, {mode}", size, size, *summary(times)
    times = prefill(runner, options.prefill, max(3, options.steps // 4))
    yield "prefill", 1, options.prefill, *summary(times)


def decode(runner: Runner, size: int, context: int, num_steps: int, sampling: Sampling) -> list[float]:
    """Return the seconds of each step, with `size` sequences that have `context` tokens at the first of them."""
    begin(runner, size, context + num_steps)
    execute(runner, [], [sequence(slot, size, context, context + num_steps, sampling) for slot in range(size)])
    for slot in range(size):
        execute(runner, [Row(slot, 0, context - 1, 0)])
    return [execute(runner, [Row(slot, context - 1 + step, 1, 1) for slot in range(size)]) for step in range(num_steps)]


def prefill(runner: Runner, length: int, repeats: int) -> list[float]:
    """Return the seconds of each step that takes a whole prompt."""
    begin(runner, 1, length)
    execute(runner, [], [sequence(0, 1, length, length, MODES["greedy"])])
    return [execute(runner, [Row(0, 0, length, 1)]) for _ in range(repeats)]


def begin(runner: Runner, size: int, length: int) -> None:
    blocks = size * -(-(length + 1) // BLOCK)
    runner.configure(
        Configure(
            epoch=EPOCH,
            block_size=BLOCK,
            num_blocks=blocks,
            max_num_seqs=size,
            max_model_len=length + 1,
            max_num_batched_tokens=max(512, length),
        )
    )


def sequence(slot: int, size: int, tokens: int, length: int, sampling: Sampling) -> NewSequence:
    """Return a new sequence. Its blocks alternate with the others', so that none has neighbouring blocks."""
    blocks = -(-(length + 1) // BLOCK)
    return NewSequence(
        slot=slot,
        tokens=pack_tokens((slot * 131 + index * 7919) % VOCABULARY for index in range(tokens)),
        prompt_len=tokens,
        blocks=[index * size + slot for index in range(blocks)],
        sampling=sampling,
        sample=0,
    )


def execute(runner: Runner, rows: Sequence[Row], new: Sequence[NewSequence] = ()) -> float:
    step = next(_steps)
    return runner.launch(StepPlan(EPOCH, step, list(rows), new_sequences=list(new))).result().seconds


_steps = itertools.count()


def summary(seconds: list[float]) -> tuple[float, float]:
    """Return median and best in milliseconds, without the first step, which may be cold."""
    times = [second * 1e3 for second in seconds[1:]]
    return statistics.median(times), min(times)


if __name__ == "__main__":
    main()
