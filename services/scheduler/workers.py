"""`Workers`: the registered workers, the one that computes, and whether that is alive. It knows no queue of requests.

One worker computes; others that registered wait in line to replace it. A worker is configured at most once on a
connection: after a loss it registers again, so that no result can be taken for that of another plan.

The active worker is lost when its connection ends (which is seen within milliseconds), when it sends a `Fault`, when
`shared.liveness` finds it dead, or when it sends something that is not a message. In the last two cases its process may
still run: it is killed if it is on this host, and told to stop otherwise.

A worker that is told to end says so by `Leave`. The active one computes what it is sent until `release`, which the
service calls between two steps, so that nothing is lost.
"""

import logging
from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from services.scheduler.deadlines import Deadlines
from services.scheduler.registration import Registration, incompatibility
from shared.errors import ProtocolError
from shared.protocol import (
    AdapterLoaded,
    AdapterRefused,
    Configure,
    Configured,
    Epoch,
    Fault,
    Heartbeat,
    Leave,
    LoadAdapter,
    Register,
    StepPlan,
    StepResult,
    Stop,
    UnloadAdapter,
    decode_from_worker,
    encode,
)
from shared.transport import DropReason, Listener, Message, PeerGone, PeerSlow, printable_identity

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 0.1
"""Minimum seconds between two checks of whether the active worker is overdue."""

MAX_TURN_MESSAGES = 64
"""Maximum number of workers' messages that are read in one turn. A worker that computes has a few waiting, and libzmq
reads from all connections in turns, so a flood from others does not hold it up."""

MAX_WORKERS = 64
"""Workers that are registered at a time: one computes and the others are spares."""


class WorkerLost(Struct, frozen=True):
    """The active worker computes no more; what it had in flight is lost."""

    out_of_memory: bool = False  # its device had too little memory for a step
    seconds: float = 0.0  # since its last sign of life; what shows at once that it is lost, is one


class WorkerReady(Struct, frozen=True):
    """The active worker has answered `Configure`."""


class WorkerResult(Struct, frozen=True):
    """The result of the oldest plan that was sent, and the message in which it came."""

    result: StepResult
    encoded: bytes


class WorkerAdapter(Struct, frozen=True):
    """The active worker has answered `LoadAdapter`."""

    answer: AdapterLoaded | AdapterRefused


WorkerEvent: TypeAlias = WorkerResult | WorkerReady | WorkerLost | WorkerAdapter


class ActiveWorker(Struct):
    """The worker that computes."""

    worker: Registration
    epoch: Epoch
    deadlines: Deadlines
    leaving_since: float | None = None  # when it said that it was told to end

    def overdue(self, now: float, short_of_cpu: bool) -> str:
        """Return why the worker is dead; empty while it is not. Must be called often.

        `short_of_cpu` tells whether the scheduler is short of CPU.
        """
        due, missed = self.deadlines.due(), self.deadlines.describe_overdue(now)
        self.worker.observe_process(now, due)
        return self.worker.liveness.failure(now, due=due, missed=missed, short_of_cpu=short_of_cpu)

    def seconds_since_sign(self, now: float) -> float:
        """Return for how long the worker has not shown that it works: since it began an overdue step, if it has one."""
        return now - (self.deadlines.began if now > self.deadlines.due() else self.worker.liveness.last_heard)


class Workers:
    """The workers' side of the scheduler.

    A worker is given up after `timeout` seconds of silence. `short_of_cpu` tells whether the scheduler is short of CPU.
    """

    def __init__(self, listener: Listener, timeout: float, short_of_cpu: Callable[[float], bool]) -> None:
        self._listener = listener
        self._timeout = timeout
        self._short_of_cpu = short_of_cpu
        self._registered: dict[bytes, Registration] = {}  # in order of arrival, the active one included
        self._active: ActiveWorker | None = None
        self._events: list[WorkerEvent] = []
        self._next_check = 0.0

    @property
    def ready(self) -> bool:
        """True if plans can be sent."""
        return self._active is not None and self._active.deadlines.ready

    def progressing(self, now: float) -> bool:
        """Return whether plans can be sent and the worker is not silent."""
        active = self._active
        return active is not None and active.deadlines.ready and not active.worker.liveness.is_silent(now)

    @property
    def candidate(self) -> Register | None:
        """The worker to configure next, if one is needed and has registered."""
        loss_untold = bool(self._events)  # after `give_up`: the former epoch must end before the next one begins
        if self._active is not None or loss_untold or not self._registered:
            return None
        return next(iter(self._registered.values())).register

    @property
    def leaving_since(self) -> float | None:
        """The time when the active worker said that it was told to end; None if it has not."""
        return None if self._active is None else self._active.leaving_since

    @property
    def has_spare(self) -> bool:
        """True if another worker waits in line."""
        return len(self._registered) > (self._active is not None)

    @property
    def settled(self) -> bool:
        """True if no result of the active worker is awaited."""
        return self._active is None or self._active.deadlines.awaited_step is None

    def receive(self, now: float) -> list[WorkerEvent]:
        """Read messages, and return the active worker's events since the last call, in order."""
        disconnected = self._take_disconnected()
        for _ in range(MAX_TURN_MESSAGES):
            message = self._listener.receive()
            if message is None:
                break
            self._handle(message, now)
        self._remove_disconnected(disconnected)  # after the messages that they sent last
        if now >= self._next_check:
            self._next_check = now + CHECK_INTERVAL
            self._check(now)
        events, self._events = self._events, []
        return events

    def configure(self, message: Configure, now: float) -> None:
        """Make the candidate the active worker. If it cannot be reached, `receive` will return that it is lost."""
        worker = next(iter(self._registered.values()))
        worker.liveness.note_message(now)  # its silence does not count while it waits in line
        self._active = ActiveWorker(worker, message.epoch, Deadlines(worker.register, self._timeout, now))
        self._send(worker.identity, message)

    def send(self, plan: StepPlan, encoded: bytes, now: float) -> None:
        """Hand a plan to the active worker, as the message `encoded`.

        If it cannot be reached, `receive` will return that it is lost.
        """
        if self._active is not None:
            self._active.deadlines.note_sent(plan.step, sum(row.count for row in plan.rows), now)
            self._send_encoded(self._active.worker.identity, encoded)

    def send_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Hand a message about an adapter to the active worker, before the plans that are sent later."""
        if self._active is not None:
            self._send(self._active.worker.identity, message)

    def give_up(self, reason: str) -> None:
        """End the process of the active worker. `receive` will return that it is lost."""
        if self._active is not None:
            self._terminate(self._active.worker, reason)

    def release(self) -> None:
        """Tell the active worker to stop, and forget it. It owes no result, so it is not lost."""
        if self._active is not None:
            self._let_go(self._active.worker)
            self._active = None

    def dismiss(self, reason: str) -> None:
        """Tell the candidate to stop, and forget it."""
        worker = next(iter(self._registered.values()))
        self._remove(worker, reason)
        self._send(worker.identity, Stop())

    def postpone(self, seconds: float) -> None:
        """Move all deadlines by the seconds for which the scheduler itself stood still."""
        if self._active is not None:
            self._active.worker.liveness.postpone(seconds)
            self._active.deadlines.postpone(seconds)

    def _check(self, now: float) -> None:
        if self._active is not None and (reason := self._active.overdue(now, self._short_of_cpu(now))):
            self._terminate(self._active.worker, reason, self._active.seconds_since_sign(now))

    def _handle(self, message: Message, now: float) -> None:
        worker = self._registered.get(message.peer)
        body = message.body
        try:
            content = decode_from_worker(body)
        except ProtocolError as error:
            self._listener.reject(message)
            logger.error("worker %s: %s", printable_identity(message.peer), error)
            if worker is not None:
                self._terminate(worker, "it sent something that is not a message")
            else:  # it may be a `Register` with a number out of range, whose sender waits for an answer
                self._send(message.peer, Stop())
            return
        if isinstance(content, Register):
            self._register(message, content, now)
        elif isinstance(content, Heartbeat):
            if (sender := self._registered.get(content.identity.encode())) is not None:
                sender.liveness.note_heartbeat(content.process, now)
            else:
                self._drop(DropReason.UNKNOWN_SENDER)
        elif isinstance(content, Leave):
            self._note_leaving(worker, now)
        elif self._active is None or worker is not self._active.worker:
            self._drop(DropReason.UNKNOWN_SENDER if worker is None else DropReason.UNEXPECTED)
            logger.debug("a message of %s came too late", printable_identity(message.peer))
        elif isinstance(content, Fault):
            logger.error("worker %r failed in step %d:\n%s", worker, content.step, content.detail.rstrip())
            self._remove(worker, "it failed", out_of_memory=content.out_of_memory)  # its process ends by itself
        else:
            self._handle_answer(self._active, content, body, now)

    def _note_leaving(self, worker: Registration | None, now: float) -> None:
        if worker is None:
            self._drop(DropReason.UNKNOWN_SENDER)
        elif self._active is None or worker is not self._active.worker:
            self._let_go(worker)  # it waits in line and computes nothing
        elif self._active.leaving_since is None:
            logger.info("worker %r was told to end", worker)
            self._active.leaving_since = now

    def _let_go(self, worker: Registration) -> None:
        """Tell a worker that wants to end to stop, and forget it."""
        logger.info("worker %r leaves", worker)
        del self._registered[worker.identity]
        worker.close()
        self._send(worker.identity, Stop())

    def _handle_answer(
        self,
        active: ActiveWorker,
        answer: Configured | StepResult | AdapterLoaded | AdapterRefused,
        encoded: bytes,
        now: float,
    ) -> None:
        active.worker.liveness.note_message(now)
        deadlines = active.deadlines
        match answer:
            case Configured(epoch=active.epoch) if not deadlines.ready:
                deadlines.note_configured(now)
                self._events.append(WorkerReady())
            case StepResult(epoch=active.epoch, step=deadlines.awaited_step):
                deadlines.note_result(answer.seconds, now)
                self._events.append(WorkerResult(answer, encoded))
            case AdapterLoaded() | AdapterRefused():  # the core knows which it awaits
                self._events.append(WorkerAdapter(answer))
            case _:
                self._drop(DropReason.UNEXPECTED)
                logger.warning("dropped a %s of epoch %s, which was not awaited", type(answer).__name__, answer.epoch)

    def _register(self, message: Message, register: Register, now: float) -> None:
        self._remove_disconnected(self._take_disconnected())  # first, since the newcomer may have the descriptor of one
        if message.fd not in self._listener.monitor.connected or not self._listener.reaches(message.peer):
            self._drop(DropReason.UNKNOWN_SENDER)
            return  # the connection has ended meanwhile
        newcomer = Registration(message, register, self._timeout, now)
        for former in [other for other in self._registered.values() if other.replaced_by(newcomer)]:
            self._remove(former, "it came again")
        reason = incompatibility(register)
        if not reason and len(self._registered) >= MAX_WORKERS:
            reason = "there are too many"
        self._registered[newcomer.identity] = newcomer
        if reason:
            self._drop(DropReason.NOT_ADMITTED)
            self._send(newcomer.identity, Stop())
            self._remove(newcomer, reason)
        else:
            logger.info("worker %r registered", newcomer)

    def _take_disconnected(self) -> list[Registration]:
        """Return the workers whose connections ended since the last call."""
        disconnected = set(self._listener.monitor.drain())
        return [worker for worker in self._registered.values() if worker.fd in disconnected]

    def _remove_disconnected(self, workers: list[Registration]) -> None:
        for worker in workers:
            if self._registered.get(worker.identity) is worker:
                self._remove(worker, "its connection ended")

    def _terminate(self, worker: Registration, reason: str, seconds: float = 0.0) -> None:
        """Kill the worker's process, or tell it to stop if it is on another host."""
        if not worker.kill():
            self._send(worker.identity, Stop())
        self._remove(worker, reason, seconds=seconds)

    def _remove(self, worker: Registration, reason: str, *, out_of_memory: bool = False, seconds: float = 0.0) -> None:
        """Forget a worker, whose last sign of life came `seconds` ago."""
        logger.warning("worker %r is given up: %s", worker, reason)
        del self._registered[worker.identity]
        worker.close()
        if self._active is not None and worker is self._active.worker:
            self._active = None
            self._events.append(WorkerLost(out_of_memory, seconds))

    def _drop(self, reason: DropReason) -> None:
        """Count a message that is dropped."""
        self._listener.dropped[reason] += 1

    def _send(self, identity: bytes, content: Configure | Stop | LoadAdapter | UnloadAdapter) -> None:
        self._send_encoded(identity, encode(content))

    def _send_encoded(self, identity: bytes, message: bytes) -> None:
        try:
            self._listener.send(identity, message)
        except (PeerGone, PeerSlow):  # the monitor will report the former, and a deadline the latter
            logger.debug("worker %s cannot be reached", printable_identity(identity))
