"""Workers: who registered, which one computes, and whether it is alive. Sockets and processes; no queue of requests.

One worker computes; others that registered wait in line to replace it. A worker is configured at most once on a
connection: after a loss it comes back as a newcomer, so that nothing it had in flight can be taken for something else.
It is seen to be lost by its connection (milliseconds), by a `Fault` that it sends, or by being dead by its own signs
(`shared.liveness`) or sending nonsense; in the last cases its process lives but is of no use: it is killed if it runs
on this host, else told to stop.
"""

import logging
from collections.abc import Callable

from msgspec import Struct

from services.scheduler.deadlines import Deadlines
from services.scheduler.registration import Registration, unfit
from shared.errors import ProtocolError
from shared.protocol import (
    Configure,
    Configured,
    Epoch,
    Fault,
    Heartbeat,
    Register,
    StepPlan,
    StepResult,
    Stop,
    decode_from_worker,
    encode,
)
from shared.transport import Listener, Message, PeerGone, PeerSlow, printable_identity

log = logging.getLogger(__name__)


CHECK = 0.1
"""Seconds between two looks at whether the active worker is late."""

MESSAGES = 1_000
"""Messages of workers that are read in one turn: far more than honest ones ever have waiting."""


class Lost(Struct, frozen=True):
    """The active worker computes no more; what it had in flight is lost."""


class Ready(Struct, frozen=True):
    """The active worker has answered `Configure`."""


class Active(Struct):
    """The worker that computes."""

    worker: Registration
    epoch: Epoch
    deadlines: Deadlines

    def fault(self, now: float, short_of_cpu: bool) -> str:
        """Return why it is dead; empty while it is not. Call it often. `short_of_cpu`: the scheduler is."""
        due = self.deadlines.due()
        self.worker.look(now, due)
        return self.worker.liveness.failure(now, due=due, missed=self.deadlines.what(now), short_of_cpu=short_of_cpu)


class Workers:
    """The workers' side of the scheduler.

    `timeout`: seconds of silence that end a worker's service. `short_of_cpu`: whether the scheduler is short of CPU.
    """

    def __init__(self, listener: Listener, timeout: float, short_of_cpu: Callable[[float], bool]) -> None:
        self._listener = listener
        self._timeout = timeout
        self._short_of_cpu = short_of_cpu
        self._registered: dict[bytes, Registration] = {}  # in order of arrival, the active one included
        self._active: Active | None = None
        self._news: list[StepResult | Ready | Lost] = []
        self._next_check = 0.0

    @property
    def ready(self) -> bool:
        """Plans can be sent."""
        return self._active is not None and self._active.deadlines.ready

    def progressing(self, now: float) -> bool:
        """Return whether plans can be sent, and are worked on as far as can be seen."""
        active = self._active
        return active is not None and active.deadlines.ready and not active.worker.liveness.is_silent(now)

    @property
    def candidate(self) -> Register | None:
        """The worker to be configured next, if one is needed and there."""
        if self._active is not None or not self._registered:
            return None
        return next(iter(self._registered.values())).register

    def receive(self, now: float) -> list[StepResult | Ready | Lost]:
        """What has come since the last call, in order: results of the active worker, and its loss."""
        leaving = self._leaving()
        for _ in range(MESSAGES):
            message = self._listener.receive()
            if message is None:
                break
            self._handle(message, now)
        self._see_off(leaving)  # after their last words
        if now >= self._next_check:
            self._next_check = now + CHECK
            self._check(now)
        news, self._news = self._news, []
        return news

    def configure(self, message: Configure, now: float) -> None:
        """Make the candidate the active worker. If it cannot be reached, `receive` will tell that it is lost."""
        worker = next(iter(self._registered.values()))
        worker.liveness.note_message(now)  # it may have waited in line for long, unwatched
        self._active = Active(worker, message.epoch, Deadlines(worker.register, self._timeout, now))
        self._send(worker, message)

    def send(self, plan: StepPlan, now: float) -> None:
        """Hand a plan to the active worker. If it cannot be reached, `receive` will tell that it is lost."""
        if self._active is not None:
            self._active.deadlines.sent(plan.step, sum(row.count for row in plan.rows), now)
            self._send(self._active.worker, plan)

    def give_up(self, fault: str) -> None:
        """The active worker is of no use: end its process. `receive` will tell that it is lost."""
        if self._active is not None:
            self._end(self._active.worker, fault)

    def dismiss(self, reason: str) -> None:
        """Send the candidate away."""
        worker = next(iter(self._registered.values()))
        self._lose(worker, reason)
        self._send(worker, Stop())

    def forgive(self, seconds: float) -> None:
        """The scheduler itself stood still for so long."""
        if self._active is not None:
            self._active.worker.liveness.forgive(seconds)
            self._active.deadlines.forgive(seconds)

    def stop(self) -> None:
        """Tell all workers to end their processes."""
        for worker in self._registered.values():
            self._send(worker, Stop())
            worker.close()
        self._registered.clear()
        self._active = None

    def _check(self, now: float) -> None:
        if self._active is not None and (fault := self._active.fault(now, self._short_of_cpu(now))):
            self._end(self._active.worker, fault)

    def _handle(self, message: Message, now: float) -> None:
        worker = self._registered.get(message.peer)
        try:
            content = decode_from_worker(message.body)
        except ProtocolError as error:
            log.error("worker %s: %s", printable_identity(message.peer), error)
            if worker is not None:
                self._end(worker, "it sent something that is not a message")
            else:
                self._tell(message.peer, Stop())  # a `Register` whose figures cannot be, perhaps: it must not wait
            return
        if isinstance(content, Register):
            self._admit(message, content, now)
        elif isinstance(content, Heartbeat):
            if (sender := self._registered.get(content.identity.encode())) is not None:
                sender.liveness.note_heartbeat(content.process, now)
        elif self._active is None or worker is not self._active.worker:
            log.debug("a message of %s came too late", printable_identity(message.peer))
        elif isinstance(content, Fault):
            log.error("worker %r failed in step %d:\n%s", worker, content.step, content.detail.rstrip())
            self._lose(worker, "it failed")  # and ends by itself
        else:
            self._hear(self._active, content, now)

    def _hear(self, active: Active, content: Configured | StepResult, now: float) -> None:
        active.worker.liveness.note_message(now)
        deadlines = active.deadlines
        match content:
            case Configured(epoch=active.epoch) if not deadlines.ready:
                deadlines.configured(now)
                self._news.append(Ready())
            case StepResult(epoch=active.epoch, step=deadlines.awaited):
                deadlines.returned(content.seconds, now)
                self._news.append(content)
            case _:
                log.warning("dropped a %s of epoch %s, which was not awaited", type(content).__name__, content.epoch)

    def _admit(self, message: Message, register: Register, now: float) -> None:
        self._see_off(self._leaving())  # from here on, a descriptor that is used again means the newcomer
        if message.fd not in self._listener.monitor.connected:
            return  # gone already
        newcomer = Registration(message, register, self._timeout, now)
        for former in [one for one in self._registered.values() if one.replaced_by(newcomer)]:
            self._lose(former, "it came again")
        self._registered[newcomer.name] = newcomer
        if fault := unfit(register):
            self._send(newcomer, Stop())
            self._lose(newcomer, fault)
        else:
            log.info("worker %r registered", newcomer)

    def _leaving(self) -> list[Registration]:
        """Those whose connections ended since the last call."""
        gone = set(self._listener.monitor.drain())
        return [worker for worker in self._registered.values() if worker.fd in gone]

    def _see_off(self, leaving: list[Registration]) -> None:
        for worker in leaving:
            if self._registered.get(worker.name) is worker:
                self._lose(worker, "its connection ended")

    def _end(self, worker: Registration, fault: str) -> None:
        if not worker.kill():
            self._send(worker, Stop())
        self._lose(worker, fault)

    def _lose(self, worker: Registration, reason: str) -> None:
        log.warning("worker %r is given up: %s", worker, reason)
        del self._registered[worker.name]
        worker.close()
        if self._active is not None and worker is self._active.worker:
            self._active = None
            self._news.append(Lost())

    def _send(self, worker: Registration, content: Configure | StepPlan | Stop) -> None:
        self._tell(worker.name, content)

    def _tell(self, peer: bytes, content: Configure | StepPlan | Stop) -> None:
        try:
            self._listener.send(peer, encode(content))
        except (PeerGone, PeerSlow):  # seen by the monitor, or by being late
            log.debug("worker %s cannot be reached", printable_identity(peer))
