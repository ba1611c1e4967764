"""`AdapterLoader`: reads adapters in a thread, so that steps go on meanwhile.

Answers come over a socket within the process, as those of `ResultWaiter` do: the loop polls it beside the others.
"""

import itertools
import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

import zmq

from services.worker.interface import Runner
from shared.errors import QuireError
from shared.protocol import AdapterLoaded, AdapterRefused, LoadAdapter

logger = logging.getLogger(__name__)

_numbers = itertools.count()


class _Answer(NamedTuple):
    generation: int
    message: AdapterLoaded | AdapterRefused


class AdapterLoader:
    """Loads and unloads the adapters of one connection in `thread`, in the order in which it is told to."""

    def __init__(self, context: "zmq.Context[Any]", runner: Runner, thread: ThreadPoolExecutor) -> None:
        self._context, self._runner, self._thread = context, runner, thread
        self._address = f"inproc://adapters-{next(_numbers)}"
        self.socket = context.socket(zmq.PULL)
        self.socket.bind(self._address)
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._generation = 0  # how often all was forgotten
        self._pending: list[Future[None]] = []

    def load(self, message: LoadAdapter) -> None:
        """Load an adapter. `take` returns the answer."""
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._thread.submit(self._load, message, self._generation))

    def unload(self, adapter: int) -> None:
        """Unload an adapter, after it was loaded."""
        self._thread.submit(self._runner.unload_adapter, adapter)

    def take(self) -> AdapterLoaded | AdapterRefused | None:
        """Return the oldest answer, or None if it was forgotten. Call it once when `socket` has something to read."""
        self.socket.recv()
        generation, message = self._answers.get()
        return message if generation == self._generation else None

    def forget(self) -> None:
        """Wait for the adapter that is being loaded, and forget it, all that wait, and all answers."""
        for future in self._pending:
            future.cancel()
        wait(self._pending)
        self._generation += 1

    def close(self) -> None:
        """Wait for the adapter that is being loaded, and forget the others and all answers."""
        self.forget()
        self.socket.close(linger=0)

    def _load(self, message: LoadAdapter, generation: int) -> None:
        self._answers.put(_Answer(generation, self._answer(message)))
        with self._context.socket(zmq.PUSH) as socket:
            socket.connect(self._address)
            socket.send(b"")

    def _answer(self, message: LoadAdapter) -> AdapterLoaded | AdapterRefused:
        try:
            digest = self._runner.load_adapter(message.adapter, message.path)
        except QuireError as error:
            logger.warning("an adapter is refused: %s", error)
            return AdapterRefused(message.adapter, str(error))
        except Exception as error:  # it must be answered, or requests would wait for it for ever
            logger.exception("the adapter in %s cannot be loaded", message.path)
            return AdapterRefused(message.adapter, f"{message.path}: {type(error).__name__}: {error}")
        logger.info("loaded the adapter in %s", message.path)
        return AdapterLoaded(message.adapter, digest)
