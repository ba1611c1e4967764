"""`HeartbeatSender`: a thread that measures its process and sends heartbeats to the processes that watch it.

It reads the loop's `LoopTimer`, and the process's CPU time and waits for a CPU, and touches nothing else of the
process. It also knows whether the process is short of CPU (`HeartbeatSender.short_of_cpu`). The process has to ask
that before it finds others dead.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import zmq

from shared.cpu_usage import CpuMonitor, mark_helper_thread
from shared.curve import ConnectionKeys
from shared.liveness import CpuShortage
from shared.protocol import Heartbeat, ProcessStats, encode
from shared.transport import connect_for_heartbeats

HEARTBEAT_INTERVAL = 0.25
"""Seconds between two heartbeats; far less than any timeout."""


class LoopTimer:
    """The time of the present turn of a process's loop. The loop writes it, and the heartbeat thread reads it."""

    def __init__(self) -> None:
        self._began: float | None = None

    def begin_turn(self) -> None:
        """Note that a turn begins."""
        self._began = time.monotonic()

    def begin_wait(self) -> None:
        """Note that the loop waits for messages."""
        self._began = None

    def busy_seconds(self, now: float) -> float:
        """Return the seconds since the present turn began; 0 while the loop waits."""
        began = self._began  # the loop's thread may change it meanwhile
        return 0.0 if began is None else max(now - began, 0.0)


class Watcher(NamedTuple):
    """A process that watches this one."""

    address: str
    identity: Callable[[], str]  # the name by which the watcher knows this process; empty while it has none
    keys: ConnectionKeys | None = None


class _Connection:
    """A connection to a watcher, under one identity of this process.

    There is none while the process has no identity, since the watcher may refuse it then; see `shared.transport`.
    """

    def __init__(self, context: "zmq.Context[Any]", watcher: Watcher) -> None:
        self._context = context
        self._watcher = watcher
        self._identity = ""
        self._socket: zmq.Socket[Any] | None = None
        self._stack = ExitStack()

    def send(self, stats: ProcessStats) -> None:
        """Send a heartbeat if the process has an identity and the watcher is there and reads."""
        if (identity := self._watcher.identity()) != self._identity:
            self.close()
            self._identity = identity
            if identity:
                connection = connect_for_heartbeats(self._context, self._watcher.address, self._watcher.keys)
                self._socket = self._stack.enter_context(connection)
        if self._socket is not None:
            with suppress(zmq.Again):
                self._socket.send(encode(Heartbeat(identity, stats)), zmq.NOBLOCK)

    def close(self) -> None:
        self._stack.close()
        self._socket = None


class HeartbeatSender:
    """Sends heartbeats to `watchers` for the time of a `with` block. `watchers` may be set anew at any time."""

    def __init__(self, loop: LoopTimer, watchers: Sequence[Watcher]) -> None:
        self.stats = ProcessStats()  # as last measured
        self.watchers = watchers
        self._loop = loop
        self._cpu_monitor = CpuMonitor(os.getpid())
        self._shortage = CpuShortage()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "HeartbeatSender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def short_of_cpu(self, now: float) -> bool:
        """Return whether this process is or recently was short of CPU, so that it cannot trust others' silence."""
        return self._shortage.is_recent(now) or self._shortage.sample_is_late(now)

    def _run(self) -> None:
        mark_helper_thread()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals must wake the loop's poll instead
        with zmq.Context() as context, _Connections(context) as connections:
            while True:
                self._measure(time.monotonic())
                connections.send(self.watchers, self.stats)
                if self._stop.wait(HEARTBEAT_INTERVAL):
                    return

    def _measure(self, now: float) -> None:
        self.stats = ProcessStats(
            self._loop.busy_seconds(now), time.process_time(), self._cpu_monitor.cpu_wait_seconds()
        )
        self._shortage.add(self.stats.cpu_wait_seconds, now)


class _Connections:
    """The connections to the present watchers, for the time of a `with` block."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self._context = context
        self._connections: dict[Watcher, _Connection] = {}

    def __enter__(self) -> "_Connections":
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(set(self._connections))

    def send(self, watchers: Sequence[Watcher], stats: ProcessStats) -> None:
        """Send a heartbeat to each watcher. Close the connections to all others."""
        self._leave(self._connections.keys() - watchers)
        for watcher in watchers:
            if watcher not in self._connections:
                self._connections[watcher] = _Connection(self._context, watcher)
            self._connections[watcher].send(stats)

    def _leave(self, watchers: Iterable[Watcher]) -> None:
        for watcher in watchers:
            self._connections.pop(watcher).close()


def supervisor_watcher(address: str, role: str) -> list[Watcher]:
    """Return the supervisor at `address` as a list of one watcher, or an empty list if `address` is empty.

    The supervisor knows this process by its role.
    """
    return [Watcher(address, lambda: role)] if address else []
