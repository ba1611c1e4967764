"""How this process uses its machine: threads, the allocator's habits, memory that is free.

Limits may come from the CPU mask, from a control group's quota or from the user; the tightest holds, and what the
user says wins.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

from kernels.cpu import extension
from services.worker import cgroup

_CGROUP, _PROC = Path("/sys/fs/cgroup"), Path("/proc/self")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux's mman.h
_HUGE = 2**21
_GIB = 2**30


def set_threads(wanted: int | None) -> int:
    """Set how many threads torch computes with, and say how many those are.

    `wanted` wins, then OMP_NUM_THREADS (which torch has read itself); otherwise one for each CPU that this process
    may use.
    """
    if wanted is None and "OMP_NUM_THREADS" not in os.environ:
        wanted = allowed_cpus()
    if wanted is not None:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


def pin_threads() -> None:
    """Give each thread that computes a CPU of its own, if there are as many as this process may use.

    They wait for each other at the end of each operation, spinning. Left alone, the system at times puts two of them on
    one CPU, as soon as another process wants the other, and then each waits for the slice of the one it waits for. To
    be called when the process has its other threads: what the caller starts later stays on its CPU.
    """
    if not hasattr(os, "sched_getaffinity") or not extension.load():
        return
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) == torch.get_num_threads() > 1:
        torch.ops.quire.pin_threads(cpus)


def allowed_cpus() -> int:
    """Return the number of CPUs of the mask, or of a control group's quota if that is less."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = map(cgroup.cpus_left, cgroup.folders(_CGROUP, _PROC, "cpu"))
    return min([cpus, *(quota for quota in quotas if quota is not None)])


def keep_freed_memory() -> None:
    """Tell glibc's malloc not to hand memory back to the system after each use.

    A step allocates and frees the same few megabytes again and again; given back, each page would be faulted in and
    zeroed anew, which takes longer than the arithmetic on it. Other C libraries don't have the call, and are left.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _GIB)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _GIB - 1)


def use_huge_pages() -> int:
    """Ask the kernel to put what this process's heap holds now, the weights, on pages of 2 MiB; the bytes it did.

    A step reads all weights, and with pages of 4 KiB a good part of that time goes into finding them. Linux does it at
    once since 6.1; an older one may do it in time, or never, and then all stays as it is.
    """
    done = 0
    with suppress(OSError):
        madvise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, mode, *_, name = line.split()
            if mode != "rw-p" or not (name == "[heap]" or name == "0"):  # a nameless one ends with its inode, 0
                continue
            first, last = (int(end, 16) for end in span.split("-"))
            start = -(-first // _HUGE) * _HUGE
            size = last // _HUGE * _HUGE - start
            if size <= 0 or madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE):
                continue
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE) == 0:
                done += size
    return done


def available_memory() -> int:
    """Return the bytes that could be taken without swapping, within the limits of all control groups."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    rooms = map(cgroup.memory_left, cgroup.folders(_CGROUP, _PROC, "memory"))
    return min([available, *(room for room in rooms if room is not None)])
