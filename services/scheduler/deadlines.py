"""`Deadlines`: the times by which the active worker has to answer. Time is a parameter.

A step may take `STEP_FACTOR` times its predicted duration, and the timeout at least. The prediction comes from the
speeds that the worker measured when it started, corrected by the duration of its steps since: contexts grow, and other
processes start. `shared.liveness` decides whether a worker that is overdue is also dead.

The planner has another estimate (core/step_time.py), which shall be right on average. This one shall not be too short:
it never falls below what was measured at the start, and one step may raise it by any factor.
"""

from collections import deque
from typing import NamedTuple

from services.scheduler.config import WorkerCapacity

STEP_FACTOR = 8.0
"""Multiple of its predicted duration after which a step is overdue."""

FIRST_STEP_TIMEOUT = 30.0
"""Minimum seconds for the first step of an epoch, which touches memory and loads kernels."""

CONFIGURE_TIMEOUT = 60.0
"""Seconds for the answer to `Configure`: the worker allocates all KV memory, and a GPU's launches each of its kernels,
which compiles those that no cache has, and captures its graphs.
"""

SMOOTHING = 0.1
"""Weight of the last step in the moving average of actual to predicted duration."""


class SentStep(NamedTuple):
    """A step that the worker has not answered."""

    step: int
    predicted: float  # seconds
    sent_at: float  # time


class Deadlines:
    """The answers that one worker owes. It was sent `Configure` at time `now`; `timeout` is in seconds.

    `worker` has the measured speeds: of its whole group, if it is a rank of one, since it waits for the others.
    """

    def __init__(self, worker: WorkerCapacity, timeout: float, now: float) -> None:
        self._step_seconds = max(worker.step_seconds, 0.0)
        self._token_seconds = max(worker.token_seconds, 0.0)
        self._timeout = timeout
        self._ratio = 1.0  # of actual to predicted duration
        self._sent: deque[SentStep] = deque()
        self._last_answer = now  # time of the last awaited answer, or of `Configure`
        self._warm = False  # whether a step of this epoch is done
        self.ready = False  # whether the worker has answered `Configure`

    @property
    def awaited_step(self) -> int | None:
        """The step whose result comes next; None if the worker has nothing to do."""
        return self._sent[0].step if self._sent else None

    def note_configured(self, now: float) -> None:
        """Note that the worker has answered `Configure`."""
        self._last_answer = now
        self.ready = True

    def note_sent(self, step: int, tokens: int, now: float) -> None:
        """Note that a step of `tokens` tokens was sent."""
        self._sent.append(SentStep(step, self._step_seconds + tokens * self._token_seconds, now))

    def note_result(self, seconds: float, now: float) -> None:
        """Note that the awaited step is done. The worker spent `seconds` on it."""
        self._last_answer = now
        predicted = self._sent.popleft().predicted
        if self._warm and predicted > 0:
            self._ratio += SMOOTHING * (seconds / predicted - self._ratio)
        self._warm = True

    def postpone(self, seconds: float) -> None:
        """Move all times by the seconds for which the scheduler itself stood still."""
        self._last_answer += seconds
        self._sent = deque(sent._replace(sent_at=sent.sent_at + seconds) for sent in self._sent)

    def due(self) -> float:
        """Return the time by which the worker has to answer; infinity if no answer is awaited."""
        if not self.ready:
            return self._last_answer + CONFIGURE_TIMEOUT
        if not self._sent:
            return float("inf")
        timeout = self._timeout if self._warm else max(self._timeout, FIRST_STEP_TIMEOUT)
        return self.began + max(timeout, STEP_FACTOR * self._sent[0].predicted * max(self._ratio, 1.0))

    def describe_overdue(self, now: float) -> str:
        """Return a text that names the awaited answer, and for how long it has been awaited."""
        if not self.ready:
            return f"not configured within {CONFIGURE_TIMEOUT:.0f} s"
        return f"busy with one step for {now - self.began:.1f} s"

    @property
    def began(self) -> float:
        """The estimated time when the worker began the awaited step."""
        return max(self._last_answer, self._sent[0].sent_at) if self._sent else self._last_answer
