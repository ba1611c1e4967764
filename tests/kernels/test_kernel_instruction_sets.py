"""The kernels for AVX-VNNI and AMX, which no processor here needs to have.

Their sources run with instructions in plain C++ (emulation.py), and give the bits of the kernels for this processor.
The real ones are compiled, and have the instructions.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu import build, extension
from kernels.load import ops
from kernels.quantized import QuantizedWeight, RoundedWeight
from kernels.table_weight import TablePart, TableWeight
from tests.kernels.test_kernel_attention import make_case

ROOT = Path(__file__).parents[2]
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 95, 97, 200)
INPUTS = (32, 64, 96, 128, 160, 192, 576)

needs_compiler = pytest.mark.skipif(
    not extension.load() or shutil.which(build.COMPILER) is None, reason="no kernels for this processor, or no compiler"
)
pytestmark = pytest.mark.timeout(1800)  # the kernels for emulated instructions are compiled once


@pytest.fixture(scope="module")
def emulated() -> None:
    """Compile the kernels for emulated instructions if their sources have changed."""
    run("-c", "import tests.kernels.emulation")


def run(*argv: str) -> str:
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def outputs() -> list[Tensor]:
    """Return products of quantised weights and attention over an int8 cache, by the kernels that this process loads."""
    cpu, results = ops(torch.device("cpu")), []
    generator = torch.Generator().manual_seed(0)
    for inputs, bits in itertools.product(INPUTS, (8, 4)):
        weight = torch.randn(71, inputs, generator=generator)
        groups = (71, inputs // 32)
        quants = torch.randint(0, 2**bits, (71, inputs), dtype=torch.uint8, generator=generator)
        scales, mins = torch.rand(2, *groups, generator=generator).half()
        x = torch.randn(200, inputs, generator=generator)
        x[::3, 5] = 50.0  # a group of these rows has two terms
        x[7] = 0.0
        # Sums need more than sixteen bits: all activations are as large, and nearly all quants of a group are.
        x[0] = 1.0
        weight[:2], quants[:2] = 1.0, 2**bits - 1
        weight[:2, ::32] = -1.0
        codes = torch.randint(-(2**31), 2**31, (inputs // 8, 71), generator=generator).int()
        codes[:, :2] = 0x11111111
        tables = TableWeight([TablePart(codes, weight[:, :16].contiguous())])
        for unpacked in (RoundedWeight(bits, [weight]), QuantizedWeight(bits, quants, scales, -mins, 0), tables):
            packed = cpu.pack_linear(unpacked)
            for rows, threads in itertools.product(ROWS, (1, 2)):
                torch.set_num_threads(threads)
                results.append(cpu.linear(x[:rows], packed, None))
    for rows, dim in itertools.product(([(0, 1)], [(300, 1), (0, 70), (13, 5)]), (16, 64, 80)):
        results.append(make_case(cpu, rows, dim=dim, dtype=torch.int8).run())
    return results


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_they_give_the_bits_of_this_processors_kernels(tmp_path: Path) -> None:
    code = "import sys, torch; from tests.kernels.test_kernel_instruction_sets import outputs; "
    code += "torch.save(outputs(), sys.argv[1])"
    run("-c", code, str(tmp_path / "here.pt"))
    run("-c", "import tests.kernels.emulation; " + code, str(tmp_path / "emulated.pt"))
    here, emulated = (torch.load(tmp_path / name) for name in ("here.pt", "emulated.pt"))
    assert len(here) == len(emulated) == len(INPUTS) * 6 * len(ROWS) * 2 + 6
    for expected, result in zip(here, emulated, strict=True):
        assert torch.equal(expected.view(torch.int32), result.view(torch.int32))


@needs_compiler
@pytest.mark.skipif("QUIRE_TEST_EMULATED" not in os.environ, reason="it takes minutes: make test-all runs it")
@pytest.mark.usefixtures("emulated")
def test_they_pass_the_tests_of_kernels() -> None:
    names = ("quantized", "tables", "attention", "layers")
    files = [f"tests/kernels/test_kernel_{name}.py" for name in names]
    assert " passed" in run("-m", "pytest", "-p", "tests.kernels.emulation", "-p", "no:cacheprovider", "-q", *files)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("amx", {"ldtilecfg", "tileloadd", "tdpbsud", "tilestored", "tilerelease", "vpdpbusd"}),
        ("avx_vnni", {"{vex} vpdpbusd"}),
        ("avx2", set()),
    ],
)
def test_the_real_ones_have_the_instructions(name: str, instructions: set[str], tmp_path: Path) -> None:
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    object_file = tmp_path / "channel_linear.o"
    build.compile_source(extension.SOURCES / "channel_linear.cpp", object_file, name)
    code = subprocess.run(["objdump", "-d", object_file], capture_output=True, text=True, check=True).stdout
    everything = {"ldtilecfg", "tileloadd", "tdpbsud", "tilestored", "tilerelease", "vpdpbusd", "{vex} vpdpbusd"}
    assert {instruction for instruction in everything if re.search(rf"\t{instruction}\b", code)} == instructions
