"""`SchedulerHarness`: a scheduler without sockets, for tests that act as its gateways and workers."""

import itertools
import time
from typing import Any

import msgspec

from services.scheduler.config import SchedulerConfig
from services.scheduler.service import Service
from shared.protocol import (
    VERSION,
    Accepted,
    Configure,
    Configured,
    FinishReason,
    Heartbeat,
    Hello,
    ProcessStats,
    Progress,
    Register,
    SampledRow,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    decode_to_gateway,
    decode_to_worker,
    pack_tokens,
)
from tests.scheduler.examples import REGISTER
from tests.scheduler.fake_listener import FakeListener, as_listener

GOOD, BAD, WORKER, SPARE = b"good", b"bad", b"worker", b"spare"


class SchedulerHarness:
    """A scheduler whose listeners are fakes, with a clock that `turn` moves."""

    def __init__(self, **settings: Any) -> None:
        self.gateways, self.workers = FakeListener(), FakeListener()
        self.service = Service(SchedulerConfig(**settings), as_listener(self.gateways), as_listener(self.workers))
        self.now = time.monotonic()
        self._ids = itertools.count(100)
        self._fds = itertools.count(10)

    def turn(self, times: int = 2) -> None:
        for _ in range(times):
            self.now += 0.3  # more than a tick
            for name in (WORKER, SPARE):
                self.workers.hear(name + b".heartbeat", Heartbeat(name.decode(), ProcessStats()), 1)
            for name in (GOOD, BAD):
                self.gateways.hear(name + b".heartbeat", Heartbeat(name.decode(), ProcessStats()), 1)
            self.service._turn(self.now)

    def connect(self, name: bytes) -> int:
        """Connect a gateway that says Hello, and return the descriptor of its connection."""
        fd = next(self._fds)
        self.gateways.hear(name, Hello(VERSION, name.decode()), fd)
        return fd

    def register(self, name: bytes, register: Register = REGISTER) -> int:
        """Connect a worker that registers, and return the descriptor of its connection."""
        fd = next(self._fds)
        self.workers.hear(name, msgspec.structs.replace(register, identity=name.decode()), fd)
        self.turn()
        return fd

    def configured(self, name: bytes, fd: int) -> None:
        """Let the worker answer `Configure`, if it was sent one."""
        for message in self.sent_to(name):
            if isinstance(message, Configure):
                self.workers.hear(name, Configured(message.epoch), fd)

    def sent_to(self, name: bytes) -> list[Any]:
        return self.workers.take(name, decode_to_worker)

    def answer(self, name: bytes, fd: int) -> bool:
        """Let the worker answer the plans that it was sent. Return whether there were any."""
        plans = [plan for plan in self.sent_to(name) if isinstance(plan, StepPlan)]
        for plan in plans:
            slots = [row.slot for row in plan.rows if row.samples]
            result = StepResult(plan.epoch, plan.step, [SampledRow(slot, [5]) for slot in slots], 0.01)
            self.workers.hear(name, result, fd)
        return bool(plans)

    def serves(self) -> bool:
        """Return whether a gateway and a worker that come now get a request done."""
        for worker in self.service._workers._registered.copy().values():
            self.workers.leave(worker.fd)  # so that the next one is configured
        self.turn()
        gateway, worker = self.connect(GOOD), self.register(SPARE)
        self.configured(SPARE, worker)
        id = next(self._ids)
        self.gateways.hear(GOOD, Submit(id, pack_tokens([1]), 1, Sampling(1, 0)), gateway)
        self.turn()
        for _ in range(20):
            self.answer(SPARE, worker)
            self.turn()
        messages = self.gateways.take(GOOD, decode_to_gateway)
        rows = [row for message in messages if isinstance(message, Progress) for row in message.rows]
        accepted = [one for message in messages if isinstance(message, Accepted) for one in message.ids]
        return accepted == [id] and [(row.id, row.finish_reason) for row in rows] == [(id, FinishReason.LENGTH)]
