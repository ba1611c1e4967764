"""Tests the memory and CPUs that control groups leave a process, with file trees of both versions (MEM-21)."""

import os
from pathlib import Path

import pytest
import torch

from services.worker import cgroup, cpu_tuning
from services.worker.config import WorkerConfig
from services.worker.kv_memory import kv_memory

NO_LIMIT = 9223372036854771712  # of version 1
STAT = "anon 300\nfile 7600\nfile_mapped 100\ninactive_anon 0\nactive_anon 300\ninactive_file {}\nactive_file {}\n"
STAT_V1 = "cache 1\ninactive_file 1\nactive_file 1\nhierarchical_memory_limit {}\ntotal_mapped_file 100\n"
STAT_V1 += "total_inactive_file {}\ntotal_active_file {}\n"


class Tree:
    """The files of control groups, and the kernel's files about the place of this process in them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.proc = folder / "cgroup", folder / "proc"
        self.root.mkdir()
        self.proc.mkdir()
        monkeypatch.setattr(cpu_tuning, "_CGROUP", self.root)
        monkeypatch.setattr(cpu_tuning, "_PROC", self.proc)

    def is_in(self, *lines: str, mounts: dict[str, str] | None = None) -> None:
        """Put this process in the groups of `lines`; `mounts` maps a tree to the group at its top."""
        (self.proc / "cgroup").write_text("\n".join(lines))
        places = {"/sys": "/", **{str(self.root / tree): top for tree, top in (mounts or {}).items()}}
        lines = tuple(f"31 23 0:28 {top} {place} rw - cgroup cgroup rw" for place, top in places.items())
        (self.proc / "mountinfo").write_text("\n".join(lines))

    def v2(self, group: str, limit: object, usage: int, inactive: int = 0, active: int = 0) -> None:
        stat = STAT.format(inactive, active)
        self._write(group, {"memory.max": limit, "memory.current": usage, "memory.stat": stat})

    def v1(self, group: str, limit: int, usage: int, inactive: int = 0, active: int = 0, above: int = NO_LIMIT) -> None:
        stat = STAT_V1.format(above, inactive, active)
        files: dict[str, object] = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": usage, "memory.stat": stat}
        self._write(f"memory/{group}", files)

    def _write(self, group: str, files: dict[str, object]) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_files_that_were_read_are_no_use_of_memory(tree: Tree) -> None:
    """300 of 8000 are in use, and 7600 are cache. In version 1, the counts that include the children matter."""
    tree.is_in("0::/")
    tree.v2("", 8000, 7900, inactive=7600)
    assert cpu_tuning.available_memory() == 7700
    tree.v2("", "max", 7900, inactive=7600)
    assert cpu_tuning.available_memory() > 10_000
    tree.is_in("4:memory:/")
    tree.v1("", 8000, 7900, inactive=7600)
    assert cpu_tuning.available_memory() == 7700
    assert kv_memory(WorkerConfig(), torch.device("cpu"), None) == 1925


def test_files_that_were_read_twice_are_free_unless_they_are_mapped(tree: Tree) -> None:
    """A second start finds the weights' files active; libraries in use are active and mapped."""
    tree.is_in("0::/")
    tree.v2("", 8000, 7900, inactive=500, active=7100)
    assert cpu_tuning.available_memory() == 100 + 500 + 7000
    tree.v2("", 8000, 7900, inactive=500, active=60)
    assert cpu_tuning.available_memory() == 100 + 500
    (tree.root / "memory.stat").write_text("inactive_file 500\nactive_file 7100\n")  # without a count of mapped files
    assert cpu_tuning.available_memory() == 100 + 500
    (tree.root / "memory.stat").write_text("inactive_file 8000\n")  # the counts lag behind
    assert cpu_tuning.available_memory() == 8000
    (tree.root / "memory.stat").unlink()
    assert cpu_tuning.available_memory() == 100


@pytest.mark.parametrize(
    ("group", "limit"),
    [("pod", 4000), ("pod/app", 4000), ("pod/app/worker", 4000), ("", 4000), ("pod/other", NO_LIMIT)],
)
@pytest.mark.parametrize("version", [1, 2])
def test_parents_bind_too(tree: Tree, version: int, group: str, limit: int) -> None:
    write = tree.v1 if version == 1 else tree.v2
    tree.is_in("4:cpu,memory:/pod/app/worker" if version == 1 else "0::/pod/app/worker")
    for folder in ("", "pod", "pod/app", "pod/app/worker", "pod/other"):
        write(folder, NO_LIMIT if version == 1 else "max", 5)
    write("pod/app", 90_000, 1000)
    write(group, 4000, 1000, inactive=200)
    assert cpu_tuning.available_memory() == (3200 if limit == 4000 else 89_000)


def test_a_container_sees_its_own_group_at_the_top(tree: Tree) -> None:
    """The path is the host's, which the container does not see; it sees its own groups."""
    tree.v1("", 4000, 1000)
    tree.v1("inner", 2000, 500)
    tree.is_in("4:memory:/docker/abc", mounts={"memory": "/docker/abc"})
    assert cpu_tuning.available_memory() == 3000
    tree.is_in("4:memory:/docker/abc/inner", mounts={"memory": "/docker/abc"})
    assert cpu_tuning.available_memory() == 1500
    tree.is_in("4:memory:/elsewhere/inner", mounts={"memory": "/docker/abc"})
    assert cpu_tuning.available_memory() == 3000
    tree.is_in("4:memory:/../inner", mounts={"memory": "/"})
    assert cpu_tuning.available_memory() == 3000
    (tree.proc / "cgroup").unlink()
    assert cpu_tuning.available_memory() == 3000


def test_limits_that_are_not_in_a_file_of_their_own(tree: Tree) -> None:
    """A group is throttled beyond memory.high; version 1 has the limits of invisible parents in memory.stat."""
    tree.is_in("4:memory:/", "0::/")
    tree.v2("", "max", 1000)
    (tree.root / "memory.high").write_text("3000\n")
    assert cpu_tuning.available_memory() == 2000
    tree.v1("", NO_LIMIT, 1000, above=2500)
    assert cpu_tuning.available_memory() == 1500


def test_version_2_beside_version_1(tree: Tree) -> None:
    tree.is_in("4:memory:/a", "0::/b")
    tree.v1("a", 4000, 1000)
    tree.v2("unified/b", 3000, 1000)
    assert cpu_tuning.available_memory() == 2000
    tree.v2("unified/b", "max", 1000)
    assert cpu_tuning.available_memory() == 3000


def test_quotas_of_both_versions_and_of_parents(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    tree.is_in("2:cpu,cpuacct:/pod/app", "0::/pod/app")
    for folder in ("pod/app", "cpu/pod/app"):
        (tree.root / folder).mkdir(parents=True)
    (tree.root / "pod/cpu.max").write_text("400000 100000\n")
    assert cpu_tuning.allowed_cpus() == 4
    for quota, cpus in ((-1, 4), (300_000, 3), (50_000, 1)):
        (tree.root / "cpu/pod/app/cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tree.root / "cpu/pod/app/cpu.cfs_period_us").write_text("100000\n")
        assert cpu_tuning.allowed_cpus() == cpus


def test_this_process_has_folders() -> None:
    assert all(folder.is_dir() for folder in cgroup.folders(Path("/sys/fs/cgroup"), Path("/proc/self"), "memory"))
