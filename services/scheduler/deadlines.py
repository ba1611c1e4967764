"""`Deadlines`: the times by which the active worker has to have answered. Nothing here reads a clock.

A step may take `STEP_FACTOR` times its predicted duration, and the timeout at least. The prediction comes from the
speeds that the worker measured when it started, corrected by how long its steps have taken since: contexts grow, and
other processes come. `shared.liveness` decides whether a worker that is overdue is also dead.
"""

from collections import deque
from typing import NamedTuple

from shared.protocol import Register

STEP_FACTOR = 8.0
"""A step is overdue after so many times its predicted duration."""

FIRST_STEP_TIMEOUT = 30.0
"""Seconds that the first step of an epoch gets at least: it touches memory and loads kernels."""

CONFIGURE_TIMEOUT = 60.0
"""Seconds in which a worker has to answer `Configure`: it allocates all KV memory then."""

SMOOTHING = 0.1
"""Weight of the last step in the moving average of actual to predicted duration."""


class SentStep(NamedTuple):
    """A step that the worker has not answered."""

    step: int
    predicted: float  # seconds
    sent_at: float  # time


class Deadlines:
    """The answers that one worker owes. It was sent `Configure` at time `now`; `timeout` is in seconds."""

    def __init__(self, worker: Register, timeout: float, now: float) -> None:
        self._step_seconds = max(worker.step_seconds, 0.0)
        self._token_seconds = max(worker.token_seconds, 0.0)
        self._timeout = timeout
        self._ratio = 1.0  # of actual to predicted duration
        self._sent: deque[SentStep] = deque()
        self._last_answer = now  # when the worker last did what was awaited of it, or was configured
        self._warm = False  # a step of this epoch is done
        self.ready = False  # it has answered `Configure`

    @property
    def awaited_step(self) -> int | None:
        """The step whose result comes next; None if the worker has nothing to do."""
        return self._sent[0].step if self._sent else None

    def note_configured(self, now: float) -> None:
        """The worker has answered `Configure`."""
        self._last_answer = now
        self.ready = True

    def note_sent(self, step: int, tokens: int, now: float) -> None:
        """A step that computes so many tokens was sent."""
        self._sent.append(SentStep(step, self._step_seconds + tokens * self._token_seconds, now))

    def note_result(self, seconds: float, now: float) -> None:
        """The awaited step is done; the worker spent `seconds` on it."""
        self._last_answer = now
        predicted = self._sent.popleft().predicted
        if self._warm and predicted > 0:
            self._ratio += SMOOTHING * (seconds / predicted - self._ratio)
        self._warm = True

    def postpone(self, seconds: float) -> None:
        """Move all times by so many seconds, for which the scheduler itself stood still."""
        self._last_answer += seconds
        self._sent = deque(sent._replace(sent_at=sent.sent_at + seconds) for sent in self._sent)

    def due(self) -> float:
        """Return the time by which the worker has to have answered; infinity if nothing is awaited."""
        if not self.ready:
            return self._last_answer + CONFIGURE_TIMEOUT
        if not self._sent:
            return float("inf")
        timeout = self._timeout if self._warm else max(self._timeout, FIRST_STEP_TIMEOUT)
        return self._began + max(timeout, STEP_FACTOR * self._sent[0].predicted * max(self._ratio, 1.0))

    def describe_overdue(self, now: float) -> str:
        """Return a text that says what is awaited, and for how long."""
        if not self.ready:
            return f"not configured within {CONFIGURE_TIMEOUT:.0f} s"
        return f"busy with one step for {now - self._began:.1f} s"

    @property
    def _began(self) -> float:
        """The time when the worker began the awaited step, as far as can be seen from here."""
        return max(self._last_answer, self._sent[0].sent_at) if self._sent else self._last_answer
