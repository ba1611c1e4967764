"""Tests the number of threads and the memory of the process, and the limits they follow."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.cpu import extension
from services.worker import cpu_tuning


@pytest.fixture(autouse=True)
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    monkeypatch.setattr(cpu_tuning, "_CGROUP", folder)


def test_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU-01."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert cpu_tuning.set_threads(3) == 3
    assert torch.get_num_threads() == 3


def test_omp_num_threads_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU-01."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torch.set_num_threads(2)
    assert cpu_tuning.set_threads(None) == 2


def test_by_default_one_for_each_allowed_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu_tuning.set_threads(None) == cpu_tuning.allowed_cpus()


def test_the_mask_and_the_quota_bound_the_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CPU-01."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    cgroup(monkeypatch, tmp_path)
    assert cpu_tuning.allowed_cpus() == 6
    for text, cpus in (("max 100000", 6), ("400000 100000", 4), ("50000 100000", 1), ("900000 100000", 6)):
        cgroup(monkeypatch, tmp_path, cpu_max=text)
        assert cpu_tuning.allowed_cpus() == cpus


@pytest.mark.parametrize("threads_of_a_core", ["{first}-{last}", "{first},{last}"], ids=["next", "apart"])
def test_workers_of_one_machine_share_no_cpu_and_no_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads_of_a_core: str
) -> None:
    """CPU-01. There are 8 CPUs on 4 cores: 0 and 1, 2 and 3, ...; or 0 and 4, 1 and 5, ..."""
    apart = "," in threads_of_a_core
    for cpu in range(8):
        first, last = (cpu % 4, cpu % 4 + 4) if apart else (cpu - cpu % 2, cpu - cpu % 2 + 1)
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(threads_of_a_core.format(first=first, last=last) + "\n")
    monkeypatch.setattr(cpu_tuning, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    taken: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: taken.append(sorted(cpus)))
    for rank in range(2):
        cpu_tuning.take_cpus(rank, 2)
    assert taken == ([[0, 1, 4, 5], [2, 3, 6, 7]] if apart else [[0, 1, 2, 3], [4, 5, 6, 7]])
    taken.clear()
    for rank in range(3):
        cpu_tuning.take_cpus(rank, 3)
    assert sorted(itertools.chain(*taken)) == list(range(8))
    assert [len(cpus) for cpus in taken] == [2, 3, 3]
    taken.clear()
    for rank in range(16):
        cpu_tuning.take_cpus(rank, 16)
    assert sorted(itertools.chain(*taken)) == sorted([*range(8), *range(8)])
    taken.clear()
    cpu_tuning.take_cpus(0, 1)
    assert taken == []


def test_a_quota_is_divided_among_the_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CPU-01: so that all together have as many threads as there are CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    for text, threads in (("max 100000", 6), ("800000 100000", 4), ("50000 100000", 1)):
        cgroup(monkeypatch, tmp_path, cpu_max=text)
        assert cpu_tuning.allowed_cpus(2) == threads
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu_tuning.set_threads(None, 2) == 1


def test_the_control_group_bounds_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cgroup(monkeypatch, tmp_path, memory_max="max", memory_current="5")
    assert cpu_tuning.available_memory() > 2**20
    cgroup(monkeypatch, tmp_path, memory_max="1000", memory_current="400")
    assert cpu_tuning.available_memory() == 600
    cgroup(monkeypatch, tmp_path, memory_max="1000", memory_current="4000")
    assert cpu_tuning.available_memory() == 0


def test_freed_memory_is_kept_without_harm() -> None:
    cpu_tuning.keep_freed_memory()
    assert torch.ones(10_000_000).sum() == 10_000_000


PINNED = """
import os, torch
from kernels.cpu import extension
from services.worker import cpu_tuning
torch.set_num_threads({threads})
torch.ones(10_000_000).sum()  # makes the pool
cpu_tuning.pin_threads()
print(sorted(sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not extension.load() or len(os.sched_getaffinity(0)) < 2, reason="no pool to pin")
def test_threads_are_pinned_if_each_has_a_cpu() -> None:
    cpus = sorted(os.sched_getaffinity(0))

    def places(threads: int) -> list[list[int]]:
        code = PINNED.format(threads=threads)
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        masks: list[list[int]] = json.loads(done.stdout)
        return masks

    assert all([cpu] in places(len(cpus)) for cpu in cpus)
    assert all(mask == cpus for mask in places(1))


def test_huge_pages_leave_memory_as_it_was() -> None:
    cpu_tuning.keep_freed_memory()
    numbers = torch.arange(5_000_000)
    assert cpu_tuning.use_huge_pages() % 2**21 == 0
    assert torch.equal(numbers, torch.arange(5_000_000))


def has_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


HUGE = """
from services.worker import cpu_tuning
from pathlib import Path
cpu_tuning.keep_freed_memory()
cpu_tuning.allocate_huge_pages()
import torch

def anonymous(name="Anonymous"):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

small = anonymous("AnonHugePages")
kept = torch.ones(2**23)
huge = anonymous("AnonHugePages") - small
freed = [torch.ones(2**23), torch.ones(2**23)]
last = torch.ones(2**23)  # without it, the end of the heap would be returned
before = anonymous()
del freed
held = anonymous()
cpu_tuning.return_freed_memory()
print(huge, before - held, before - anonymous(), bool(kept.all()) and bool(last.all()))
"""


@pytest.mark.skipif(not has_huge_pages(), reason="there are no huge pages here")
def test_large_tensors_are_made_in_huge_pages_and_freed_ones_returned() -> None:
    done = subprocess.run([sys.executable, "-c", HUGE], check=True, capture_output=True, text=True)
    huge, freed, returned, right = done.stdout.split()
    assert int(huge) >= 24 * 2**20  # of 32; both ends may be in small pages, and the kernel may lack a huge one
    assert int(freed) < 2**20  # steps would have to fetch it from the system again
    assert int(returned) > 56 * 2**20  # of 64
    assert right == "True"
