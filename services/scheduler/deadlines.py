"""`Deadlines`: the times by which the active worker has to have answered. Nothing here reads a clock.

A step may take `FACTOR` times what it should, and the timeout at least. Its prediction comes from the speeds that the
worker measured at its start, corrected by how long its steps have really taken since (contexts grow, neighbours come).
Whether a worker that is late is also dead is `shared.liveness`' to say.
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


class Pending(NamedTuple):
    """A plan that the worker has."""

    step: int
    predicted: float  # seconds
    sent: float  # time


class Deadlines:
    """The answers that one worker owes since it was configured at time `now`; `timeout` in seconds."""

    def __init__(self, worker: Register, timeout: float, now: float) -> None:
        self._step_seconds = max(worker.step_seconds, 0.0)
        self._token_seconds = max(worker.token_seconds, 0.0)
        self._timeout = timeout
        self._ratio = 1.0  # real to predicted
        self._pending: deque[Pending] = deque()
        self._answered = now  # when it last did what was awaited of it
        self._warm = False
        self.ready = False  # it has answered `Configure`

    @property
    def awaited(self) -> int | None:
        """The step whose result comes next; None if the worker has nothing to do."""
        return self._pending[0].step if self._pending else None

    def configured(self, now: float) -> None:
        """The worker has answered `Configure`."""
        self._answered = now
        self.ready = True

    def sent(self, step: int, tokens: int, now: float) -> None:
        """A plan that computes so many tokens was sent."""
        self._pending.append(Pending(step, self._step_seconds + tokens * self._token_seconds, now))

    def returned(self, seconds: float, now: float) -> None:
        """The awaited step is done; the worker spent `seconds` on it."""
        self._answered = now
        predicted = self._pending.popleft().predicted
        if self._warm and predicted > 0:
            self._ratio += SMOOTHING * (seconds / predicted - self._ratio)
        self._warm = True

    def forgive(self, seconds: float) -> None:
        """Move all times by so many seconds, for which the scheduler itself stood still."""
        self._answered += seconds
        self._pending = deque(plan._replace(sent=plan.sent + seconds) for plan in self._pending)

    def due(self) -> float:
        """Return the time by which the worker has to have answered; infinity if nothing is awaited."""
        if not self.ready:
            return self._answered + CONFIGURING
        if not self._pending:
            return float("inf")
        least = self._timeout if self._warm else max(self._timeout, FIRST_STEP)
        return self._since + max(least, FACTOR * self._pending[0].predicted * max(self._ratio, 1.0))

    def what(self, now: float) -> str:
        """Say what is awaited."""
        if not self.ready:
            return f"not configured within {CONFIGURING:.0f} s"
        return f"busy with one step for {now - self._since:.1f} s"

    @property
    def _since(self) -> float:
        """When the worker began with the awaited step, as far as can be seen from here."""
        return max(self._answered, self._pending[0].sent) if self._pending else self._answered
