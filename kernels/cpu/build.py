"""`python -m kernels.cpu.build [--all]`: compile the kernels, for this processor or for all that are supported.

Needs a C++ compiler (`CXX` names one); without it that is said, and nothing done. Nothing is done twice: a library that
is there and up to date stays. Libraries of earlier sources are removed.
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

from kernels.cpu.extension import FLAGS, LIBRARIES, SOURCES, instruction_set, library

COMPILER = os.environ.get("CXX", "c++")

# Products are fused by name only (simd.h). The warning is wrong about the intrinsics of GCC 12.
COMMON = ("-O3", "-fPIC", "-std=c++20", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wno-maybe-uninitialized")


def main(argv: Sequence[str]) -> int:
    """Build; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description="Compile the CPU's kernels.")
    parser.add_argument("--all", action="store_true", help="for every supported instruction set, as an image needs it")
    best = instruction_set()
    names = list(FLAGS) if parser.parse_args(argv).all else [best] if best else []
    if not names:
        sys.stderr.write("this processor has no supported instruction set: the plain kernels will serve\n")
    if shutil.which(COMPILER) is None:
        sys.stderr.write("there is no C++ compiler: the plain kernels will serve, which are several times slower\n")
        return 0
    for name in names:
        if not library(name).exists():
            build(name)
    return 0


def build(name: str) -> Path:
    """Compile for one instruction set. Raises RuntimeError, with the compiler's words, if that fails.

    What is made is not loaded: it may be for another processor than this one.
    """
    target, torch_folder = library(name), Path(torch.__file__).parent
    includes = [f"-I{torch_folder / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    LIBRARIES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compiled(source: Path) -> str:
            made = str(Path(folder) / f"{source.stem}.o")
            _run(COMPILER, "-c", str(source), "-o", made, *COMMON, *FLAGS[name], *includes)
            return made

        objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
        partial = target.with_suffix(".partial")
        # OpenMP is not linked: its symbols are found in the copy that torch has loaded, and there must be no second.
        _run(COMPILER, "-shared", *objects, "-o", str(partial), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10")
    for old in LIBRARIES.glob(f"quire_{name}_*.so"):
        old.unlink()
    partial.replace(target)
    return target


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
