"""`ResultWaiter`: waits for launched steps in a thread, so that the worker's loop never does.

While the device computes a step, the loop can launch the next one. Results come in the order of the steps, over a
socket within the process: zmq's sockets stay with their threads, and the loop polls this one beside the others.
"""

import itertools
import threading
from queue import SimpleQueue
from typing import Any, NamedTuple

import zmq

from services.worker.interface import PendingStep
from shared.protocol import StepPlan, StepResult

_numbers = itertools.count()


class FailedStep(NamedTuple):
    """A step without a result."""

    plan: StepPlan
    error: Exception


class ResultWaiter:
    """The steps of one connection that were launched and have no result yet. Its thread starts with the first."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self._context = context
        self._address = f"inproc://results-{next(_numbers)}"
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(self._address)
        self._steps: SimpleQueue[tuple[StepPlan, PendingStep] | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | FailedStep] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_pending = 0

    def add(self, plan: StepPlan, step: PendingStep) -> None:
        """Wait for the step of `plan`, after those that were added before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="results", daemon=True)
            self._thread.start()
        self.num_pending += 1
        self._steps.put((plan, step))

    def take(self) -> StepResult | FailedStep:
        """Return the result of the oldest step. Call it once when `socket` has something to read."""
        self.socket.recv()
        self.num_pending -= 1
        return self._results.get()

    def close(self) -> None:
        """Wait for the steps that are left, and drop their results."""
        self._steps.put(None)
        if self._thread is not None:
            self._thread.join()
        self.socket.close(linger=0)

    def _run(self) -> None:
        with self._context.socket(zmq.PUSH) as socket:
            socket.connect(self._address)
            while (item := self._steps.get()) is not None:
                plan, step = item
                try:
                    self._results.put(step.result())
                except Exception as error:
                    self._results.put(FailedStep(plan, error))
                socket.send(b"")
            socket.close(linger=0)
