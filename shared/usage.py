"""`Process`: the CPU time of a process of this host, and how long it waited for a CPU, as /proc shows them."""

import ctypes
import os
import sys
from contextlib import suppress

from shared.liveness import Usage

USER_TIME, SYSTEM_TIME = 11, 12  # of the fields behind the name in /proc/PID/stat
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_NAME = 15
HELPERS = ("ZMQbg/", "beats")  # names of threads that show nothing of the process's work: ZeroMQ's and the reporter's
WORKING = "RD"  # states of a thread: running or waiting for a CPU, and waiting for a disk


def name_helper() -> None:
    """Mark the calling thread as one that shows nothing of its process's work."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"beats", 0, 0, 0)


class Process:
    """A process of this host, as /proc shows it, without its helper threads: those go on beside a loop that hangs."""

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}"
        self._delays: dict[str, int] = {}  # nanoseconds, by thread
        self._delayed = 0  # nanoseconds; never falls, though threads end

    def usage(self) -> Usage | None:
        """Return what it has used so far; None if there is no such process."""
        try:
            user, system = _fields(f"{self._folder}/stat")[USER_TIME : SYSTEM_TIME + 1]
            return Usage((int(user) + int(system)) / TICKS, self.delayed(), any(map(self._works, self._threads())))
        except OSError:
            return None

    def delayed(self) -> float:
        """Return the seconds that its threads have waited for a CPU so far; 0 where the kernel does not count them."""
        delays: dict[str, int] = {}
        for thread in self._threads():
            with suppress(OSError, IndexError, ValueError):  # it has ended, or there is no such file
                delays[thread] = int(_read(f"{self._folder}/task/{thread}/schedstat").split()[1])
        self._delayed += sum(max(delay - self._delays.get(thread, 0), 0) for thread, delay in delays.items())
        self._delays = delays
        return self._delayed / 1e9

    def _threads(self) -> list[str]:
        with suppress(OSError):
            return [thread for thread in os.listdir(f"{self._folder}/task") if not self._helps(thread)]
        return []

    def _helps(self, thread: str) -> bool:
        with suppress(OSError):
            return _read(f"{self._folder}/task/{thread}/comm").startswith(HELPERS)
        return True  # it has ended

    def _works(self, thread: str) -> bool:
        with suppress(OSError):
            return _fields(f"{self._folder}/task/{thread}/stat")[0] in WORKING
        return False


def _fields(path: str) -> list[str]:
    """The fields of a `stat` file behind the name, which may hold anything."""
    return _read(path).rpartition(")")[2].split()


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
