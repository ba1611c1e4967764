"""The memory and CPUs that control groups (cgroups) leave to this process.

The limits of all parent groups apply too, so callers check each group that is visible. Version 2 has one tree. Version
1 has one tree for each controller, maybe beside a tree of version 2.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _MemoryFiles(NamedTuple):
    """The files of a version, and the names in its memory.stat, that say how much memory is left."""

    limits: tuple[str, ...]
    usage: str
    inactive: str  # in memory.stat, with the group's children
    active: str
    mapped: str


_MEMORY = (
    _MemoryFiles(("memory.max", "memory.high"), "memory.current", "inactive_file", "active_file", "file_mapped"),
    _MemoryFiles(
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_active_file",
        "total_mapped_file",
    ),
)

_INHERITED = "hierarchical_memory_limit"
"""The line of version 1's memory.stat with the lowest limit, which includes parents that a container cannot see."""


def folders(root: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that limit `controller`, in each tree from the process's own group to the top.

    `root` is the folder in which trees are mounted (/sys/fs/cgroup), `proc` the kernel's folder about this process
    (/proc/self).
    """
    for tree, controllers in ((root, ""), (root / "unified", ""), (root / controller, controller)):
        if not tree.is_dir():
            continue
        own = tree / _path(tree, proc, controllers)
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(tree) and folder.is_dir())


def memory_left(folder: Path) -> int | None:
    """Return the bytes that a group may still allocate, or None if it has no limit.

    Its usage includes the cache of files that were read, which the kernel drops when memory runs short.
    """
    stat = _counts(folder / "memory.stat")
    for files in _MEMORY:
        limits = [limit for name in files.limits for limit in numbers(folder / name)]
        limits += [stat[_INHERITED]] if limits and _INHERITED in stat else []
        if limits and (usage := numbers(folder / files.usage)):
            return max(0, min(limits) - max(0, usage[0] - _reclaimable(stat, files)))
    return None


def cpus_left(folder: Path) -> int | None:
    """Return the number of CPUs in a group's quota, rounded down but at least 1, or None if it has no quota."""
    quota = numbers(folder / "cpu.max")  # "quota period", or "max period"
    quota = quota or numbers(folder / "cpu.cfs_quota_us") + numbers(folder / "cpu.cfs_period_us")  # -1: none
    if len(quota) != 2 or min(quota) <= 0:
        return None
    return max(1, quota[0] // quota[1])


def numbers(path: Path) -> list[int]:
    """Return the integers in a group's file, or an empty list if it does not exist or says "max"."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _reclaimable(stat: dict[str, int], files: _MemoryFiles) -> int:
    """Return the bytes of cached files that the kernel can drop: inactive ones, and active ones that are not mapped.

    A file that is read a second time becomes active, and stays so when nobody uses it any more.
    """
    inactive, active = stat.get(files.inactive, 0), stat.get(files.active, 0)
    return inactive + max(0, active - stat.get(files.mapped, active))


def _counts(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on each line."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _path(tree: Path, proc: Path, controllers: str) -> Path:
    """Return the path of the process's own group within a tree, or the top of the tree if that group is not visible."""
    for line in _lines(proc / "cgroup"):
        _, names, path = line.split(":", 2)
        if controllers in names.split(","):
            own, top = Path(path), _top(tree, proc)
            return own.relative_to(top) if own.is_relative_to(top) and ".." not in own.parts else Path()
    return Path()


def _top(tree: Path, proc: Path) -> Path:
    """Return the group that is mounted at `tree`; in a container this is often the container's own."""
    for line in _lines(proc / "mountinfo"):
        _, _, _, top, point, *_ = line.split()
        if point == str(tree.resolve()):
            return Path(top)
    return Path("/")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
