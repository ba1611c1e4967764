"""Measure this machine's ceilings: bytes read a second, and matrix products in float32, bfloat16 and int8.

The products are torch's (oneDNN's), at several shapes. The best shape counts, and the best of many tries of each, since
other load only slows them down.

    python -m benchmarks.ceilings --threads 1 2
    python -m benchmarks.ceilings --json
"""

import argparse
import json
import os
import time
from collections.abc import Callable

import torch

MEGABYTES = 1024
SHAPES = ((512, 3072, 576), (1024, 1024, 1024), (2048, 2048, 2048))  # rows, outputs, inputs
SECONDS = 0.6  # of tries, for each measurement
UNITS = {"read": "GB/s", "float32": "GFLOP/s", "bfloat16": "GFLOP/s", "int8": "GOP/s"}


def measure(threads: int) -> dict[str, float]:
    """Return each ceiling with so many threads, in its unit."""
    torch.set_num_threads(threads)
    ceilings = {"read": _read()}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        ceilings[name] = max(_matmul(*shape, dtype) for shape in SHAPES)
    ceilings["int8"] = max(_int_matmul(*shape) for shape in SHAPES)
    return ceilings


def _read() -> float:
    """Return the GB/s of a sum over more than any cache holds: adding is faster than reading from memory."""
    both = torch.ones(2, MEGABYTES * 2**20 // 8)
    return both.nbytes / min(_best(both.sum), _best(lambda: both[0].dot(both[1]))) / 1e9


def _matmul(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> float:
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    return 2 * rows * outputs * inputs / _best(lambda: torch.nn.functional.linear(x, weight)) / 1e9


def _int_matmul(rows: int, outputs: int, inputs: int) -> float:
    x = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8).t()
    return 2 * rows * outputs * inputs / _best(lambda: torch._int_mm(x, weight)) / 1e9


def _best(call: Callable[[], object]) -> float:
    """Return the time of the fastest of many calls, in seconds."""
    call()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--json", action="store_true", help="print one JSON object, by number of threads")
    options = parser.parse_args()
    ceilings = {str(threads): measure(threads) for threads in options.threads}
    if options.json:
        print(json.dumps(ceilings))
        return
    print(f"| threads | {' | '.join(f'{name}, {unit}' for name, unit in UNITS.items())} |")
    print(f"|{'---|' * (len(UNITS) + 1)}")
    for threads, values in ceilings.items():
        print(f"| {threads} | {' | '.join(f'{values[name]:.0f}' for name in UNITS)} |")


if __name__ == "__main__":
    main()
