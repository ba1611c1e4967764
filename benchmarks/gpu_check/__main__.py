"""Checks and measures Quire on a GPU, in eight minutes at most.

    python -m benchmarks.gpu_check [--quick] [--only kernels engine] [--out PATH]
    python -m benchmarks.gpu_check --device cpu [--out PATH]

It has five parts, each in a process of its own and under its own limit, so that one that crashes or hangs spares the
others. Each line of the table is printed as soon as it is known, and the page in `benchmarks/results/gpu_check.md` is
written anew with each, so that a run that is cut leaves what it has found.

    machine    the device, the rates of its memory and its products, and the cost of a launch
    tests      the kernels' tests, compiled
    kernels    each kernel beside its floor and torch's own operation
    engine     a Llama of 8 billion parameters with random weights: decodes, prefills, idle time, start and memory
    equality   graphs against eager steps, the GPU's choice of tokens against the CPU's, and --batch-invariant

Floors are the times that the memory and the matrix units of this GPU need at least, at the rates that part 1 measures.
With `--device cpu` the model is tiny and kernels are interpreted: that proves this program and the results, while
times say nothing, so there are neither floors nor targets. The exit status is 1 if a result is wrong or missing, and 0
if a target is missed.
"""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from benchmarks.gpu_check.parts import PARTS, run_part
from benchmarks.gpu_check.report import FAILED, HEADINGS, WRONG, Note, Row, line
from benchmarks.gpu_check.settings import Settings, choose_settings

MAX_SECONDS = 480
"""The time of all parts. Their own limits leave some for the starts of their processes."""

PAGE = Path(__file__).parents[1] / "results" / "gpu_check.md"


def main(argv: list[str]) -> int:
    """Run the parts that are asked for, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="run only these parts")
    parser.add_argument("--quick", action="store_true", help="a model of 8 layers, fewer tests and repeats")
    parser.add_argument("--out", type=Path, help="the page to write; by default only a whole run on a GPU writes one")
    options = parser.parse_args(argv)
    settings = choose_settings(options.device, quick=options.quick)
    if settings.is_gpu and not _has_gpu():
        parser.error("torch finds no GPU here; --device cpu checks this program without one")
    page = options.out
    if page is None and settings.is_gpu and not options.only and not options.quick:
        page = PAGE
    os.environ["TRITON_INTERPRET"] = "0" if settings.is_gpu else "1"  # before a process of a part imports triton
    command = shlex.join(["python", "-m", "benchmarks.gpu_check", *argv])
    rows = run(settings, options.only or [part.name for part in PARTS], command, page)
    return 1 if any(row.ok in (WRONG, FAILED) for row in rows) else 0


def _has_gpu() -> bool:
    """Return whether torch finds a GPU. It is imported here, since a run on a CPU needs it in no other process."""
    import torch

    return torch.cuda.is_available()


def run(settings: Settings, names: list[str], command: str, page: Path | None) -> list[Row]:
    """Run the parts called `names`, print their rows and write them to `page`. Return them."""
    began = time.monotonic()
    rows: list[Row] = []
    notes: list[str] = []
    print(line(HEADINGS), line(("---",) * len(HEADINGS)), sep="\n", flush=True)
    for part in PARTS:
        if part.name not in names:
            continue
        for message in run_part(part, settings, seconds_left=MAX_SECONDS - (time.monotonic() - began)):
            if isinstance(message, Note):
                notes.append(f"{part.name}: {message.text}")
                print(message.text, file=sys.stderr, flush=True)
            else:
                rows.append(message)
                print(message, flush=True)
            if page:
                page.write_text(page_text(settings, command, rows, notes, time.monotonic() - began))
    return rows


def page_text(settings: Settings, command: str, rows: list[Row], notes: list[str], seconds: float) -> str:
    """Return the page in Markdown."""
    table = "\n".join(map(line, (HEADINGS, ("---",) * len(HEADINGS), *rows)))
    logged = "\n".join(f"- {note}" for note in notes)
    meaning = "Kernels were interpreted on a CPU, so times say nothing."
    if settings.is_gpu:
        meaning = "Floors follow from the rates that the first rows show; targets are those of an H200."
    introduction = f"Written by `{command}` in {seconds:.0f} s. {meaning}"
    return f"# The GPU, checked and measured\n\n{introduction}\n\n{table}\n" + (f"\n{logged}\n" if notes else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
