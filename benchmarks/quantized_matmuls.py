"""Time matmuls on this CPU with weights in each format, and print a table in Markdown.

Run with `python -m benchmarks.quantized_matmuls [--outputs N] [--inputs N] [--formats NAME ...]`. Each format has
several copies of the weight, more than a cache holds, which are multiplied in turn; a cell is the best of several
rounds. Numbers are random: they change no time.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.linear import Packed
from kernels.load import ops
from kernels.quantized import QUANT_GROUP_SIZE, FloatWeight, QuantizedWeight, RoundedWeight, Weight
from kernels.table_weight import Outliers, TablePart, TableWeight

OUTLIERS = 0.005  # of the weights, as in most of SqueezeLLM's checkpoints
COPIES, ROUNDS = 3, 12
ROWS = (1, 4, 16, 96)


def main() -> None:
    """Print a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="*", help="some of the table's rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cpu = ops(torch.device("cpu"))
    formats = weights(options.outputs, options.inputs)
    packed = {
        name: [cpu.pack_linear(make()) for _ in range(COPIES)]
        for name, make in formats.items()
        if not options.formats or name in options.formats
    }
    best = {(name, rows): float("inf") for name in packed for rows in ROWS}
    for _ in range(ROUNDS):  # in turns, since the machine may be slower for a while
        for rows in ROWS:
            x = torch.randn(rows, options.inputs)
            for name, copies in packed.items():
                best[name, rows] = min(best[name, rows], seconds(cpu.linear, x, copies))
    print(f"{options.outputs} outputs, {options.inputs} inputs, {options.threads} threads; milliseconds by rows\n")
    print(f"| weights | bits a weight | {' | '.join(map(str, ROWS))} |\n|---|---|{'---|' * len(ROWS)}")
    for name, copies in packed.items():
        bits = 8 * size(copies[0]) / options.outputs / options.inputs
        print(f"| {name} | {bits:.2f} | {' | '.join(f'{best[name, rows] * 1e3:.2f}' for rows in ROWS)} |")


def weights(outputs: int, inputs: int) -> dict[str, Callable[[], Weight]]:
    """Return a function for each format, which makes a weight."""
    floats = torch.randn(outputs, inputs)
    scales = torch.rand(outputs, inputs // QUANT_GROUP_SIZE).half()
    codes = torch.randint(-(2**31), 2**31, (inputs // 8, outputs)).int()
    tables = torch.randn(outputs, 16).half()

    def groups(bits: int, mins: bool) -> QuantizedWeight:
        quants = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
        return QuantizedWeight(bits, quants, scales, scales if mins else None, 0 if mins else 8)

    return {
        "groups of 4 bits": lambda: groups(4, mins=False),
        "groups of 4 bits, with mins": lambda: groups(4, mins=True),
        "groups of 8 bits": lambda: groups(8, mins=False),
        "groups of 8 bits, with mins": lambda: groups(8, mins=True),
        "tables": lambda: TableWeight([TablePart(codes, tables)]),
        "tables, outliers": lambda: TableWeight([TablePart(codes, tables, outliers(outputs, inputs))]),
        "rounded to 4 bits": lambda: RoundedWeight(4, [floats]),
        "rounded to 8 bits": lambda: RoundedWeight(8, [floats]),
        "float16": lambda: FloatWeight(torch.float16, [floats]),
        "float32": lambda: FloatWeight(torch.float32, [floats]),
    }


def outliers(outputs: int, inputs: int, random: torch.Generator | None = None) -> Outliers:
    """Return random outliers."""
    places = torch.rand(outputs, inputs, generator=random) < OUTLIERS
    offsets = torch.cat((torch.zeros(1).long(), places.sum(1).cumsum(0)))
    return Outliers(offsets, places.nonzero()[:, 1].int(), torch.randn(int(places.sum()), generator=random))


def seconds(linear: Callable[[Tensor, Packed], Tensor], x: Tensor, copies: list[Packed]) -> float:
    """Return the time of one multiplication."""
    start = time.perf_counter()
    for weight in copies:
        linear(x, weight)
    return (time.perf_counter() - start) / len(copies)


def size(packed: Packed) -> int:
    """Return the bytes of a packed weight."""
    fields = [*packed, *getattr(packed, "outliers", ())]
    return sum(field.nbytes for field in fields if isinstance(field, Tensor))


if __name__ == "__main__":
    main()
