"""Measures loading: the time until the weights are packed, and the memory that it takes.

    python -m benchmarks.load FOLDER [--repeats 3] [--flags quantization=int8 quantization=int4 quantization=none]

Each load is a process of its own, and they take turns with a plain read of all bytes of the weight files, which is what
a load can hardly be faster than. The files are in the page cache (a first read sees to that), or not at all with
`--cold`, which evicts them before each turn. Huge pages that are moved after loading count as loading.

CPU seconds are those of all threads; they hold where others use the machine. Peak and kept are the process's memory at
its highest (VmHWM) and after loading (VmRSS), when no model's file is mapped any more. Both count the libraries, which
take what the last line says.

    python -m benchmarks.load FOLDER --one --flags load_format=dummy,tensor_parallel_size=2,rank=1

`--one` loads once, in this process, and prints the figures as JSON. That suits a rank, and weights made up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.worker import start
from services.worker.config import WorkerConfig
from shared.hub.checkpoint import locate

MIB = 2**20
CHUNK = 16 * MIB
PATTERNS = ("*.safetensors", "*.bin", "*.gguf")

Turn = Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, or a GGUF file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flags", nargs="*", default=["quantization=auto"], help="settings of a worker, for each load")
    parser.add_argument("--cold", action="store_true", help="evict the files before each turn")
    parser.add_argument("--one", action="store_true", help="load once in this process, and print JSON")
    options = parser.parse_args()
    if options.one:
        settings = (setting for flags in options.flags for setting in flags.split(","))
        print(json.dumps(load(options.model, dict(setting.split("=") for setting in settings))))
        return
    files = weight_files(Path(options.model))
    read(files)
    reads: list[float] = []
    loads: dict[str, list[Turn]] = {flags: [] for flags in options.flags}
    for _ in range(options.repeats):
        for flags, turns in loads.items():
            reads.append(plain_read(files, evict=options.cold))
            if options.cold:
                evict_all(files)
            turns.append(in_process(options.model, flags))
    show(files, reads, loads)


def weight_files(model: Path) -> list[Path]:
    if model.is_file():
        return [model]
    return next(files for pattern in PATTERNS if (files := sorted(model.glob(pattern))))


def plain_read(files: list[Path], *, evict: bool) -> float:
    """Return the seconds that a read of all bytes takes."""
    if evict:
        evict_all(files)
    began = time.perf_counter()
    read(files)
    return time.perf_counter() - began


def read(files: list[Path]) -> None:
    buffer = bytearray(CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict_all(files: list[Path]) -> None:
    """Remove the files from the page cache. They must have been written to the disk."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_process(model: str, flags: str) -> Turn:
    """Load in a new process, and return what it measured."""
    command = [sys.executable, "-m", "benchmarks.load", model, "--one", "--flags", flags]
    turn: Turn = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return turn


def load(model: str, settings: Mapping[str, str]) -> Turn:
    """Load as a worker does, up to the weights. Return seconds and bytes."""
    config = msgspec.convert({"model": model, "device": "cpu", **settings}, WorkerConfig, strict=False)
    device = start.tune_process(config)
    folder, ops = locate(config.model, config.revision, config.download_dir), start.choose_ops(device, config)
    before, began, used = memory("VmRSS"), time.perf_counter(), time.process_time()
    loaded = start.load(folder, config, device, ops)
    seconds = time.perf_counter() - began
    assert loaded.model
    return {
        "seconds": seconds,
        "cpu": time.process_time() - used,
        "before": before,
        "peak": memory("VmHWM"),
        "kept": memory("VmRSS"),
        "huge": memory("AnonHugePages", "/proc/self/smaps_rollup"),
    }


def memory(name: str, path: str = "/proc/self/status") -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def show(files: list[Path], reads: list[float], loads: Mapping[str, list[Turn]]) -> None:
    read_seconds = statistics.median(reads)
    size = sum(path.stat().st_size for path in files) / MIB
    print(f"\nA plain read of {size:,.0f} MiB takes {read_seconds:.2f} s ({min(reads):.2f} to {max(reads):.2f}).\n")
    print("| settings | s | x of the read | CPU s | peak, MiB | kept, MiB | peak / kept | in huge pages |")
    print("|---|---|---|---|---|---|---|---|")
    for flags, turns in loads.items():
        seconds, cpu, peak, kept, huge = (
            statistics.median(turn[name] for turn in turns) for name in ("seconds", "cpu", "peak", "kept", "huge")
        )
        ratios = f"{seconds / read_seconds:.1f} | {cpu:.1f} | {peak / MIB:,.0f} | {kept / MIB:,.0f} | {peak / kept:.2f}"
        print(f"| {flags} | {seconds:.2f} | {ratios} | {huge / kept:.0%} |")
    before = statistics.median(turn["before"] for turns in loads.values() for turn in turns)
    print(f"\nBefore loading, a process has {before / MIB:,.0f} MiB.")


if __name__ == "__main__":
    main()
