"""When a worker is late. Time is a parameter; nothing here reads a clock.

A worker that has plans is silent until a step is done, and is given `FACTOR` times what the step should take; one that
has none sends beats. A step's prediction comes from the speeds that the worker measured at its start, corrected by how
long its steps have really taken since (contexts grow, neighbours come).

On a CPU that others use too, a step may take any time. A worker on this host that is late but computes, by the CPU time
of its process (`Effort`), is therefore left alone for a while; one that is stopped or deadlocked uses none.
"""

from collections import deque
from typing import NamedTuple

from shared.protocol import Register

FACTOR = 8.0
"""A step is overdue after so many times its predicted duration."""

FIRST_STEP = 30.0
"""Seconds that the first step of an epoch gets at least: memory is touched and kernels are loaded in it."""

CONFIGURING = 60.0
"""Seconds in which a worker has to be ready after `Configure`: it allocates all KV memory then."""

SMOOTHING = 0.1
"""Weight of the last step in the moving average of real to predicted duration."""


INDULGENCE = 30.0
"""Seconds for which a step may be overdue if the worker's process is seen to compute: it may also be in a loop."""

WINDOW = 1.0
"""Seconds over which CPU time is watched."""

BUSY = 0.1
"""Share of one core from which on a process is said to compute."""


class Effort:
    """Whether a process computes, from samples of the CPU time that it has used so far, in seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # (time, CPU time), a little more than a window of them

    def note(self, used: float, now: float) -> None:
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        if not self._samples or now - self._samples[-1][0] >= WINDOW / 5:
            self._samples.append((now, used))

    def busy(self, used: float, now: float) -> bool:
        """Whether it did so over the last window; a shorter look at it proves nothing."""
        if not self._samples or self._samples[0][0] > now - WINDOW:
            return False
        began, before = self._samples[0]
        return used - before >= BUSY * (now - began)


class Pending(NamedTuple):
    """A plan that the worker has."""

    step: int
    predicted: float  # seconds
    sent: float  # time


class Liveness:
    """One worker's signs of life since it was configured at time `now`; `timeout` in seconds."""

    def __init__(self, worker: Register, timeout: float, now: float) -> None:
        self._step_seconds = max(worker.step_seconds, 0.0)
        self._token_seconds = max(worker.token_seconds, 0.0)
        self._timeout = timeout
        self._ratio = 1.0  # real to predicted
        self._pending: deque[Pending] = deque()
        self._heard = now
        self._warm = False
        self.ready = False  # it has answered `Configure`

    @property
    def awaited(self) -> int | None:
        """The step whose result comes next; None if the worker has nothing to do."""
        return self._pending[0].step if self._pending else None

    def sent(self, step: int, tokens: int, now: float) -> None:
        """A plan that computes so many tokens was sent."""
        self._pending.append(Pending(step, self._step_seconds + tokens * self._token_seconds, now))

    def beat(self, now: float) -> None:
        """The worker said that it is there."""
        self._heard = now
        self.ready = True

    def returned(self, seconds: float, now: float) -> None:
        """The awaited step is done; the worker spent `seconds` on it."""
        self.beat(now)
        predicted = self._pending.popleft().predicted
        if self._warm and predicted > 0:
            self._ratio += SMOOTHING * (seconds / predicted - self._ratio)
        self._warm = True

    def forgive(self, seconds: float) -> None:
        """It was the scheduler that slept: move all that was noted by so much."""
        self._heard += seconds
        self._pending = deque(plan._replace(sent=plan.sent + seconds) for plan in self._pending)

    def deadline(self) -> float:
        """Time until which the worker has to be heard."""
        if not self.ready:
            return self._heard + CONFIGURING
        if not self._pending:
            return self._heard + self._timeout
        least = self._timeout if self._warm else max(self._timeout, FIRST_STEP)
        return self._since + max(least, FACTOR * self._pending[0].predicted * max(self._ratio, 1.0))

    def fault(self, now: float, *, busy: bool = False) -> str:
        """What a late worker is late with; empty while it is not, or while there is an excuse: it is `busy`."""
        excused = INDULGENCE if busy and self._pending and self.ready else 0.0
        if now <= self.deadline() + excused:
            return ""
        if not self.ready:
            return f"not configured within {CONFIGURING:.0f} s"
        what = "busy with one step" if self._pending else "silent"
        return f"{what} for {now - self._since:.1f} s"

    @property
    def _since(self) -> float:
        """When the worker began with what it does, as far as can be seen from here."""
        return max(self._heard, self._pending[0].sent) if self._pending else self._heard
