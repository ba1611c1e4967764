"""A plugin for pytest that has kernels run as they are compiled for AVX-VNNI and AMX, on a processor without them.

    python -m pytest -p tests.kernels.emulation tests/kernels

The same sources are compiled for AVX2 with the two instruction sets beside it, whose instructions are those of
emulated_instructions.h. So products of few rows are those of the variant `avx_vnni`, and products of sixteen rows or
more those of `amx`.
"""

import hashlib
import sys
from pathlib import Path

from kernels.cpu import build, extension

NAME = "emulated"
INSTRUCTIONS = Path(__file__).with_name("emulated_instructions.h")
LIBRARIES = Path(__file__).with_name("lib")


def use_emulated_kernels() -> None:
    """Have this process load the emulated kernels, and compile them first if their sources have changed."""
    digest = hashlib.sha256(INSTRUCTIONS.read_bytes()).hexdigest()[: extension.DIGEST]
    flags = ("-mavxvnni", "-mamx-tile", "-mamx-int8", "-include", str(INSTRUCTIONS), f"-DINSTRUCTIONS={digest}")
    extension.FLAGS[NAME] = (*extension.FLAGS["avx2"], *flags)
    extension.LIBRARIES = build.LIBRARIES = LIBRARIES
    extension.instruction_set = lambda: NAME
    if not extension.library(NAME).exists():
        sys.stderr.write("compiling the kernels for emulated instructions\n")
        build.build(NAME)


use_emulated_kernels()
