"""`python -m kernels.gpu.build [--arch 80 90 100] [--table PATH]`: compile all kernels ahead, without a GPU.

Compiled kernels (*objects*) go to TRITON_CACHE_DIR, where a worker of the same sources and the same Triton finds them,
so that its start compiles nothing. The exit status is 1 if an object for one of `CHECKED` spills registers, needs more
shared memory than a block may have, lacks the instructions that its configuration demands, or needs more registers or
shared memory than the table has recorded.

It compiles for other GPUs as well, with the tiles that were chosen for those three, and for AMD's MI300 (gfx942), where
no worker uses the objects yet (`kernels/load.py`). What does not compile there, does not fit or spills is listed with
its reason, and does not change the exit status. The status is 1 wherever nothing compiles.
"""

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import kernels.gpu
from kernels.gpu import build_table
from kernels.gpu.build_table import Row
from kernels.gpu.launch import Architecture, Configuration, Launch, architecture_name, compile_for, record
from kernels.gpu.objects import SHARED_OF_BLOCK, describe

CHECKED = (80, 90, 100)
"""Compute capabilities whose objects must be as their configurations demand: A100, H100 and H200, B200."""

BYTES_A_SECOND = 4.8e12
FLOPS_A_SECOND = 989e12
"""Limits of an H200: its memory, and matrix products of two-byte types."""


class Built(NamedTuple):
    """The result of the process of one architecture."""

    kernels: int  # that have compiled
    rows: list[Row]  # of these, if the architecture is NVIDIA's
    problems: list[str]


def main(argv: Sequence[str]) -> int:
    """Compile, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu.build", description="Compile the GPU's kernels.")
    parser.add_argument(
        "--arch",
        type=lambda text: int(text) if text.isdigit() else text,
        nargs="+",
        default=list(CHECKED),
        choices=list(SHARED_OF_BLOCK),
        help="compute capabilities, such as 90, or gfx942",
    )
    parser.add_argument("--module", nargs="+", default=[], help="compile only these modules of kernels.gpu")
    parser.add_argument("--table", type=Path, help="compare with the table in this file, and write it anew")
    parser.add_argument("--accept", action="store_true", help="let the table record more than it did")
    parser.add_argument(
        "--print-json", action="store_true", help=argparse.SUPPRESS
    )  # of a process that this one starts
    options = parser.parse_args(argv)
    if options.print_json:
        json.dump(build(options.arch[0], options.module), sys.stdout)
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = dict(
            zip(options.arch, pool.map(lambda arch: _build_in_process(arch, options.module), options.arch), strict=True)
        )
    table = {arch: result.rows for arch, result in built.items() if isinstance(arch, int)}
    failed = any(result.problems for arch, result in built.items() if arch in CHECKED or not result.kernels)
    problems = [problem for result in built.values() for problem in result.problems]
    if options.table:
        recorded = build_table.read(options.table.read_text()) if options.table.exists() else {}
        exceeded = [] if options.accept else build_table.exceeded(table, recorded)
        failed = failed or bool(exceeded)
        problems += exceeded
        if not failed and not options.module:
            options.table.write_text(build_table.write(recorded | table))
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    counts = [f"{result.kernels} kernels for {architecture_name(arch)}" for arch, result in built.items()]
    sys.stderr.write(f"compiled {', '.join(counts)}\n")
    return 1 if failed else 0


def _build_in_process(architecture: Architecture, modules: Sequence[str]) -> Built:
    """Build in a new process, which Triton needs for each architecture."""
    argv = [sys.executable, "-m", "kernels.gpu.build", "--arch", str(architecture), "--print-json"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        argv + (["--module", *modules] if modules else []), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return Built(0, [], [f"{architecture_name(architecture)}: {done.stderr}"])
    kernels, rows, problems = json.loads(done.stdout)
    return Built(kernels, [Row(*row) for row in rows], problems)


def build(architecture: Architecture, modules: Sequence[str] = ()) -> Built:
    """Compile the configurations of `modules`, or of all, for one architecture in this process."""
    compile_for(architecture)
    kernels, all_rows, all_problems = 0, [], []
    for module, configuration in _configurations(modules):
        if isinstance(architecture, int) and configuration.oldest > architecture:
            continue
        objects: dict[str, Launch] = {}
        rows: list[Row] = []
        try:
            with record() as launches:
                configuration.run()
            for launch in launches:
                objects.setdefault(launch.compiled.hash, launch)
            if isinstance(architecture, int):
                rows = _rows(module, configuration, objects.values())
            problems = list(_problems(architecture, configuration, objects.values(), rows))
        except Exception as error:  # the compiler's errors are of many types
            problems = [f"{type(error).__name__}: {error}"]
        kernels += len(objects)
        all_rows += rows
        place = f"{architecture_name(architecture)}: {module}: {configuration.name}"
        all_problems += [f"{place}: {problem}" for problem in problems]
    return Built(kernels, all_rows, all_problems)


def _configurations(modules: Sequence[str]) -> Iterator[tuple[str, Configuration]]:
    """Yield the configurations of `modules` (of all, if it is empty), each with its module's name."""
    for info in pkgutil.iter_modules(kernels.gpu.__path__):
        if (modules and info.name not in modules) or info.name == "build":
            continue
        module = importlib.import_module(f"kernels.gpu.{info.name}")
        if hasattr(module, "configurations"):
            for configuration in module.configurations():
                yield info.name, configuration


def _rows(module: str, configuration: Configuration, objects: Iterable[Launch]) -> list[Row]:
    """Return a row for each object of a configuration. The first row also has the configuration's shape, megabytes and
    floor: the least time in microseconds that an H200 needs for it.
    """
    moved, flops = configuration.bytes_moved, configuration.flops
    floor = max(moved / BYTES_A_SECOND, flops / FLOPS_A_SECOND) * 1e6
    shape_cells = [configuration.shape, f"{moved / 1e6:.3g}" if moved else "", f"{floor:.3g}" if floor else ""]
    rows: list[Row] = []
    names: list[str] = []
    for launch in objects:
        names.append(launch.kernel)
        number = names.count(launch.kernel)
        rows.append(
            Row(
                module,
                configuration.name,
                launch.kernel if number == 1 else f"{launch.kernel} ({number})",
                launch.num_warps,
                launch.num_stages,
                *describe(launch.compiled),
                *(["", "", ""] if rows else shape_cells),
            )
        )
    return rows


def _problems(
    architecture: Architecture, configuration: Configuration, objects: Collection[Launch], rows: Sequence[Row]
) -> Iterator[str]:
    """Yield what is wrong with the objects of a configuration. An AMD architecture has no rows."""
    if not objects:
        yield "nothing was launched"
    for launch in objects:
        shared = launch.compiled.metadata.shared
        if shared > SHARED_OF_BLOCK[architecture] * 1024:
            yield f"{launch.kernel} needs {shared} B of shared memory, more than a block may have"
    if configuration.wgmma and architecture == 90 and not any("wgmma" in row.matrix for row in rows):
        yield "no kernel uses wgmma"
    for row in rows:
        if row.stack:
            yield f"{row.kernel} spills registers: {row.stack} B of stack"
        if configuration.wide_loads and row.two_byte_loads:
            yield f"{row.kernel} has {row.two_byte_loads} loads of two bytes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
