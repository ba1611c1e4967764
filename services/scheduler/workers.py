"""`Workers`: the registered workers, those that compute, and whether they are alive. It knows no queue of requests.

One group of workers computes (worker_group.py): the ranks of one model, which are most often a single one. Others that
registered wait in line to replace it, and the next group is complete when each of its ranks is among them. A worker is
configured at most once on a connection: after a loss it registers again, so that no result can be taken for that of
another plan.

A worker of the active group is lost when its connection ends (which is seen within milliseconds), when it sends a
`Fault`, when `shared.liveness` finds it dead, or when it sends something that is not a message. In the last two cases
its process may still run: it is killed if it is on this host, and told to stop otherwise. So are the other ranks of its
group, which can do nothing without it: the group is lost as a whole, and all ranks begin again together.

A worker that is told to end says so by `Leave`. Its group computes what it is sent until `release`, which the service
calls between two steps, so that nothing is lost.
"""

import logging
from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

from services.scheduler.config import WorkerCapacity
from services.scheduler.joint_capacity import joint_capacity
from services.scheduler.registration import Registration, disagreement, incompatibility
from services.scheduler.worker_group import Member, WorkerGroup, WorkerResult, complete_group, missing_ranks
from shared.errors import ProtocolError
from shared.protocol import (
    AdapterLoaded,
    AdapterRefused,
    Configure,
    Configured,
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
"""Minimum seconds between two checks of whether an active worker is overdue."""

MAX_TURN_MESSAGES = 64
"""Maximum number of workers' messages that are read in one turn. A worker that computes has a few waiting, and libzmq
reads from all connections in turns, so a flood from others does not hold it up."""

MAX_WORKERS = 64
"""Workers that are registered at a time: one group computes and the others are spares."""


class WorkerLost(Struct, frozen=True):
    """The active group computes no more; what it had in flight is lost."""

    out_of_memory: bool = False  # a device had too little memory for a step
    seconds: float = 0.0  # since its last sign of life; what shows at once that it is lost, is one


class WorkerReady(Struct, frozen=True):
    """The active group has answered `Configure`."""


class WorkerAdapter(Struct, frozen=True):
    """The active group has answered `LoadAdapter`."""

    answer: AdapterLoaded | AdapterRefused


WorkerEvent: TypeAlias = WorkerResult | WorkerReady | WorkerLost | WorkerAdapter


class Workers:
    """The workers' side of the scheduler.

    A worker is given up after `timeout` seconds of silence. `short_of_cpu` tells whether the scheduler is short of CPU.
    """

    def __init__(self, listener: Listener, timeout: float, short_of_cpu: Callable[[float], bool]) -> None:
        self._listener = listener
        self._timeout = timeout
        self._short_of_cpu = short_of_cpu
        self._registered: dict[bytes, Registration] = {}  # in order of arrival, the active ones included
        self._active: WorkerGroup | None = None
        self._faults: list[tuple[Registration, bool]] = []  # of this turn: whose, and whether it was out of memory
        self._events: list[WorkerEvent] = []
        self._next_check = 0.0

    @property
    def ready(self) -> bool:
        """True if plans can be sent."""
        return self._active is not None and self._active.ready

    @property
    def num_registered(self) -> int:
        """The number of workers that compute or wait in line."""
        return len(self._registered)

    def progressing(self, now: float) -> bool:
        """Return whether plans can be sent and no worker is silent."""
        return self._active is not None and self._active.ready and not self._active.is_silent(now)

    @property
    def candidate(self) -> WorkerCapacity | None:
        """The capacity of the group to configure next; None unless one is needed and all its ranks have registered."""
        loss_untold = bool(self._events)  # after `give_up`: the former epoch must end before the next one begins
        if self._active is not None or loss_untold or not (group := self._next_group()):
            return None
        return joint_capacity([worker.register for worker in group])

    @property
    def leaving_since(self) -> float | None:
        """The time when one of the active group said that it was told to end; None if none has."""
        return None if self._active is None else self._active.leaving_since

    @property
    def has_spare(self) -> bool:
        """True if another group waits in line."""
        return bool(self._next_group())

    @property
    def settled(self) -> bool:
        """True if no result of the active group is awaited."""
        return self._active is None or self._active.settled

    def receive(self, now: float) -> list[WorkerEvent]:
        """Read messages, and return the active group's events since the last call, in order."""
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
        """Make the candidate the active group. If a rank cannot be reached, `receive` will return that it is lost."""
        group = self._next_group()
        for worker in group:
            worker.liveness.note_message(now)  # its silence does not count while it waits in line
        self._active = WorkerGroup(group, message.epoch, self._timeout, now)
        self._send_to_group(message)

    def send(self, plan: StepPlan, encoded: bytes, now: float) -> None:
        """Hand a plan to the active group, as the message `encoded`.

        If a rank cannot be reached, `receive` will return that it is lost.
        """
        if self._active is not None:
            self._active.note_sent(plan, now)
            for worker in self._active.workers:
                self._send_encoded(worker.identity, encoded)

    def send_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Hand a message about an adapter to the active group, before the plans that are sent later."""
        if self._active is not None:
            if isinstance(message, LoadAdapter):
                self._active.note_load(message.adapter)
            self._send_to_group(message)

    def give_up(self, reason: str) -> None:
        """End the processes of the active group, whose result was wrong. `receive` will return that it is lost."""
        if self._active is not None:
            self._terminate(self._active.sampler, reason)

    def release(self) -> None:
        """Tell the active group to stop, and forget it. It owes no result, so it is not lost."""
        if self._active is not None:
            group, self._active = self._active, None
            for worker in group.workers:
                self._let_go(worker)

    def dismiss(self, reason: str) -> None:
        """Tell the candidate to stop, and forget it."""
        for worker in self._next_group():
            self._remove(worker, reason)
            self._send(worker.identity, Stop())

    def postpone(self, seconds: float) -> None:
        """Move all deadlines by the seconds for which the scheduler itself stood still."""
        if self._active is not None:
            self._active.postpone(seconds)

    def _next_group(self) -> list[Registration]:
        """Return the first in line of each rank; none if a rank is missing there."""
        return complete_group(worker for worker in self._registered.values() if self._member(worker) is None)

    def _member(self, worker: Registration | None) -> Member | None:
        """Return the member of the active group that a worker is; None if it is none."""
        return None if self._active is None else self._active.member(worker)

    def _check(self, now: float) -> None:
        if self._active is not None and (dead := self._active.find_overdue(now, self._short_of_cpu(now))) is not None:
            self._terminate(dead.worker, dead.reason, dead.seconds)

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
        elif self._active is None or worker is None or (member := self._active.member(worker)) is None:
            self._drop(DropReason.UNKNOWN_SENDER if worker is None else DropReason.UNEXPECTED)
            logger.debug("a message of %s came too late", printable_identity(message.peer))
        elif isinstance(content, Fault):
            logger.error("worker %r failed in step %d:\n%s", worker, content.step, content.detail.rstrip())
            self._faults.append((worker, content.out_of_memory))
        else:
            self._handle_answer(self._active, member, content, body, now)

    def _note_leaving(self, worker: Registration | None, now: float) -> None:
        if worker is None:
            self._drop(DropReason.UNKNOWN_SENDER)
        elif self._active is None or self._active.member(worker) is None:
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
        group: WorkerGroup,
        member: Member,
        answer: Configured | StepResult | AdapterLoaded | AdapterRefused,
        encoded: bytes,
        now: float,
    ) -> None:
        member.worker.liveness.note_message(now)
        deadlines = member.deadlines
        match answer:
            case Configured(epoch=group.epoch) if not deadlines.ready:
                deadlines.note_configured(now)
                self._events += [WorkerReady()] if group.ready else []
            case StepResult(epoch=group.epoch, step=deadlines.awaited_step):
                self._events += group.note_result(member, WorkerResult(answer, encoded), now)
            case AdapterLoaded() | AdapterRefused():
                self._handle_adapter(group, member, answer)
            case _:
                self._drop(DropReason.UNEXPECTED)
                logger.warning("dropped a %s of epoch %s, which was not awaited", type(answer).__name__, answer.epoch)

    def _handle_adapter(self, group: WorkerGroup, member: Member, answer: AdapterLoaded | AdapterRefused) -> None:
        joint = group.note_adapter(member, answer)
        if joint is None:
            return
        for worker in joint.to_unload:
            self._send(worker.identity, UnloadAdapter(answer.adapter))
        self._events.append(WorkerAdapter(joint.answer))

    def _register(self, message: Message, register: Register, now: float) -> None:
        self._remove_disconnected(self._take_disconnected())  # first, since the newcomer may have the descriptor of one
        if message.fd not in self._listener.monitor.connected or not self._listener.reaches(message.peer):
            self._drop(DropReason.UNKNOWN_SENDER)
            return  # the connection has ended meanwhile
        newcomer = Registration(message, register, self._timeout, now)
        for former in [other for other in self._registered.values() if other.replaced_by(newcomer)]:
            self._remove(former, "it came again")
        first = next(iter(self._registered.values()), None)
        reason = incompatibility(register) or ("" if first is None else disagreement(register, first.register))
        if not reason and len(self._registered) >= MAX_WORKERS:
            reason = "there are too many"
        self._registered[newcomer.identity] = newcomer
        if reason:
            self._drop(DropReason.NOT_ADMITTED)
            self._send(newcomer.identity, Stop())
            self._remove(newcomer, reason)
        else:
            logger.info("worker %r registered", newcomer)
            missing = missing_ranks(self._registered.values(), register.world_size)
            if missing:
                logger.info("ranks that are still awaited: %s", ", ".join(map(str, missing)))

    def _take_disconnected(self) -> list[Registration]:
        """Return the workers whose connections ended since the last call."""
        disconnected = set(self._listener.monitor.drain())
        return [worker for worker in self._registered.values() if worker.fd in disconnected]

    def _remove_failed(self) -> None:
        """Remove a worker that has sent a `Fault` in this turn, whose process ends by itself.

        A rank that is out of memory says so before its connections to the other ranks end, by which these fail: what
        they say of it is read at most in the same turn, where the cause counts.
        """
        faults, self._faults = self._faults, []
        failed = [(worker, out_of_memory) for worker, out_of_memory in faults if self._member(worker) is not None]
        if failed:
            worker, out_of_memory = max(failed, key=lambda fault: fault[1])
            self._remove(worker, "it failed", out_of_memory=out_of_memory)

    def _remove_disconnected(self, workers: list[Registration]) -> None:
        self._remove_failed()
        for worker in workers:
            if self._registered.get(worker.identity) is worker:
                self._remove(worker, "its connection ended")

    def _terminate(self, worker: Registration, reason: str, seconds: float = 0.0) -> None:
        """Kill the worker's process, or tell it to stop if it is on another host."""
        if not worker.kill():
            self._send(worker.identity, Stop())
        self._remove(worker, reason, seconds=seconds)

    def _remove(self, worker: Registration, reason: str, *, out_of_memory: bool = False, seconds: float = 0.0) -> None:
        """Forget a worker, whose last sign of life came `seconds` ago, and end its group if that is the active one."""
        logger.warning("worker %r is given up: %s", worker, reason)
        del self._registered[worker.identity]
        worker.close()
        if self._active is not None and self._member(worker) is not None:
            group, self._active = self._active, None
            self._events.append(WorkerLost(out_of_memory, seconds))
            for other in group.workers:
                if other is not worker:
                    self._terminate(other, "its group is lost")

    def _drop(self, reason: DropReason) -> None:
        """Count a message that is dropped."""
        self._listener.dropped[reason] += 1

    def _send_to_group(self, content: Configure | LoadAdapter | UnloadAdapter) -> None:
        for worker in [] if self._active is None else self._active.workers:
            self._send(worker.identity, content)

    def _send(self, identity: bytes, content: Configure | Stop | LoadAdapter | UnloadAdapter) -> None:
        self._send_encoded(identity, encode(content))

    def _send_encoded(self, identity: bytes, message: bytes) -> None:
        try:
            self._listener.send(identity, message)
        except (PeerGone, PeerSlow):  # the monitor will report the former, and a deadline the latter
            logger.debug("worker %s cannot be reached", printable_identity(identity))
