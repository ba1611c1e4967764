"""A process tells of itself: a thread that looks at its loop, its CPU time and its waits for a CPU, and sends beats.

The loop marks its turns on a `Loop`; the thread reads that and never touches anything else of the process. It also
knows whether the process itself is short of CPU, which whoever judges others has to ask before (`Reporter.short`).
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
from shared.protocol import Beat, Vitals, encode
from shared.transport import dial_beats
from shared.usage import Process, name_helper

BEAT = 0.25
"""Seconds between two beats; far less than any patience."""


class Loop:
    """The present turn of a process's loop. Marked by the loop, read by the reporter's thread."""

    def __init__(self) -> None:
        self._began: float | None = None

    def turned(self) -> None:
        """A turn begins."""
        self._began = time.monotonic()

    def waiting(self) -> None:
        """The loop waits for messages."""
        self._began = None

    def busy(self, now: float) -> float:
        """Seconds since the present turn began; 0 while the loop waits."""
        began = self._began  # may change meanwhile
        return 0.0 if began is None else max(now - began, 0.0)


class Post(NamedTuple):
    """One who watches this process."""

    address: str
    name: Callable[[], str]  # by which it knows this process; empty: not now


class Reporter:
    """Sends beats for the time of a `with` block."""

    def __init__(self, loop: Loop, posts: Sequence[Post]) -> None:
        self.vitals = Vitals()  # the last ones
        self._loop = loop
        self._posts = posts
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

    def short(self, now: float) -> bool:
        """Whether this process is or lately was short of CPU, and should not judge others by their silence."""
        return self._shortage.felt(now) or self._shortage.overdue(now)

    def _run(self) -> None:
        name_helper()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the loop's, and wake its poll
        with zmq.Context() as context, ExitStack() as stack:
            sockets = [stack.enter_context(dial_beats(context, post.address)) for post in self._posts]
            while True:
                self._sample(time.monotonic())
                for post, socket in zip(self._posts, sockets, strict=True):
                    if name := post.name():
                        with suppress(zmq.Again):  # nobody is there, or it does not read
                            socket.send(encode(Beat(name, self.vitals)), zmq.NOBLOCK)
                if self._over.wait(BEAT):
                    return

    def _sample(self, now: float) -> None:
        self.vitals = Vitals(self._loop.busy(now), time.process_time(), self._process.delayed())
        self._shortage.note(self.vitals.delayed, now)


def supervisor_post(address: str, role: str) -> list[Post]:
    """The supervisor, if there is one at `address`, who knows this process by its role."""
    return [Post(address, lambda: role)] if address else []
