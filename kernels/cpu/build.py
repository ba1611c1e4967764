"""`python -m kernels.cpu.build [NAME ... | --all]`: compile the kernels for instruction sets.

Without a name, it compiles them for the best that this processor has.

It needs a C++ compiler (`CXX` names one). Without one, it prints a message and builds nothing. It keeps a library that
is up to date, and removes libraries of earlier sources.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kernels.cpu.extension import DIGEST, FLAGS, LIBRARIES, SOURCES, instruction_set, library

TORCH = Path(torch.__file__).parent
COMPILER = os.environ.get("CXX", "c++")

# Multiplications are fused with additions by name only (simd.h). The warning is wrong about the intrinsics of GCC 12.
COMMON = ("-O3", "-fPIC", "-std=c++20", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wno-maybe-uninitialized")


def main(argv: Sequence[str]) -> int:
    """Build, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description="Compile the CPU's kernels.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(FLAGS)}")
    parser.add_argument("--all", action="store_true", help="for every supported instruction set, as an image needs it")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(FLAGS):
        parser.error(f"unknown instruction sets: {', '.join(sorted(unknown))}")
    best = instruction_set()
    names = list(FLAGS) if arguments.all else arguments.names or ([best] if best else [])
    if not names:
        sys.stderr.write("this processor has no supported instruction set: the plain kernels will serve\n")
    if shutil.which(COMPILER) is None:
        sys.stderr.write("there is no C++ compiler: the plain kernels will serve, which are several times slower\n")
        return 0
    for name in names:
        if not library(name).exists():
            sys.stderr.write(f"compiling the kernels for {name}, which takes some minutes\n")
            build(name)
    return 0


def build(name: str) -> Path:
    """Compile for one instruction set, and return the library's path. Raise RuntimeError with the compiler's output.

    The library is not loaded: it may be for another processor than this one.
    """
    target = library(name)
    LIBRARIES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        list(pool.map(compile_source, sources, objects, [name] * len(sources)))
        partial = target.with_suffix(".partial")
        # OpenMP is not linked: torch has loaded a copy with its symbols, and there must be no second.
        _run(COMPILER, "-shared", *map(str, objects), "-o", str(partial), f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10")
    for old in LIBRARIES.glob(f"quire_{name}_{'?' * DIGEST}.so"):
        old.unlink()
    partial.replace(target)
    return target


def compile_source(source: Path, object_file: Path, name: str) -> None:
    """Compile one source for an instruction set. Raise RuntimeError with the compiler's output."""
    includes = [f"-I{TORCH / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    _run(COMPILER, "-c", str(source), "-o", str(object_file), *COMMON, *FLAGS[name], *includes)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
