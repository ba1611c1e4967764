"""Measure paged attention alone on CPUs: decoding and chunks of prompts, for shapes of models and types of caches.

    python -m benchmarks.attention [--threads 1] [--types int8,bfloat16] [--models 1B] [--cases decode]
    python -m benchmarks.attention --json one.json            # keep the times
    python -m benchmarks.attention --before one.json          # and compare with them

Each case is one call of one layer: `decode 64 x 192` is 64 rows that have 192 tokens each, `prompt 4000 in 128` the
mean of the chunks of 128 tokens of a prompt of 4,000 (of its last 512 tokens, where `last` stands). Times are the best
of several calls, in µs. A product of a query, a key and the key's value counts four operations a dimension; a core
makes twice sixteen of float32 a cycle with AVX512, so the ceiling of float32 is named with the results by the machine's
own `benchmarks.ceilings`.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.batch_rows import BatchRows
from kernels.load import ops

BLOCK = 16
TRIES = 5
SECONDS = 0.15  # of tries, for each case
MODELS = {"135M": (9, 3, 64), "1B": (32, 8, 64), "8B": (32, 8, 128)}  # heads, kv heads, dimensions of a head
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


class Case(NamedTuple):
    """Calls that are timed together: rows of (start, count) for each."""

    name: str
    calls: list[list[tuple[int, int]]]


def cases() -> Iterator[Case]:
    for rows in (1, 8, 64):
        for context in (192, 1024, 4000):
            if rows * context <= 64 * 1024:
                yield Case(f"decode {rows} x {context}", [[(context - 1, 1)] * rows])
    for chunk in (128, 512):
        for length in (512, 2000, 4000):
            starts = range(length - min(length, 512), length, chunk)
            yield Case(f"prompt {length} in {chunk}, last", [[(at, min(chunk, length - at))] for at in starts])


def measure(model: str, dtype: torch.dtype, case: Case) -> tuple[float, float]:
    """Return the µs and GFLOP/s of a call."""
    heads, kv_heads, dim = MODELS[model]
    kernels = ops(torch.device("cpu"))
    rows = max(len(call) for call in case.calls)
    width = max(-(-(start + count) // BLOCK) for call in case.calls for start, count in call)
    layout = kernels.kv_layout(1, kv_heads, dim, BLOCK, dtype)
    keys, values = layout.views(layout.allocate(rows * width, torch.device("cpu")))[0]
    for first in range(0, rows * width * BLOCK, 4096):
        slots = torch.arange(first, min(first + 4096, rows * width * BLOCK))
        new = torch.randn(2, len(slots), kv_heads, dim)
        kernels.write_kv(new[0], new[1], keys, values, slots)
    tables = torch.randperm(rows * width, dtype=torch.int32).view(rows, width)
    prepared, operations = [], 0
    for call in case.calls:
        counts = torch.tensor([0] + [count for _, count in call])
        batch = BatchRows.of(counts.cumsum(0), torch.tensor([start for start, _ in call]))
        plan = kernels.plan_attention(batch, tables, block_size=BLOCK, num_kv_heads=kv_heads)
        prepared.append((torch.randn(int(counts.sum()), heads, dim), plan))
        seen = sum(count * start + count * (count + 1) // 2 for start, count in call)
        operations += 4 * dim * heads * seen
    best, tries, end = float("inf"), 0, time.perf_counter() + SECONDS
    while tries < TRIES or time.perf_counter() < end:
        tries += 1
        began = time.perf_counter()
        for q, plan in prepared:
            kernels.paged_attention(q, keys, values, plan, scale=dim**-0.5)
        best = min(best, time.perf_counter() - began)
    return best / len(prepared) * 1e6, operations / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--types", default="int8,bfloat16,float32")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cases", default="", help="only those whose names contain this")
    parser.add_argument("--json", type=Path, help="keep the times in this file")
    parser.add_argument("--before", type=Path, help="times to compare with")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    before = json.loads(options.before.read_text()) if options.before else {}
    times: dict[str, float] = {}
    types = options.types.split(",")
    print(f"| µs (GFLOP/s){', times faster' if before else ''} | {' | '.join(types)} |\n|{'---|' * (len(types) + 1)}")
    for model in options.models.split(","):
        for case in cases():
            if options.cases not in case.name:
                continue
            cells = []
            for name in types:
                key = f"{model} {name} {case.name}"
                times[key], speed = measure(model, TYPES[name], case)
                ratio = f" {before[key] / times[key]:.2f}" if key in before else ""
                cells.append(f"{times[key]:.0f} ({speed:.0f}){ratio}")
            print(f"| {model}, {case.name} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
