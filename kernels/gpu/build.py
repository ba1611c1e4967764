"""`python -m kernels.gpu.build [--arch 80 90 100] [--table PATH]`: compile all kernels ahead, without a GPU.

Compiled kernels (*objects*) go to TRITON_CACHE_DIR, where a worker of the same sources and the same Triton finds them,
so that its start compiles nothing. The exit status is 1 if an object spills registers, needs more shared memory than a
block may have, lacks the instructions that its configuration demands, or needs more registers or shared memory than the
table has recorded.
"""

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import kernels.gpu
from kernels.gpu import build_table
from kernels.gpu.build_table import Row
from kernels.gpu.launch import Configuration, Launch, compile_for, record
from kernels.gpu.objects import SHARED_OF_BLOCK, describe

BYTES_A_SECOND = 4.8e12
FLOPS_A_SECOND = 989e12
"""Limits of an H200: its memory, and matrix products of two-byte types."""


class Built(NamedTuple):
    """The result of the process of one architecture."""

    rows: list[Row]
    problems: list[str]


def main(argv: Sequence[str]) -> int:
    """Compile, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu.build", description="Compile the GPU's kernels.")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], help="compute capabilities, such as 90")
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
        built = list(pool.map(lambda arch: _build_in_process(arch, options.module), options.arch))
    table = {arch: rows for arch, (rows, _) in zip(options.arch, built, strict=True)}
    problems = [problem for _, problems in built for problem in problems]
    if options.table:
        recorded = build_table.read(options.table.read_text()) if options.table.exists() else {}
        if not options.accept:
            problems += build_table.exceeded(table, recorded)
        if not problems and not options.module:
            options.table.write_text(build_table.write(recorded | table))
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    sys.stderr.write(f"compiled {', '.join(f'{len(rows)} kernels for sm_{arch}' for arch, rows in table.items())}\n")
    return 1 if problems else 0


def _build_in_process(architecture: int, modules: Sequence[str]) -> Built:
    """Build in a new process, which Triton needs for each architecture."""
    argv = [sys.executable, "-m", "kernels.gpu.build", "--arch", str(architecture), "--print-json"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        argv + (["--module", *modules] if modules else []), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return Built([], [f"sm_{architecture}: {done.stderr}"])
    rows, problems = json.loads(done.stdout)
    return Built([Row(*row) for row in rows], problems)


def build(architecture: int, modules: Sequence[str] = ()) -> Built:
    """Compile the configurations of `modules`, or of all, for one architecture in this process."""
    compile_for(architecture)
    built = Built([], [])
    for module, configuration in _configurations(modules):
        if configuration.oldest > architecture:
            continue
        try:
            with record() as launches:
                configuration.run()
            rows = _rows(module, configuration, launches)
            problems = list(_problems(architecture, configuration, rows))
        except Exception as error:  # the compiler's errors are of many types
            rows, problems = [], [f"{type(error).__name__}: {error}"]
        built.rows.extend(rows)
        built.problems.extend(f"sm_{architecture}: {module}: {configuration.name}: {problem}" for problem in problems)
    return built


def _configurations(modules: Sequence[str]) -> Iterator[tuple[str, Configuration]]:
    """Yield the configurations of `modules` (of all, if it is empty), each with its module's name."""
    for info in pkgutil.iter_modules(kernels.gpu.__path__):
        if (modules and info.name not in modules) or info.name == "build":
            continue
        module = importlib.import_module(f"kernels.gpu.{info.name}")
        if hasattr(module, "configurations"):
            for configuration in module.configurations():
                yield info.name, configuration


def _rows(module: str, configuration: Configuration, launches: Sequence[Launch]) -> list[Row]:
    """Return a row for each object of a configuration. The first row also has the configuration's shape, megabytes and
    floor: the least time in microseconds that an H200 needs for it.
    """
    moved, flops = configuration.bytes_moved, configuration.flops
    floor = max(moved / BYTES_A_SECOND, flops / FLOPS_A_SECOND) * 1e6
    shape_cells = [configuration.shape, f"{moved / 1e6:.3g}" if moved else "", f"{floor:.3g}" if floor else ""]
    rows: dict[str, Row] = {}
    names: list[str] = []
    for launch in launches:
        if launch.compiled.hash not in rows:
            names.append(launch.kernel)
            number = names.count(launch.kernel)
            kernel = launch.kernel if number == 1 else f"{launch.kernel} ({number})"
            cells = shape_cells if not rows else ["", "", ""]
            rows[launch.compiled.hash] = Row(
                module,
                configuration.name,
                kernel,
                launch.num_warps,
                launch.num_stages,
                *describe(launch.compiled),
                *cells,
            )
    return list(rows.values())


def _problems(architecture: int, configuration: Configuration, rows: Sequence[Row]) -> Iterator[str]:
    """Yield what is wrong with the objects of a configuration."""
    if not rows:
        yield "nothing was launched"
    if configuration.wgmma and architecture == 90 and not any("wgmma" in row.matrix for row in rows):
        yield "no kernel uses wgmma"
    for row in rows:
        if row.stack:
            yield f"{row.kernel} spills registers: {row.stack} B of stack"
        if row.shared > SHARED_OF_BLOCK[architecture] * 1024:
            yield f"{row.kernel} needs {row.shared} B of shared memory, more than a block may have"
        if configuration.wide_loads and row.two_byte_loads:
            yield f"{row.kernel} has {row.two_byte_loads} loads of two bytes"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
