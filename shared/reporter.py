"""`Reporter`: a thread that looks at its process's loop, CPU time and waits for a CPU, and sends beats to watchers.

The loop marks its turns on a `Loop`; the thread reads that and never touches anything else of the process. It also
knows whether the process is short of CPU (`Reporter.short_of_cpu`), which matters before it judges others.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import zmq

from shared.liveness import Shortage
from shared.protocol import Heartbeat, ProcessStats, encode
from shared.transport import dial_beats
from shared.usage import Process, name_helper

BEAT = 0.25
"""Seconds between two beats; far less than any patience."""


class Loop:
    """The present turn of a process's loop. Marked by the loop, read by the reporter's thread."""

    def __init__(self) -> None:
        self._began: float | None = None

    def turned(self) -> None:
        """Note that a turn begins."""
        self._began = time.monotonic()

    def waiting(self) -> None:
        """Note that the loop waits for messages."""
        self._began = None

    def busy(self, now: float) -> float:
        """Return the seconds since the present turn began; 0 while the loop waits."""
        began = self._began  # may change meanwhile
        return 0.0 if began is None else max(now - began, 0.0)


class Watcher(NamedTuple):
    """A process that watches this one."""

    address: str
    name: Callable[[], str]  # by which it knows this process; empty: not now


class Reporter:
    """Sends beats for the time of a `with` block."""

    def __init__(self, loop: Loop, watchers: Sequence[Watcher]) -> None:
        self.vitals = ProcessStats()  # the last ones
        self._loop = loop
        self._watchers = watchers
        self._process = Process(os.getpid())
        self._shortage = Shortage()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def __enter__(self) -> "Reporter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def short_of_cpu(self, now: float) -> bool:
        """Return whether this process is or lately was short of CPU, and should not judge others by their silence."""
        return self._shortage.remembered(now) or self._shortage.overdue(now)

    def _run(self) -> None:
        name_helper()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the loop's, and wake its poll
        with zmq.Context() as context, ExitStack() as stack:
            sockets = [stack.enter_context(dial_beats(context, watcher.address)) for watcher in self._watchers]
            while True:
                self._sample(time.monotonic())
                for watcher, socket in zip(self._watchers, sockets, strict=True):
                    if name := watcher.name():
                        with suppress(zmq.Again):  # nobody is there, or it does not read
                            socket.send(encode(Heartbeat(name, self.vitals)), zmq.NOBLOCK)
                if self._over.wait(BEAT):
                    return

    def _sample(self, now: float) -> None:
        self.vitals = ProcessStats(self._loop.busy(now), time.process_time(), self._process.delayed())
        self._shortage.note(self.vitals.cpu_wait_seconds, now)


def supervisor_watcher(address: str, role: str) -> list[Watcher]:
    """Return the supervisor, if there is one at `address`; it knows this process by its role."""
    return [Watcher(address, lambda: role)] if address else []
