"""`Liveness`: the rule that decides whether a worker, scheduler or gateway is dead. Time is a parameter.

A thread of each process sends heartbeats with its `ProcessStats` (`shared.heartbeat`). The process that watches it
judges by them:

- It is *silent* if nothing has come from it for the timeout.
- It *hangs* if heartbeats come, but its loop has been in one turn for the timeout or has missed a deadline of the
  watcher's.

In both cases it is dead, unless it seems to work or to wait for a CPU. Then it gets `GRACE_PERIOD` seconds more, since
it may also be in an endless loop, or `STARVED_GRACE_PERIOD` seconds while it wants a CPU and hardly gets one.

For a process on the watcher's own host only the kernel's numbers count (`observe`): a process that is stopped or in a
deadlock neither computes nor is runnable. For others only heartbeats count, and only while they come. A process that
was short of CPU at its last heartbeat may be unable to send the next one. If the watcher itself is short of CPU, that
may be true of all its peers. While there are too few observations or heartbeats to tell whether one works that hangs,
it is not dead.
"""

from collections import deque
from typing import NamedTuple

from shared.protocol import ProcessStats

GATEWAY_TIMEOUT = 10.0
"""Seconds without input or output after which a scheduler gives up a gateway and aborts its requests."""

STALL = 1.0
"""Seconds that a watcher's own loop may stall before its peers' silence in that time is not counted."""

GRACE_PERIOD = 25.0
"""Extra seconds for a process that seems to work. With the usual timeouts a hang is found within half a minute."""

STARVED_GRACE_PERIOD = 240.0
"""Extra seconds for a process that hardly gets a CPU: a step may then take a hundred times as long."""

STARVED_RATE = 0.05
"""CPU seconds per second below which a process that wants more is starved. One of twenty that share a CPU is not."""

WINDOW = 1.0
"""Seconds over which CPU usage is averaged."""

OBSERVE_AHEAD = 1.25
"""Seconds before a deadline at which observations of a process begin, so that they fill a window."""

WORKING_RATE = 0.1
"""CPU seconds and seconds of waiting for a CPU, per second, from which on a process counts as working."""

RUNNABLE_SHARE = 0.5
"""Share of observations that find a process runnable, from which on it counts as working."""

SHORTAGE_RATE = 0.5
"""Seconds of waiting for a CPU, per second, from which on a process is short of CPU. Quire's own load stays below."""

LATE_SAMPLE = 1.0
"""Seconds between two samples, due every quarter of a second, from which on the process is short of CPU as well."""

SHORTAGE_MEMORY = 10.0
"""Seconds for which a shortage counts as recent: the load that caused it comes and goes."""


class CpuUsage(NamedTuple):
    """The CPU time that a process has used so far."""

    cpu_seconds: float
    wait_seconds: float  # seconds that its threads have waited for a CPU
    runnable: bool  # one of its threads is computing, waiting for a CPU or waiting for a disk


class Rate:
    """The growth of a total per second, from samples of the last window."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # (time, total); the first may be older than the window

    def add(self, total: float, now: float) -> None:
        """Take a sample. Times must not decrease."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        self._samples.append((now, total))

    def per_second(self, now: float) -> float | None:
        """Return the growth per second; None if the samples are old or span too short a time."""
        if not self._samples:
            return None
        (began, before), (last, total) = self._samples[0], self._samples[-1]
        if last - began < WINDOW / 2 or last < now - WINDOW:
            return None
        return (total - before) / (last - began)

    def reaches(self, threshold: float, now: float) -> bool:
        """Return whether the growth per second is known and at least `threshold`."""
        rate = self.per_second(now)
        return rate is not None and rate >= threshold


class CpuShortage:
    """Tells whether a process is or recently was short of CPU, from samples of its `ProcessStats.cpu_wait_seconds`.

    Samples are due every `HEARTBEAT_INTERVAL`.
    """

    def __init__(self) -> None:
        self._rate = Rate()
        self._last_sample: float | None = None  # its time
        self._last_short = -float("inf")  # when the process was last found short of CPU

    def add(self, wait_seconds: float, now: float) -> None:
        """Take a sample."""
        self._rate.add(wait_seconds, now)
        if self.sample_is_late(now) or self._rate.reaches(SHORTAGE_RATE, now):
            self._last_short = now
        self._last_sample = now

    def is_recent(self, now: float) -> bool:
        """Return whether the process is or recently was short of CPU."""
        return now - self._last_short <= SHORTAGE_MEMORY

    def sample_is_late(self, now: float) -> bool:
        """Return whether the next sample is late: the thread that takes it may be waiting for a CPU."""
        return self._last_sample is not None and now - self._last_sample >= LATE_SAMPLE


class Liveness:
    """A watcher's knowledge of one peer, which it last heard from at time `now`.

    `timeout` is the seconds of silence that mean death, `turn_timeout` the same for one turn of the peer's loop; None
    leaves that to the watcher's deadlines. `cpu_is_progress`: a turn that uses CPU time counts as working. `local`: the
    peer is a process of this host, and the watcher will `observe` it.
    """

    def __init__(
        self,
        timeout: float,
        now: float,
        *,
        turn_timeout: float | None = None,
        cpu_is_progress: bool = True,
        local: bool = False,
    ) -> None:
        self.last_heard = now
        self._timeout, self._turn_timeout = timeout, turn_timeout
        self._cpu_is_progress, self._local = cpu_is_progress, local
        self._busy_seconds = 0.0  # as of its last heartbeat
        self._cpu_seconds = 0.0  # as of its last heartbeat or observation
        self._wait_rate = Rate()  # of waiting for a CPU
        self._work_rate = Rate()  # of waiting for a CPU and of CPU time
        self._late_since: tuple[float, float] | None = None  # (time when it was first found late, its CPU seconds then)
        self._shortage = CpuShortage()
        self._last_observed = now
        self._runnable_seconds = 0.0  # for which it was observed to be runnable
        self._runnable_rate = Rate()
        self._ended = False  # whether the kernel has no such process

    def note_heartbeat(self, stats: ProcessStats, now: float) -> None:
        """Take a heartbeat of the peer."""
        self.last_heard = now
        self._busy_seconds = stats.busy_seconds
        self._shortage.add(stats.cpu_wait_seconds, now)
        if not self._local:
            self._add_usage(stats.cpu_seconds, stats.cpu_wait_seconds, now)

    def note_message(self, now: float) -> None:
        """Note that a message other than a heartbeat came from the peer."""
        self.last_heard = now

    def observe(self, usage: CpuUsage | None, now: float) -> None:
        """Take the kernel's numbers of the peer's process; None if there is no such process."""
        if usage is None:
            self._ended = True
            return
        if now - self._last_observed > WINDOW:  # earlier observations are too old to be averaged with this one
            self._wait_rate, self._work_rate, self._runnable_rate = Rate(), Rate(), Rate()
        elif usage.runnable:
            self._runnable_seconds += now - self._last_observed
        self._last_observed = now
        self._runnable_rate.add(self._runnable_seconds, now)
        self._add_usage(usage.cpu_seconds, usage.wait_seconds, now)

    def postpone(self, seconds: float) -> None:
        """Move the deadlines by the seconds for which the watcher itself stood still."""
        self.last_heard += seconds

    def should_observe(self, now: float, due: float = float("inf")) -> bool:
        """Return whether to observe the peer's process now, because a deadline is near."""
        deadline = min(self.last_heard + self._timeout, self._late_at(due, OBSERVE_AHEAD))
        return self._local and now >= deadline - OBSERVE_AHEAD

    def is_silent(self, now: float) -> bool:
        """Return whether nothing has come from the peer for the timeout, and it does not seem to work."""
        return now - self.last_heard > self._timeout and not self._works(now)

    def failure(self, now: float, *, due: float = float("inf"), missed: str = "", short_of_cpu: bool = False) -> str:
        """Return why the peer is dead; empty while it is not. Must be called often.

        `due` is the watcher's own deadline for the peer, and `missed` the text to return if the peer missed that.
        `short_of_cpu` tells whether the watcher is short of CPU.
        """
        silent_at, late_at = self.last_heard + self._timeout, self._late_at(due)
        if now <= min(silent_at, late_at):
            self._late_since = None
            return ""
        self._late_since = self._late_since or (now, self._cpu_seconds)
        if now > silent_at + self._extra_seconds(now, self._works(now), short_of_cpu):
            return f"silent for {now - self.last_heard:.1f} s"
        known_at = now if self._local else self.last_heard
        works = self._works(known_at) if self._cpu_is_progress else self._wait_rate.reaches(WORKING_RATE, known_at)
        unknown = self._work_rate.per_second(known_at) is None
        if now > late_at + self._extra_seconds(now, works, short_of_cpu or unknown):
            return missed if now > due else f"its loop stands still for {self._busy_seconds:.1f} s"
        return ""

    def _late_at(self, due: float, ahead: float = 0.0) -> float:
        """Return when the peer misses `due` or exceeds its turn, if it does the latter within `ahead` seconds."""
        if self._turn_timeout is None or self._busy_seconds + ahead <= self._turn_timeout:
            return due
        return min(due, self.last_heard - self._busy_seconds + self._turn_timeout)

    def _extra_seconds(self, now: float, works: bool, short_of_cpu: bool) -> float:
        """Return the seconds that the peer gets after a deadline that it missed."""
        if works:
            return STARVED_GRACE_PERIOD if self._is_starved(now) else GRACE_PERIOD
        if self._local:  # only observations count, but the watcher may not have made any yet
            excused = not self._ended and self._work_rate.per_second(now) is None
        else:
            excused = short_of_cpu or self._shortage.is_recent(self.last_heard)
        return GRACE_PERIOD if excused else 0.0

    def _works(self, now: float) -> bool:
        return self._work_rate.reaches(WORKING_RATE, now) or self._runnable_rate.reaches(RUNNABLE_SHARE, now)

    def _is_starved(self, now: float) -> bool:
        """Return whether the peer has hardly got a CPU since it was found late."""
        since, cpu_seconds = self._late_since or (now, self._cpu_seconds)
        return self._cpu_seconds - cpu_seconds < STARVED_RATE * (now - since)

    def _add_usage(self, cpu_seconds: float, wait_seconds: float, now: float) -> None:
        self._cpu_seconds = cpu_seconds
        self._wait_rate.add(wait_seconds, now)
        self._work_rate.add(cpu_seconds + wait_seconds, now)
