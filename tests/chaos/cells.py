"""The matrix of faults: which part of a deployment fails, how and when, over which transport, of how many engines.

`all_cells` returns the whole matrix, and `SAMPLE` the cells of `make test`, in which each value of each axis occurs.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import cycle, product
from typing import NamedTuple


class Target(StrEnum):
    """The part that fails. The gateway is one of two. A link is a scheduler's, to its gateways or to its worker."""

    WORKER = "worker"
    SCHEDULER = "scheduler"
    GATEWAY = "gateway"
    GATEWAY_LINK = "gateways' link"
    WORKER_LINK = "worker's link"


class Fault(StrEnum):
    """How a part fails: SIGKILL; SIGSTOP, or no packets, until the others have given it up; SIGTERM."""

    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    DRAIN = "drain"


class Moment(StrEnum):
    """What one request is about to do when the fault comes: the worker is held in front of that step."""

    QUEUE = "queue"  # it waits, and others run
    CHUNK = "prefill chunk"  # the first chunks of its prompt are computed, and others are not
    DECODE = "decode"
    FORK = "fork"  # its samples part after the prompt
    STOP = "stop string"  # text is held back, since a stop string may have begun
    LAST = "last token"


class When(StrEnum):
    """When a second fault comes."""

    AT_ONCE = "at once"
    RECOVERY = "in recovery"  # when the request that was disturbed enters a worker again, or has just gone on there
    START = "in start"  # while the process that was killed starts again


class Transport(StrEnum):
    """How processes connect. Over tcp they have keys, and namespaces of their own where that is possible."""

    IPC = "ipc"
    TCP = "tcp"


class Layout(NamedTuple):
    """A deployment's transport and number of engines. It has two gateways."""

    transport: Transport
    engines: int

    def __str__(self) -> str:
        return f"{self.transport}, {self.engines} engine{'s' if self.engines > 1 else ''}"


class Strike(NamedTuple):
    """A fault of a part."""

    target: Target
    fault: Fault

    def __str__(self) -> str:
        return f"{self.target} {self.fault}"


class Second(NamedTuple):
    """A second strike, and when it comes."""

    strike: Strike
    when: When

    def __str__(self) -> str:
        return f"{self.strike} {self.when}"


class Cell(NamedTuple):
    """One run: requests, a moment, and what fails then."""

    layout: Layout
    strike: Strike
    moment: Moment
    second: Second | None = None

    @property
    def faults(self) -> str:
        return f"{self.strike}, {self.second}" if self.second else str(self.strike)

    def __str__(self) -> str:
        return f"{self.layout}: {self.faults}: {self.moment}"

    @property
    def needs_namespaces(self) -> bool:
        return self.strike.fault is Fault.CUT


LAYOUTS = [Layout(transport, engines) for transport, engines in product(Transport, (1, 2))]
PROCESSES = (Target.WORKER, Target.SCHEDULER, Target.GATEWAY)
LINKS = (Target.GATEWAY_LINK, Target.WORKER_LINK)
WORKER_KILL, SCHEDULER_KILL = Strike(Target.WORKER, Fault.KILL), Strike(Target.SCHEDULER, Fault.KILL)

STRIKES = [
    *(Strike(target, fault) for target, fault in product(PROCESSES, (Fault.KILL, Fault.FREEZE, Fault.DRAIN))),
    *(Strike(target, Fault.CUT) for target in LINKS),
]

DOUBLES = [
    (WORKER_KILL, Second(SCHEDULER_KILL, When.AT_ONCE)),
    *((first, Second(second, When.RECOVERY)) for first, second in product((WORKER_KILL, SCHEDULER_KILL), repeat=2)),
    (SCHEDULER_KILL, Second(SCHEDULER_KILL, When.START)),
    (WORKER_KILL, Second(WORKER_KILL, When.START)),
    (WORKER_KILL, Second(SCHEDULER_KILL, When.START)),
]

WITH_OUTPUT = (Moment.DECODE, Moment.STOP, Moment.LAST)
"""Moments at which the request has output, by which its recovery is seen. In the first one, more comes after it, as two
deaths of workers need: those are the first of `DOUBLES` in recovery."""


def all_cells() -> list[Cell]:
    """Return the whole matrix, by layout."""
    return [cell for layout in LAYOUTS for cell in _cells_of(layout)]


def _cells_of(layout: Layout) -> Iterator[Cell]:
    for strike, moment in product(STRIKES, Moment):
        if strike.fault is not Fault.CUT or layout.transport is Transport.TCP:
            yield Cell(layout, strike, moment)
    any_moment, with_output = cycle(Moment), cycle(WITH_OUTPUT)
    for strike, second in DOUBLES:
        moment = next(with_output if second.when is When.RECOVERY else any_moment)
        yield Cell(layout, strike, moment, second)


IPC_1, TCP_2 = Layout(Transport.IPC, 1), Layout(Transport.TCP, 2)

SAMPLE = [
    Cell(IPC_1, WORKER_KILL, Moment.DECODE),
    Cell(IPC_1, Strike(Target.WORKER, Fault.FREEZE), Moment.CHUNK),
    Cell(IPC_1, Strike(Target.WORKER, Fault.DRAIN), Moment.QUEUE),
    Cell(IPC_1, SCHEDULER_KILL, Moment.STOP),
    Cell(IPC_1, Strike(Target.SCHEDULER, Fault.DRAIN), Moment.LAST),
    Cell(IPC_1, Strike(Target.GATEWAY, Fault.DRAIN), Moment.FORK),
    Cell(IPC_1, SCHEDULER_KILL, Moment.DECODE, Second(SCHEDULER_KILL, When.RECOVERY)),
    Cell(IPC_1, WORKER_KILL, Moment.QUEUE, Second(SCHEDULER_KILL, When.AT_ONCE)),
    Cell(TCP_2, SCHEDULER_KILL, Moment.FORK),
    Cell(TCP_2, Strike(Target.SCHEDULER, Fault.FREEZE), Moment.DECODE),
    Cell(TCP_2, Strike(Target.GATEWAY, Fault.KILL), Moment.LAST),
    Cell(TCP_2, Strike(Target.GATEWAY, Fault.FREEZE), Moment.STOP),
    Cell(TCP_2, Strike(Target.GATEWAY_LINK, Fault.CUT), Moment.CHUNK),
    Cell(TCP_2, Strike(Target.WORKER_LINK, Fault.CUT), Moment.DECODE),
    Cell(TCP_2, SCHEDULER_KILL, Moment.CHUNK, Second(SCHEDULER_KILL, When.START)),
]
