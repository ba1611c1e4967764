"""`CpuMonitor`: the CPU time of a process of this host, and how long it waited for a CPU, read from /proc."""

import ctypes
import os
import sys
from contextlib import suppress

from shared.liveness import CpuUsage

USER_TIME, SYSTEM_TIME = 11, 12  # of the fields after the name in /proc/PID/stat
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_NAME = 15
HEARTBEAT_THREAD = "heartbeat"
HELPER_THREADS = ("ZMQbg/", HEARTBEAT_THREAD)  # names of threads that say nothing about the process's work
WORKING_STATES = "RD"  # of a thread: running or waiting for a CPU, and waiting for a disk


def mark_helper_thread() -> None:
    """Name the calling thread so that `CpuMonitor` does not count it as the process's work."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, HEARTBEAT_THREAD.encode(), 0, 0, 0)


class CpuMonitor:
    """A process of this host. Its helper threads are not counted, since they go on while its loop hangs."""

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}"
        self._thread_waits: dict[str, int] = {}  # nanoseconds, by thread
        self._total_wait = 0  # nanoseconds; does not decrease when threads end

    def cpu_usage(self) -> CpuUsage | None:
        """Return what the process has used so far; None if there is no such process."""
        try:
            user, system = _stat_fields(f"{self._folder}/stat")[USER_TIME : SYSTEM_TIME + 1]
            cpu_seconds = (int(user) + int(system)) / CLOCK_TICKS
            return CpuUsage(cpu_seconds, self.cpu_wait_seconds(), any(map(self._works, self._threads())))
        except OSError:
            return None

    def cpu_wait_seconds(self) -> float:
        """Return the seconds that its threads have waited for a CPU so far; 0 where the kernel does not count them."""
        waits: dict[str, int] = {}
        for thread in self._all_threads():
            with suppress(OSError, IndexError, ValueError):  # the thread has ended, or the kernel has no such file
                wait = int(_read(f"{self._folder}/task/{thread}/schedstat").split()[1])
                if wait == self._thread_waits.get(thread, 0) or not self._is_helper(thread):  # most threads are idle
                    waits[thread] = wait
        self._total_wait += sum(max(wait - self._thread_waits.get(thread, 0), 0) for thread, wait in waits.items())
        self._thread_waits = waits
        return self._total_wait / 1e9

    def _threads(self) -> list[str]:
        return [thread for thread in self._all_threads() if not self._is_helper(thread)]

    def _all_threads(self) -> list[str]:
        with suppress(OSError):
            return os.listdir(f"{self._folder}/task")
        return []

    def _is_helper(self, thread: str) -> bool:
        with suppress(OSError):
            return _read(f"{self._folder}/task/{thread}/comm").startswith(HELPER_THREADS)
        return True  # it has ended

    def _works(self, thread: str) -> bool:
        with suppress(OSError):
            return _stat_fields(f"{self._folder}/task/{thread}/stat")[0] in WORKING_STATES
        return False


def _stat_fields(path: str) -> list[str]:
    """Return the fields of a `stat` file after the name, which may itself contain spaces and parentheses."""
    return _read(path).rpartition(")")[2].split()


def _read(path: str) -> str:
    """Return a short file of /proc. Python's `open` takes twice as long, and each heartbeat reads dozens."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096).decode("ascii", "replace")
    finally:
        os.close(descriptor)
