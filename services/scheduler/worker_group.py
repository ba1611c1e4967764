"""`WorkerGroup`: the ranks that compute a model together in one epoch, and what each of them owes.

All ranks get the same messages, in the same order. The answers of one, the sampling rank, have content: the others
acknowledge. An answer counts when all ranks have given it. So the ranks differ by no more steps than are in flight, and
what a step's result lets the core reuse, such as a host block that the step has filled, can be reused on every rank.
The blocks themselves would need no such wait, since each rank computes its plans in order.

The group knows no sockets: `Workers` sends and receives.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from services.scheduler.deadlines import Deadlines
from services.scheduler.joint_capacity import joint_capacity
from services.scheduler.registration import Registration
from shared.protocol import AdapterLoaded, AdapterRefused, Epoch, StepPlan, StepResult

AdapterAnswer: TypeAlias = AdapterLoaded | AdapterRefused


class WorkerResult(Struct, frozen=True):
    """The result of the oldest plan that was sent, and the message in which it came."""

    result: StepResult
    encoded: bytes


class JointAnswer(NamedTuple):
    """The answers of all ranks to `LoadAdapter`, joined into one."""

    answer: AdapterAnswer
    to_unload: list[Registration]  # that have loaded an adapter which others could not


class Overdue(NamedTuple):
    """A rank that is dead, and why."""

    worker: Registration
    reason: str
    seconds: float  # for which it has not shown that it works


class Member:
    """A rank of the group, and the answers that it owes."""

    def __init__(self, worker: Registration, deadlines: Deadlines) -> None:
        self.worker = worker
        self.deadlines = deadlines

    def overdue(self, now: float, short_of_cpu: bool) -> str:
        """Return why the rank is dead; empty while it is not. Must be called often.

        `short_of_cpu` tells whether the scheduler is short of CPU.
        """
        due, missed = self.deadlines.due(), self.deadlines.describe_overdue(now)
        self.worker.observe_process(now, due)
        return self.worker.liveness.failure(now, due=due, missed=missed, short_of_cpu=short_of_cpu)

    def seconds_since_sign(self, now: float) -> float:
        """Return for how long the rank has not shown that it works: since it began an overdue step, if it has one."""
        return now - (self.deadlines.began if now > self.deadlines.due() else self.worker.liveness.last_heard)


class WorkerGroup:
    """The ranks of an epoch, which were sent `Configure` at time `now`. `timeout` is in seconds."""

    def __init__(self, workers: Sequence[Registration], epoch: Epoch, timeout: float, now: float) -> None:
        """`workers` come in the order of their ranks."""
        self.epoch = epoch
        self.leaving_since: float | None = None  # when one of them said that it was told to end
        capacity = joint_capacity([worker.register for worker in workers])
        self._members = {worker.identity: Member(worker, Deadlines(capacity, timeout, now)) for worker in workers}
        self._sampling_rank = workers[0].register.sampling_rank
        self._results: deque[WorkerResult] = deque()  # that not all other ranks have acknowledged
        self._loads: dict[int, dict[int, AdapterAnswer]] = {}  # by the adapter's number and the rank

    @property
    def workers(self) -> list[Registration]:
        """The ranks, in order."""
        return [member.worker for member in self._members.values()]

    @property
    def ready(self) -> bool:
        """True if all ranks have answered `Configure`."""
        return all(member.deadlines.ready for member in self._members.values())

    @property
    def settled(self) -> bool:
        """True if no answer to a plan is awaited."""
        return all(member.deadlines.awaited_step is None for member in self._members.values())

    @property
    def sampler(self) -> Registration:
        """The rank whose results count."""
        return self.workers[self._sampling_rank]

    def member(self, worker: Registration | None) -> Member | None:
        """Return the member that a worker is; None if it is none."""
        member = None if worker is None else self._members.get(worker.identity)
        return member if member is not None and member.worker is worker else None

    def is_silent(self, now: float) -> bool:
        """Return whether nothing has come from a rank for the timeout, and it does not seem to work."""
        return any(member.worker.liveness.is_silent(now) for member in self._members.values())

    def find_overdue(self, now: float, short_of_cpu: bool) -> Overdue | None:
        """Return a dead rank, if there is one: those that wait for it may be overdue a little later."""
        reasons = [(member, member.overdue(now, short_of_cpu)) for member in self._members.values()]
        dead = [Overdue(member.worker, reason, member.seconds_since_sign(now)) for member, reason in reasons if reason]
        return max(dead, key=lambda one: one.seconds, default=None)

    def postpone(self, seconds: float) -> None:
        """Move all deadlines by the seconds for which the scheduler itself stood still."""
        for member in self._members.values():
            member.worker.liveness.postpone(seconds)
            member.deadlines.postpone(seconds)

    def note_sent(self, plan: StepPlan, now: float) -> None:
        """Note that all ranks were sent a plan."""
        tokens = sum(row.count for row in plan.rows)
        for member in self._members.values():
            member.deadlines.note_sent(plan.step, tokens, now)

    def note_result(self, member: Member, result: WorkerResult, now: float) -> list[WorkerResult]:
        """Note a rank's answer to the plan that it answers next. Return the results that all ranks have by now.

        The rows of a rank that does not sample are not looked at.
        """
        member.deadlines.note_result(result.result.seconds, now)
        if member.worker.register.rank == self._sampling_rank:
            self._results.append(result)
        awaited = [one.deadlines.awaited_step for one in self._members.values()]
        oldest = min((step for step in awaited if step is not None), default=None)
        complete = []
        while self._results and (oldest is None or self._results[0].result.step < oldest):
            complete.append(self._results.popleft())
        return complete

    def note_load(self, number: int) -> None:
        """Note that all ranks were told to load an adapter."""
        self._loads[number] = {}

    def note_adapter(self, member: Member, answer: AdapterAnswer) -> JointAnswer | None:
        """Note a rank's answer about an adapter. Return what all have answered together, once they have.

        It is loaded if all have loaded the same files.
        """
        answers = self._loads.get(answer.adapter)
        if answers is None:
            return None
        answers[member.worker.register.rank] = answer
        if len(answers) < len(self._members):
            return None
        del self._loads[answer.adapter]
        joint = _join(list(answers.values()))
        loaded = [worker for worker in self.workers if isinstance(answers[worker.register.rank], AdapterLoaded)]
        return JointAnswer(joint, loaded if isinstance(joint, AdapterRefused) else [])


def complete_group(workers: Iterable[Registration]) -> list[Registration]:
    """Return the first worker of each rank, in order; none if a rank is missing. All must be of groups of one size."""
    by_rank = _first_by_rank(workers)
    complete = by_rank and len(by_rank) == next(iter(by_rank.values())).register.world_size
    return [by_rank[rank] for rank in sorted(by_rank)] if complete else []


def missing_ranks(workers: Iterable[Registration], world_size: int) -> list[int]:
    """Return the ranks of which there is no worker."""
    by_rank = _first_by_rank(workers)
    return [rank for rank in range(world_size) if rank not in by_rank]


def _first_by_rank(workers: Iterable[Registration]) -> dict[int, Registration]:
    by_rank: dict[int, Registration] = {}
    for worker in workers:
        by_rank.setdefault(worker.register.rank, worker)
    return by_rank


def _join(answers: Sequence[AdapterAnswer]) -> AdapterAnswer:
    refused = next((answer for answer in answers if isinstance(answer, AdapterRefused)), None)
    if refused is not None:
        return refused
    if any(answer != answers[0] for answer in answers):
        return AdapterRefused(answers[0].adapter, "its files are not the same for all ranks")
    return answers[0]
