"""`Liveness`: the one rule by which worker, scheduler and gateway are found dead. Time is a parameter.

A thread in each process reports how it is doing (`ProcessStats`, see `shared.reporter`), and its peers judge by that:

- It is *silent* if nothing was heard of it for the timeout.
- It *hangs* if beats come but its loop has stood still for the timeout, or is late with what its judge awaits of it.

Either one is dead, unless there is an excuse: a sign that it works or waits for a CPU. Then it is dead `INDULGENCE`
seconds later, for it may also be in a loop, or `FAMINE` seconds later, while it wants a CPU and hardly gets one. For a
process on the judge's own host the kernel gives such signs (`look`), and nothing else counts: one that is stopped, or
in a deadlock, neither computes nor could. Of others only beats tell: they show work while they come, and one that was
short of CPU when it was last heard of, or whose judge is, may well be unable to say a word.
"""

from collections import deque
from typing import NamedTuple

from shared.protocol import ProcessStats

GATEWAY_PATIENCE = 10.0
"""Seconds after which a scheduler gives up a gateway that sends nothing, or takes nothing, and aborts its requests."""

STANDSTILL = 1.0
"""Seconds for which a judge's own loop may stand still before it forgives its peers what it did not hear."""

INDULGENCE = 25.0
"""Seconds for which an excuse counts: with the usual timeouts, a hang is found within half a minute at worst."""

FAMINE = 240.0
"""The same for one that hardly gets a CPU: a step may take a hundred times as long then."""

SCARCE = 0.05
"""CPU seconds a second: a process that wants more and gets less hardly gets a CPU. Among twenty equals it gets more."""

WINDOW = 1.0
"""Seconds over which use of CPUs is watched."""

LOOK_AHEAD = 1.25
"""Seconds before a deadline at which looks at a process have to begin, so that they fill a window."""

BUSY = 0.1
"""CPU seconds, and seconds of waiting for a CPU, a second: from which on a process counts as working."""

RUNNABLE = 0.5
"""Share of looks that find a process runnable, from which on it counts as working."""

STARVED = 0.5
"""Seconds of waiting for a CPU a second, from which on a process is short of it. Quire's own load stays below."""

GAP = 1.0
"""Seconds between two samples that are due each quarter of a second: a process that is so late is short of CPU too."""

MEMORY = 10.0
"""Seconds for which a shortage is remembered: the load that caused it comes and goes."""


class Usage(NamedTuple):
    """The CPU time that a process has used so far."""

    cpu: float  # seconds
    delayed: float  # seconds that its threads were kept waiting for a CPU
    runnable: bool  # a thread of it is computing, waiting for a CPU, or waiting for a disk


class Rate:
    """The growth of a sum a second, from samples of the last window."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # (time, sum); the first may be older than the window

    def note(self, total: float, now: float) -> None:
        """Take a sample; times don't go backwards."""
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        self._samples.append((now, total))

    def per_second(self, now: float) -> float | None:
        """Growth a second; None if the samples are old, or span too short a time to say anything."""
        if not self._samples:
            return None
        (began, before), (last, total) = self._samples[0], self._samples[-1]
        if last - began < WINDOW / 2 or last < now - WINDOW:
            return None
        return (total - before) / (last - began)

    def reaches(self, share: float, now: float) -> bool:
        """Return whether it is known to grow by so much a second."""
        found = self.per_second(now)
        return found is not None and found >= share


class Shortage:
    """A process's shortage of CPU, now or lately, by samples of its `ProcessStats.delayed`, due each `BEAT`."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._last: float | None = None  # time of the last sample
        self._seen = -float("inf")  # when it was short last

    def note(self, delayed: float, now: float) -> None:
        """Take a sample."""
        self._rate.note(delayed, now)
        late = self._last is not None and now - self._last >= GAP
        if late or self._rate.reaches(STARVED, now):
            self._seen = now
        self._last = now

    def remembered(self, now: float) -> bool:
        """Return whether it is or lately was."""
        return now - self._seen <= MEMORY

    def overdue(self, now: float) -> bool:
        """Return whether the next sample is late: the thread that takes it may be waiting for a CPU."""
        return self._last is not None and now - self._last >= GAP


class Liveness:
    """One peer, heard of at time `now`.

    `timeout`: seconds of silence that mean death. `turn`: the same for one turn of its loop; None if its judge knows
    better. `computes`: that a turn uses CPU time is a sign of progress. `local`: the judge will `look` at it.
    """

    def __init__(
        self, timeout: float, now: float, *, turn: float | None = None, computes: bool = True, local: bool = False
    ) -> None:
        self.heard = now
        self._timeout, self._turn = timeout, turn
        self._computes, self._local = computes, local
        self._busy = 0.0  # by its last beat
        self._cpu = 0.0  # seconds, by its last beat or the last look
        self._wait, self._work = Rate(), Rate()  # waiting for a CPU; that and CPU time
        self._found_late: tuple[float, float] | None = None  # when it was first, and its CPU time then
        self._shortage = Shortage()
        self._looked = now
        self._ready, self._readiness = 0.0, Rate()  # seconds for which it was seen to be runnable
        self._gone = False

    def beat(self, vitals: ProcessStats, now: float) -> None:
        """Take a beat of the peer."""
        self.heard = now
        self._busy = vitals.busy_seconds
        self._shortage.note(vitals.cpu_wait_seconds, now)
        if not self._local:
            self._note(vitals.cpu_seconds, vitals.cpu_wait_seconds, now)

    def hear(self, now: float) -> None:
        """Note that it said something else."""
        self.heard = now

    def look(self, usage: Usage | None, now: float) -> None:
        """Take what the judge saw of its process; None if there is no such process."""
        if usage is None:
            self._gone = True
            return
        if now - self._looked > WINDOW:  # what was seen before says nothing of now
            self._wait, self._work, self._readiness = Rate(), Rate(), Rate()
        elif usage.runnable:
            self._ready += now - self._looked
        self._looked = now
        self._readiness.note(self._ready, now)
        self._note(usage.cpu, usage.delayed, now)

    def forgive(self, seconds: float) -> None:
        """Take back so many seconds of silence, for which the judge itself stood still."""
        self.heard += seconds

    def wants_look(self, now: float, due: float = float("inf")) -> bool:
        """Return whether a look at its process is worthwhile: a deadline is near."""
        return self._local and now >= min(self.heard + self._timeout, self._late(due, LOOK_AHEAD)) - LOOK_AHEAD

    def silent(self, now: float) -> bool:
        """Return whether nothing is heard of it, and as far as can be seen it does nothing."""
        return now - self.heard > self._timeout and not self._works(now)

    def fault(self, now: float, *, due: float = float("inf"), what: str = "", short_of_cpu: bool = False) -> str:
        """Return why it is dead; empty while it is not. Call it often.

        `due`: when it is late with `what` its judge awaits of it. `short_of_cpu`: the judge itself is.
        """
        silence, late = self.heard + self._timeout, self._late(due)
        if now <= min(silence, late):
            self._found_late = None
            return ""
        self._found_late = self._found_late or (now, self._cpu)
        if now > silence + self._excuse(now, self._works(now), short_of_cpu):
            return f"silent for {now - self.heard:.1f} s"
        known = now if self._local else self.heard
        works = self._works(known) if self._computes else self._wait.reaches(BUSY, known)
        if now > late + self._excuse(now, works, short_of_cpu):
            return what if now > due else f"its loop stands still for {self._busy:.1f} s"
        return ""

    def _late(self, due: float, ahead: float = 0.0) -> float:
        """Return when it is late with its turn or with what is awaited of it, if not now then `ahead` seconds on."""
        if self._turn is None or self._busy + ahead <= self._turn:
            return due
        return min(due, self.heard - self._busy + self._turn)

    def _excuse(self, now: float, works: bool, short_of_cpu: bool) -> float:
        """Return the seconds that it has beyond a deadline that it missed."""
        if works:
            return FAMINE if self._starves(now) else INDULGENCE
        if self._local:  # nothing but looks counts, but there have to be some
            excused = not self._gone and self._work.per_second(now) is None
        else:
            excused = short_of_cpu or self._shortage.remembered(self.heard)
        return INDULGENCE if excused else 0.0

    def _works(self, now: float) -> bool:
        return self._work.reaches(BUSY, now) or self._readiness.reaches(RUNNABLE, now)

    def _starves(self, now: float) -> bool:
        """Return whether it has hardly got a CPU since it was found late."""
        found, cpu = self._found_late or (now, self._cpu)
        return self._cpu - cpu < SCARCE * (now - found)

    def _note(self, cpu: float, delayed: float, now: float) -> None:
        self._cpu = cpu
        self._wait.note(delayed, now)
        self._work.note(cpu + delayed, now)
