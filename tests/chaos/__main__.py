"""Runs the matrix of faults, prints its table and writes it to a file.

    python -m tests.chaos [--seed 0] [--only TEXT] [--jobs 2] [--output benchmarks/results/chaos.md]

`--only` takes the cells whose names contain the text, such as 'tcp, 2 engines: scheduler freeze'. The exit status is 1
if a cell failed. Its logs and records are kept then, and its failure is printed with the replays of the records.
"""

import argparse
import asyncio
import io
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from tests.chaos.cell_run import CellFailure, Result, Stage
from tests.chaos.cells import IPC_1, LAYOUTS, Cell, Layout, Moment, all_cells
from tests.chaos.deployment import deployment, write_model
from tests.chaos.network import obstacle

Results = dict[Cell, Result | str]
"""What each cell has shown, or why it failed or was skipped."""

FAILED, SKIPPED = "failed", "skipped"


async def run_all(cells: Sequence[Cell], seed: int, jobs: int, failures: Path) -> Results:
    """Run all cells, at most `jobs` layouts at the same time."""
    results: Results = {}
    missing, free = await obstacle(), asyncio.Semaphore(jobs)
    if missing:
        print(f"cells that cut links are skipped: {missing}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        async with deployment(IPC_1, model, step_delay=0.0) as undisturbed:

            async def run(stage: Stage) -> None:
                async with free:
                    for cell in (one for one in cells if one.layout == stage.layout):
                        skip = bool(missing) and cell.needs_namespaces
                        results[cell] = SKIPPED if skip else await _run_cell(stage, cell, seed)
                    await stage.close()

            async with asyncio.TaskGroup() as tasks:
                for layout in LAYOUTS:
                    tasks.create_task(run(Stage(layout, model, undisturbed, failures)))
    return results


async def _run_cell(stage: Stage, cell: Cell, seed: int) -> Result | str:
    try:
        result: Result | str = await stage.run(cell, seed)
    except CellFailure as failure:
        print(failure, file=sys.stderr)
        result = FAILED
    print(f"{cell}: {_describe(result)}", file=sys.stderr)
    return result


def _describe(result: Result | str | None) -> str:
    return f"{result.seconds:.1f}" if isinstance(result, Result) else result or ""


INTRODUCTION = """\
# A matrix of faults

`{command}`, on {cpus} CPUs, in {minutes:.0f} minutes.

In each cell of the tables, clients send requests of all kinds (greedy and seeded, several samples, stop strings,
log-probabilities of outputs and prompts, penalties, min_tokens) to two gateways, the fault comes when one request
reaches the moment of the column, and one more request comes after it. A figure means that all ended as in an
undisturbed run, to the bit: tokens, log-probabilities, text, ends and usage; and that afterwards all processes ran
again, with every block free and no file descriptor more than before. It is the seconds that all this took, most of them
for processes to start or for silence to be noticed. A worker's start takes longest. Faults are SIGKILL, SIGSTOP or no
packets until the others have given the part up, and SIGTERM.
"""

DETECTION = """
## How soon a gateway notices

Seconds from an engine's last sign of life, which an ended connection is as well, to the moment at which a gateway gives
it up, as `quire:engine_detection_seconds` counts them. Cells in which one fault alone made it do so.

| fault | cells | median | most |
|---|---|---|---|"""


def page(results: Results, command: str, minutes: float) -> Iterator[str]:
    """Yield the lines of the page."""
    shown = [result for result in results.values() if isinstance(result, Result)]
    ends = list(results.values())
    yield INTRODUCTION.format(command=command, cpus=os.cpu_count(), minutes=minutes)
    yield f"- cells: {len(ends)}, of which {ends.count(FAILED)} failed and {ends.count(SKIPPED)} were skipped"
    yield f"- requests in cells that did not fail: {sum(one.requests for one in shown)}, none lost"
    yield f"- tokens of their outputs: {sum(one.tokens for one in shown)}"
    yield f"- requests that clients of a killed or draining gateway sent again: {sum(one.retries for one in shown)}"
    for layout in LAYOUTS:
        yield from _table(layout, {cell: result for cell, result in results.items() if cell.layout == layout})

    yield from _detections(results)


def _detections(results: Results) -> Iterator[str]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for cell, result in results.items():
        if isinstance(result, Result) and result.detection is not None and cell.second is None:
            seconds[cell.faults].append(result.detection)
    if seconds:
        yield DETECTION
    for faults, found in seconds.items():
        yield f"| {faults} | {len(found)} | {statistics.median(found):.3f} | {max(found):.3f} |"


def _table(layout: Layout, results: Results) -> Iterator[str]:
    if results:
        yield from ("", f"## Over {layout}", "", f"| fault | {' | '.join(Moment)} |", "|---" * (len(Moment) + 1) + "|")
    for faults in dict.fromkeys(cell.faults for cell in results):
        row = {cell.moment: _describe(result) for cell, result in results.items() if cell.faults == faults}
        yield f"| {faults} | {' | '.join(row.get(moment, '') for moment in Moment)} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cells = [cell for cell in all_cells() if args.only in str(cell)]
    began = time.monotonic()
    failures = Path(tempfile.mkdtemp(prefix="quire-chaos-"))
    with redirect_stdout(io.StringIO()):  # of processes that end: their logs
        results = asyncio.run(run_all(cells, args.seed, args.jobs, failures))
    if FAILED not in results.values():
        failures.rmdir()
    command = f"python -m tests.chaos --seed {args.seed} --jobs {args.jobs}"
    if args.only:
        command += f" --only {shlex.quote(args.only)}"
    text = "\n".join(page(results, command, (time.monotonic() - began) / 60)) + "\n"
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    return 1 if FAILED in results.values() else 0


if __name__ == "__main__":
    sys.exit(main())
