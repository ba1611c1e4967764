"""Packed weights lie in huge pages side by side, and are freed with the last of their chunk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import extension

pytestmark = pytest.mark.skipif(not extension.load(), reason="the kernels are not compiled here")

MIB = 2**20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

CODE = """
import json
from pathlib import Path

import torch

from kernels.cpu import extension
from kernels.cpu.linear import pack_linear
from kernels.quantized import RoundedWeight

extension.load()

def measure():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(("Anonymous:", "AnonHugePages:"))]

row = torch.randn(1, 4096)
pack_linear(RoundedWeight(8, [row.expand(64, 4096)]))  # starts the threads
before = measure()
packed = [pack_linear(RoundedWeight(8, [row.expand(1000, 4096)])) for _ in range(100)]
full = measure()
del packed[1:]
some = measure()
assert torch.equal(packed[0].panels, pack_linear(RoundedWeight(8, [row.expand(1000, 4096)])).panels)
del packed
print(json.dumps([before, full, some, measure()]))
"""


def test_packed_weights_lie_in_huge_pages_and_are_freed() -> None:
    """100 of 4 MiB and some KiB: two chunks, of which the first keeps its memory while one weight in it is used."""
    done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    before, full, some, freed = json.loads(done.stdout)
    needed = 100 * 32 * (32 * 4096 + 128)
    assert needed <= full[0] - before[0] < needed + 4 * MIB
    assert some[0] - before[0] < 256 * MIB + 4 * MIB
    assert freed[0] - before[0] < 8 * MIB
    if SETTING.exists() and "[never]" not in SETTING.read_text():
        assert full[1] - before[1] > 0.95 * needed
