"""The compiled kernels are in use where they can be; elsewhere the reference is."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu import build, extension
from kernels.load import ops, reference


@pytest.fixture
def anew() -> None:
    extension.load.cache_clear()
    yield
    extension.load.cache_clear()


def test_they_are_in_use_here() -> None:
    best = extension.instruction_set()
    if best is None or shutil.which("c++") is None:
        pytest.skip("no supported instruction set, or no compiler")
    assert extension.library(best).exists()
    assert extension.load() == best
    assert ops(torch.device("cpu")) != reference()


@pytest.mark.usefixtures("anew")
def test_without_a_library_the_reference_serves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extension, "LIBRARIES", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert ops(torch.device("cpu")) == reference()
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("anew")
def test_without_an_instruction_set_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_processor_flags", lambda: {"avx2", "fma"})  # no f16c
    assert ops(torch.device("cpu")) == reference()


def test_a_cpu_does_without_triton() -> None:
    """In a process of its own, since a test may have imported it in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import sys, torch, services.worker.start as start, kernels.load as load; cpu = torch.device('cpu'); "
    code += "load.ops(cpu), load.version(cpu); assert 'triton' not in sys.modules and 'kernels.gpu' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_avx2_is_for_processors_without_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = extension.REQUIRED_FEATURES["avx512"] | extension.REQUIRED_FEATURES["avx2"]
    monkeypatch.setattr(extension, "_processor_flags", lambda: flags | {"avx512_bf16"})
    assert extension.instruction_set() == "avx512_bf16"
    monkeypatch.setattr(extension, "_processor_flags", lambda: flags)
    assert extension.instruction_set() == "avx512"
    monkeypatch.setattr(extension, "_processor_flags", lambda: flags - {"avx512_vnni"})
    assert extension.instruction_set() == "avx2"


def test_a_library_of_other_sources_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = extension.library("avx2")
    (tmp_path / "changed.cpp").write_text("")
    monkeypatch.setattr(extension, "SOURCES", tmp_path)
    assert extension.library("avx2") != before


def test_a_build_removes_earlier_libraries_of_its_own_instruction_set_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One instruction set's name begins with another's."""
    monkeypatch.setattr(extension, "LIBRARIES", tmp_path)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    monkeypatch.setattr(build, "_run", lambda *argv: Path(argv[argv.index("-o") + 1]).touch())
    for name in ("avx512_bf16", "avx512", "avx2", "avx512"):
        (tmp_path / f"quire_{name}_{'0' * extension.DIGEST}.so").touch()
        build.build(name)
    assert set(tmp_path.iterdir()) == {extension.library(name) for name in ("avx512_bf16", "avx512", "avx2")}


def test_without_a_compiler_nothing_is_built_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    assert build.main([]) == 0
    assert "no C++ compiler" in capsys.readouterr().err
