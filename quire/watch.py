"""`Watch`: finds services that hang, by their heartbeats. It names those to replace and kills nothing itself.

A service is judged from its first heartbeat on, since loading a model may take any time. The limits here are longer
than those of the service's peers: a scheduler judges its worker first, and a gateway its scheduler.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from quire.children import Child
from shared.cpu_usage import CpuMonitor
from shared.errors import ProtocolError
from shared.liveness import STALL, Liveness
from shared.log_limit import LogLimit
from shared.protocol import Heartbeat, decode_to_supervisor
from shared.transport import DropReason, Listener

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())  # the supervisor writes to its stderr without a handler of its own

CHECK_INTERVAL = 0.25
"""Seconds between two checks."""

MAX_HEARTBEATS = 2000
"""Heartbeats read in one check, in which each service sends only a few."""


class SilenceLimit(NamedTuple):
    """The time in seconds for which a service may be silent, and for which one turn of its loop may last."""

    silence: float
    turn: float | None  # None: a peer judges its turns


class WatchedProcess(Struct):
    """The process of a service, and its liveness."""

    cpu_monitor: CpuMonitor
    liveness: Liveness


class Watch:
    """Judges services; `limits` are those of each role. `now` is a parameter, in seconds of the monotonic clock."""

    def __init__(self, listener: Listener, limits: Mapping[str, SilenceLimit]) -> None:
        self._listener = listener
        self._limits = limits
        self._processes: dict[int, WatchedProcess] = {}  # by process id
        self._checked_at: float | None = None

    def find_hung(self, children: Sequence[Child], now: float) -> list[tuple[Child, str]]:
        """Return the children that hang, and why. Call it every `CHECK_INTERVAL`.

        None hangs while messages are unread, since a flood of them may hold up heartbeats.
        """
        running = {child.process.pid: child for child in children if child.process is not None and child.to_run}
        self._processes = {pid: watched for pid, watched in self._processes.items() if pid in running}
        self._postpone(now)
        if not self._read(running, now):
            return []
        reasons = [(running[pid], self._judge(watched, now)) for pid, watched in self._processes.items()]
        return [(child, reason) for child, reason in reasons if reason]

    def _read(self, running: Mapping[int, Child], now: float) -> bool:
        """Read heartbeats, and return whether all that have come are read."""
        self._listener.monitor.drain()
        for _ in range(MAX_HEARTBEATS):
            if (message := self._listener.receive()) is None:
                return True
            try:
                heartbeat = decode_to_supervisor(message.body)
            except ProtocolError as error:
                self._listener.reject(message)
                logger.warning("dropped a message of process %s: %s", message.pid, error)
                continue
            child = None if message.pid is None else running.get(message.pid)  # None: it is from an earlier process
            if message.pid is not None and child is not None and child.role == heartbeat.identity:
                self._note_heartbeat(heartbeat, message.pid, now)
            else:
                self._listener.dropped[DropReason.UNKNOWN_SENDER] += 1
        return False

    def _note_heartbeat(self, heartbeat: Heartbeat, pid: int, now: float) -> None:
        watched = self._processes.get(pid)
        if watched is None:
            limit = self._limits[heartbeat.identity]
            liveness = Liveness(limit.silence, now, turn_timeout=limit.turn, local=True)
            watched = self._processes[pid] = WatchedProcess(CpuMonitor(pid), liveness)
        watched.liveness.note_heartbeat(heartbeat.process, now)

    def _judge(self, watched: WatchedProcess, now: float) -> str:
        """Return why the process hangs, or '' if it does not."""
        if watched.liveness.should_observe(now):
            watched.liveness.observe(watched.cpu_monitor.cpu_usage(), now)
        return watched.liveness.failure(now)

    def _postpone(self, now: float) -> None:
        stood_still = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now  # while this process stood still, it could not read heartbeats
        if stood_still > CHECK_INTERVAL + STALL:
            for watched in self._processes.values():
                watched.liveness.postpone(stood_still)
