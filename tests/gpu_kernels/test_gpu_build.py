"""Kernels compiled ahead: what is read from their objects, the table of them, and that none of ours spills."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.gpu import build, build_table
from kernels.gpu.build_table import Row
from kernels.gpu.objects import blocks_on_sm

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks/results/kernels.md"
ROW = Row("attention", "decode", "_attention", 4, 3, 108, 0, 39936, 4, "mma 64", 8, 0, 0, "64 rows", "1.07", "223")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_kernels.compiled_objects"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_objects_say_what_they_need(compiled: dict[str, Any]) -> None:
    objects = compiled["objects"]
    assert objects["mma"]["matrix"].startswith("mma ")
    assert objects["wgmma"]["matrix"].startswith("wgmma ")
    assert objects["wgmma"]["copies"] > 0
    assert objects["spilled"]["stack"] > 0
    assert objects["spilled"]["registers"] == 255
    assert objects["aligned"]["two_byte_loads"] == objects["aligned"]["stack"] == 0
    assert objects["misaligned"]["two_byte_loads"] > 0


def test_objects_are_read_as_nvidias_tools_read_them(compiled: dict[str, Any]) -> None:
    for name in ("mma", "wgmma", "spilled", "aligned", "misaligned"):
        found = compiled["objects"][name]
        if found["tools"] is None:
            pytest.skip("Triton has brought no cuobjdump")
        assert found["tools"] == {key: found[key] for key in found["tools"]}, name


def test_more_rows_compile_nothing(compiled: dict[str, Any]) -> None:
    assert compiled["objects"]["aligned"]["same"]
    assert compiled["objects"]["misaligned"]["same"]
    assert len(compiled["compilations"]) == 5
    assert (
        compiled["compilations"][0]
        == "matmul(a: *bf16, b: *bf16, c: *bf16, stride: i32; M=16, N=64, K=64) with 4 warps"
    )


def test_a_process_compiles_for_one_architecture(compiled: dict[str, Any]) -> None:
    assert "sm_80 needs another process" in compiled["objects"]["another"]["error"]


def test_blocks_of_an_sm() -> None:
    assert blocks_on_sm(90, registers=108, shared=39936, num_warps=4) == 4  # 112 * 128 registers a block
    assert blocks_on_sm(90, registers=72, shared=39936, num_warps=4) == 5  # 40 KiB of 228
    assert blocks_on_sm(90, registers=16, shared=0, num_warps=1) == 32
    assert blocks_on_sm(90, registers=16, shared=0, num_warps=16) == 4


def test_the_table_is_read_as_it_was_written() -> None:
    table = {80: [ROW, ROW._replace(kernel="_merge", matrix="", shape="")], 90: [ROW._replace(registers=96)]}
    assert build_table.read(build_table.write(table)) == table


def test_more_than_the_table_has_recorded_is_a_problem() -> None:
    recorded = {90: [ROW]}
    assert build_table.exceeded({90: [ROW], 80: [ROW._replace(registers=255)]}, recorded) == []
    assert build_table.exceeded({90: [ROW._replace(configuration="new", registers=255)]}, recorded) == []
    assert build_table.exceeded({90: [ROW._replace(registers=109, shared=39937)]}, recorded) == [
        "sm_90: attention: decode: _attention: 109 registers, not 108",
        "sm_90: attention: decode: _attention: 39937 B of shared memory, not 39936",
    ]


@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_sm_90_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "kernels.md"
    table.write_text(RECORDED.read_text())
    status = build.main(["--arch", "90", "--table", str(table)])
    assert status == 0, capsys.readouterr().err
    rows, recorded = build_table.read(table.read_text()), build_table.read(RECORDED.read_text())
    assert {row.name for row in rows[90]} == {row.name for row in recorded[90]}, "run `make kernels`"
    assert rows[80] == recorded[80]
    assert not any(row.stack for row in rows[90])
