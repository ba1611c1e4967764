"""Kernels compiled ahead: what is read from their objects, the table of them, and that none of ours spills."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.cache import FileCacheManager, get_cache_manager

from kernels.gpu import build, build_table, object_cache
from kernels.gpu.build_table import Row
from kernels.gpu.launch import Architecture
from kernels.gpu.objects import blocks_on_sm

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks/results/kernels.md"
ROW = Row("attention", "decode", "_attention", 4, 3, 108, 0, 39936, 4, "mma 64", 8, 0, 0, "64 rows", "1.07", "223")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run("-m", "tests.gpu_kernels.compiled_objects"))
    return result


def run(*argv: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """Run Python in a folder where kernels are not interpreted, with the folder's packages, and return its output."""
    environment = os.environ | {"PYTHONPATH": str(folder)} | variables
    del environment["TRITON_INTERPRET"]
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Return a folder with a copy of the kernels' sources."""
    shutil.copytree(ROOT / "kernels", tmp_path / "app/kernels", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    return tmp_path / "app"


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


def test_a_worker_looks_for_the_objects_that_the_build_makes(elsewhere: Path) -> None:
    """The keys depend neither on the driver nor on tensors' addresses, nor on the places of sources and caches."""
    script = Path(__file__).with_name("object_keys.py")
    built = json.loads(run(script, "meta"))
    served = json.loads(run(script, "cpu", folder=elsewhere, HOME=str(elsewhere), USER="quire"))
    assert served["sources"] != built["sources"]
    assert served["keys"] == built["keys"]
    assert len(set(built["keys"])) == 7


def test_an_images_objects_are_found_beside_an_empty_cache(elsewhere: Path, tmp_path: Path) -> None:
    command = ("-m", "kernels.gpu.build", "--arch", "90", "--module", "experts")
    run(*command, folder=elsewhere, TRITON_CACHE_DIR=str(elsewhere / "kernels/gpu/lib"))
    served = elsewhere.rename(tmp_path / "served")
    volume = tmp_path / "volume"
    manager = "kernels.gpu.object_cache:ObjectCache"
    run(*command, folder=served, TRITON_CACHE_DIR=str(volume), TRITON_CACHE_MANAGER=manager)
    assert list((served / "kernels/gpu/lib").rglob("*.cubin"))
    assert list(volume.iterdir())
    assert not [path for path in volume.rglob("*") if path.is_file()]


def test_objects_that_an_image_lacks_go_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "LIBRARY", tmp_path / "image")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "image"))
    of_image = FileCacheManager("KEY")
    files = {name: of_image.put(b"image", name) for name in ("kernel.ptx", "kernel.cubin", "kernel.json")}
    of_image.put_group("kernel.json", files)
    (tmp_path / "image/KEY/kernel.ptx").unlink()

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "volume"))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "kernels.gpu.object_cache:ObjectCache")
    assert isinstance(get_cache_manager("00"), object_cache.ObjectCache)
    cache = object_cache.ObjectCache("KEY")
    assert cache.get_group("kernel.json") == {name: files[name] for name in ("kernel.cubin", "kernel.json")}
    assert cache.get_group("another.json") is None
    assert object_cache.ObjectCache("ANOTHER").get_group("kernel.json") is None
    cache.put_group("kernel.json", {"kernel.json": cache.put(b"compiled", "kernel.json")})
    assert cache.get_group("kernel.json") == {"kernel.json": str(tmp_path / "volume/KEY/kernel.json")}


def test_only_checked_architectures_decide_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results: dict[Architecture, build.Built] = {
        90: build.Built(1, [ROW], []),
        89: build.Built(1, [ROW], ["sm_89: it spills"]),
        "gfx942": build.Built(1, [], ["gfx942: it does not fit"]),
    }
    monkeypatch.setattr(build, "_build_in_process", lambda architecture, modules: results[architecture])
    assert build.main(["--arch", "90", "89", "gfx942"]) == 0
    error = capsys.readouterr().err
    assert "sm_89: it spills\ngfx942: it does not fit\n" in error
    assert "1 kernels for sm_90, 1 kernels for sm_89, 1 kernels for gfx942" in error
    results[90] = build.Built(1, [ROW], ["sm_90: it spills"])
    assert build.main(["--arch", "90", "gfx942"]) == 1
    results["gfx942"] = build.Built(0, [], ["gfx942: nothing compiles"])
    assert build.main(["--arch", "gfx942"]) == 1


def test_kernels_compile_for_an_amd_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """No part of ROCm is needed for it."""
    assert build.main(["--arch", "gfx942", "--module", "cache"]) == 0
    assert re.fullmatch(r"compiled \d+ kernels for gfx942\n", capsys.readouterr().err)


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


def test_every_kernel_compiles_for_sm_90_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "kernels.md"
    table.write_text(RECORDED.read_text())
    status = build.main(["--arch", "90", "--table", str(table)])
    assert status == 0, capsys.readouterr().err
    rows, recorded = build_table.read(table.read_text()), build_table.read(RECORDED.read_text())
    assert {row.name for row in rows[90]} == {row.name for row in recorded[90]}, "run `make kernels`"
    assert rows[80] == recorded[80]
    assert not any(row.stack for row in rows[90])
