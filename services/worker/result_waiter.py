"""`ResultWaiter`: waits for launched steps in a thread, so that the worker's loop never does.

While the device computes a step, the loop can launch the next one. Results come in the order of the steps, over a
socket within the process: zmq's sockets stay with their threads, and the loop polls this one beside the others.

The ranks of a group wait for each other when they begin an epoch, and on a CPU in each step. They do that in this
thread too, so the loop hears that a rank or the scheduler is gone.
"""

import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import zmq

from shared.protocol import Configure, Configured, StepPlan, StepResult

_numbers = itertools.count()

Request: TypeAlias = StepPlan | Configure


class Failure(NamedTuple):
    """A request without a result."""

    request: Request
    error: Exception


Result: TypeAlias = StepResult | Configured | Failure


class ResultWaiter:
    """The requests of one connection that have no result yet. Its thread starts with the first."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self._context = context
        self._address = f"inproc://results-{next(_numbers)}"
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(self._address)
        self._requests: SimpleQueue[tuple[Request, Callable[[], StepResult | Configured]] | None] = SimpleQueue()
        self._results: SimpleQueue[Result] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_pending = 0

    def add(self, request: Request, result: Callable[[], StepResult | Configured]) -> None:
        """Call `result` in the thread, after those that were added before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="results", daemon=True)
            self._thread.start()
        self.num_pending += 1
        self._requests.put((request, result))

    def take(self) -> Result:
        """Return the oldest result. Call it once when `socket` has something to read."""
        self.socket.recv()
        self.num_pending -= 1
        return self._results.get()

    def end(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait for the results that are left. Return whether they came in time."""
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Wait for the results that are left, and drop them."""
        self.end()
        self.socket.close(linger=0)

    def _run(self) -> None:
        with self._context.socket(zmq.PUSH) as socket:
            socket.connect(self._address)
            while (item := self._requests.get()) is not None:
                request, result = item
                try:
                    self._results.put(result())
                except Exception as error:
                    self._results.put(Failure(request, error))
                socket.send(b"")
            socket.close(linger=0)
