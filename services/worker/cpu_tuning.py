"""Tunes the process for a CPU: threads, malloc and pages; and measures the CPUs and memory that it may use.

The CPU mask and the quotas of control groups limit them, and the smallest limit applies. Users' settings override all
of them.
"""

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from kernels.cpu import extension
from services.worker import cgroup

_CGROUP, _PROC = Path("/sys/fs/cgroup"), Path("/proc/self")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux's mman.h
_HUGE_PAGE = 2**21
_TOPOLOGY = Path("/sys/devices/system/cpu")
_GIB = 2**30


def take_cpus(rank: int, num_workers: int) -> None:
    """Keep this process to its part of the CPUs, so that `num_workers` workers of one machine share none.

    Threads of one core stay together. If there are more workers than CPUs, some workers have the same one.
    """
    if num_workers == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cpus = sorted(os.sched_getaffinity(0), key=lambda cpu: (_core(cpu), cpu))
    part = cpus[rank * len(cpus) // num_workers : (rank + 1) * len(cpus) // num_workers]
    os.sched_setaffinity(0, part or [cpus[rank * len(cpus) // num_workers]])


def _core(cpu: int) -> int:
    """Return the first CPU of the core that `cpu` is a thread of."""
    with suppress(OSError):
        siblings = (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        if first := re.match(r"\d+", siblings):
            return int(first[0])
    return cpu


def set_threads(requested: int | None, num_workers: int = 1) -> int:
    """Set the number of threads that torch computes with, and return it.

    `requested` wins, then OMP_NUM_THREADS (which torch has read itself). Otherwise there is a thread for each CPU that
    this process may use, of `num_workers` which share a quota.
    """
    num_threads = requested
    if num_threads is None and "OMP_NUM_THREADS" not in os.environ:
        num_threads = allowed_cpus(num_workers)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


def pin_threads() -> None:
    """Pin each compute thread to its own CPU, if this process may use exactly as many CPUs as there are such threads.

    Compute threads spin while they wait for each other at the end of an operation. Without pinning, the system
    sometimes puts two of them on one CPU when another process needs a CPU, and one spins while the other should run.
    Call this after the other threads of the process have started: later ones inherit the CPU of the caller.
    """
    if not hasattr(os, "sched_getaffinity") or not extension.load():
        return
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) == torch.get_num_threads() > 1:
        torch.ops.quire.pin_threads(cpus)


def allowed_cpus(num_workers: int = 1) -> int:
    """Return the number of CPUs in the mask, or one worker's part of a control group's quota if that is less."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = map(cgroup.cpus_left, cgroup.folders(_CGROUP, _PROC, "cpu"))
    return min([cpus, *(max(1, quota // num_workers) for quota in quotas if quota is not None)])


def keep_freed_memory() -> None:
    """Tell glibc's malloc not to return freed memory to the system.

    A step allocates and frees the same few megabytes again and again. If malloc returned them, the kernel would have to
    map and zero each page again, which takes longer than the arithmetic on it. Other C libraries have no such call, and
    nothing happens.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _GIB)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _GIB - 1)


def return_freed_memory() -> None:
    """Return what was freed so far to the system, in spite of `keep_freed_memory`: steps need less than loading did."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def allocate_huge_pages() -> None:
    """Have torch ask for pages of 2 MiB when it allocates as much or more, unless the user decides that.

    Such memory is ready several times sooner than with pages of 4 KiB, and than with pages that are moved later. This
    must precede the first tensor of the process.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def use_huge_pages() -> int:
    """Ask the kernel to move the heap, which holds the weights, to pages of 2 MiB. Return the bytes that it moved.

    A step reads all weights, and with pages of 4 KiB, address translation takes much of that time. Linux moves them at
    once since 6.1; older versions may do it later, or never.
    """
    moved = 0
    with suppress(OSError):
        madvise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, mode, *_, name = line.split()
            if mode != "rw-p" or not (name == "[heap]" or name == "0"):  # a line without a name ends with the inode, 0
                continue
            first, last = (int(end, 16) for end in span.split("-"))
            start = -(-first // _HUGE_PAGE) * _HUGE_PAGE
            size = last // _HUGE_PAGE * _HUGE_PAGE - start
            if size <= 0 or madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE):
                continue
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE) == 0:
                moved += size
    return moved


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping, within the limits of all control groups."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    left = map(cgroup.memory_left, cgroup.folders(_CGROUP, _PROC, "memory"))
    return min([available, *(size for size in left if size is not None)])
