"""The compiled kernels are in use where they can be; elsewhere the reference is."""

import logging
import os
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.cpu import build, extension
from kernels.load import ops, reference
from services.worker.config import WorkerConfig
from services.worker.start import choose_ops
from shared.config import knobs
from shared.errors import ConfigError


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the process choose and load anew, and restore what it had chosen and loaded."""
    monkeypatch.setattr(extension, "_chosen", extension._chosen)
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


def test_each_set_is_for_processors_that_have_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = set().union(*extension.REQUIRED_FEATURES.values())
    for missing, best in [
        ("", "amx"),
        ("amx_int8", "avx512_bf16"),
        ("amx_tile", "avx512_bf16"),
        ("avx512_bf16", "avx512"),
        ("avx512_vnni", "avx_vnni"),
        ("avx512f avx_vnni", "avx2"),
        ("f16c", None),
    ]:
        flags = everything - set(missing.split())
        monkeypatch.setattr(extension, "_processor_flags", lambda flags=flags: flags)
        assert extension.instruction_set() == best
    assert {"-mamx-int8", "-mamx-tile", "-mavx512bf16"} <= set(extension.FLAGS["amx"])
    assert "-mavxvnni" in extension.FLAGS["avx_vnni"]


@pytest.mark.parametrize(("answer", "best"), [(0, "amx"), (-1, "avx512_bf16")])
def test_amx_is_used_if_linux_grants_its_tiles(
    answer: int, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Linux gives the memory of tiles to processes that ask for it. It may be too old, or told not to."""
    calls = []

    class LibC:
        def __init__(self, name: str | None) -> None:
            assert name is None  # what is loaded

        def syscall(self, *arguments: int) -> int:
            calls.append(arguments)
            return answer

    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\nflags\t\t: {' '.join(extension.REQUIRED_FEATURES['amx'])}\n")
    monkeypatch.setattr(extension, "CPUINFO", cpuinfo)
    monkeypatch.setattr(extension.ctypes, "CDLL", LibC)
    extension._processor_flags.cache_clear()
    try:
        assert extension.instruction_set() == best
        assert extension.instruction_set() == best
    finally:
        extension._processor_flags.cache_clear()
    assert calls == [(158, 0x1023, 18)]  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), once
    assert len(caplog.messages) == (answer != 0)


def test_linux_does_not_grant_tiles_to_a_processor_without_them() -> None:
    if "amx_tile" in extension.CPUINFO.read_text():
        pytest.skip("this processor has AMX")
    assert not extension._request_tiles()


@pytest.mark.usefixtures("anew")
def test_a_user_may_choose_the_instruction_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a way out where the best one fails."""
    loaded: list[Path] = []
    monkeypatch.setattr(extension, "LIBRARIES", tmp_path)
    monkeypatch.setattr(extension, "_processor_flags", lambda: extension.REQUIRED_FEATURES["avx512_bf16"])
    monkeypatch.setattr(extension.torch.ops, "load_library", loaded.append)
    with pytest.raises(ValueError, match="amx: this processor lacks it"):
        extension.choose("amx")
    with pytest.raises(ValueError, match=r"avx2: its kernels are not built \(python -m kernels.cpu.build avx2\)"):
        extension.choose("avx2")
    for name in ("avx512_bf16", "avx2"):
        extension.library(name).touch()
    extension.choose("avx2")
    assert extension.load() == "avx2"
    assert loaded == [extension.library("avx2")]
    extension.choose("avx2")
    for other in ("avx512_bf16", "none"):
        with pytest.raises(ValueError, match=rf"{other}: this process has loaded other kernels \(avx2\)"):
            extension.choose(other)


@pytest.mark.usefixtures("anew")
def test_a_user_may_choose_plain_operations() -> None:
    device = torch.device("cpu")
    assert choose_ops(device, WorkerConfig(instruction_set="none")) == reference()
    assert extension.load() is None


@pytest.mark.usefixtures("anew")
def test_a_choice_that_cannot_be_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_processor_flags", lambda: {"avx2", "fma", "f16c"})
    with pytest.raises(ConfigError, match=r"^--instruction-set amx: this processor lacks it"):
        choose_ops(torch.device("cpu"), WorkerConfig(instruction_set="amx"))


def test_the_choices_are_the_instruction_sets() -> None:
    (knob,) = (knob for knob in knobs(WorkerConfig) if knob.name == "instruction_set")
    assert set(typing.get_args(typing.get_args(knob.type)[0])) == {"auto", *extension.REQUIRED_FEATURES, "none"}


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


@pytest.mark.parametrize(
    ("argv", "names"),
    [([], ["avx512"]), (["--all"], list(extension.FLAGS)), (["avx2", "amx"], ["avx2", "amx"])],
)
def test_a_build_is_for_this_processor_unless_it_is_told_otherwise(
    argv: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr(extension, "LIBRARIES", tmp_path)
    monkeypatch.setattr(build, "instruction_set", lambda: "avx512")
    monkeypatch.setattr(build, "COMPILER", sys.executable)
    monkeypatch.setattr(build, "build", built.append)
    assert build.main(argv) == 0
    assert built == names


def test_an_unknown_instruction_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(["avx3"])
    assert "unknown instruction sets: avx3" in capsys.readouterr().err
