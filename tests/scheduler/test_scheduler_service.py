"""The scheduler's service when there is no worker, or no longer one: drains, and workers that are told to end."""

import pytest

from services.scheduler.service import SPARE_WAIT
from shared.admin import DrainState
from shared.protocol import (
    Abort,
    Configure,
    Leave,
    PrefixCacheReset,
    Progress,
    Refusal,
    Refused,
    ResetPrefixCache,
    Snapshot,
    StepPlan,
    StepResult,
    Stop,
    Suspicion,
    Welcome,
    decode_to_gateway,
    decode_to_worker,
)
from tests.scheduler.examples import submit
from tests.scheduler.scheduler_harness import GOOD, SPARE, WORKER, SchedulerHarness

TOKENS = 30


def test_requests_before_the_first_worker_are_refused_and_no_gateway_is_welcomed() -> None:
    harness = SchedulerHarness()
    gateway = harness.connect(GOOD)
    harness.gateways.hear(GOOD, submit(1), gateway)
    harness.gateways.hear(GOOD, Abort(1), gateway)
    harness.turn()
    messages = harness.gateways.take(GOOD, decode_to_gateway)
    refusals = [message for message in messages if isinstance(message, Refused)]
    assert refusals == [Refused(1, Refusal.NOT_READY, "the engine has not started yet")]
    assert not any(isinstance(message, Welcome | Progress) for message in messages)
    assert harness.service.model == ""
    assert harness.serves()


def test_a_reset_of_the_prefix_cache_is_confirmed_with_and_without_an_engine() -> None:
    harness = SchedulerHarness()
    gateway = harness.connect(GOOD)
    harness.gateways.hear(GOOD, ResetPrefixCache(1), gateway)
    harness.turn()
    assert confirmed(harness) == [PrefixCacheReset(1)]
    harness.configured(WORKER, harness.register(WORKER))
    harness.turn()
    assert harness.service.snapshot.prefix_resets == 0, "there was nothing to forget"
    harness.gateways.hear(GOOD, ResetPrefixCache(2), gateway)
    harness.turn()
    assert confirmed(harness) == [PrefixCacheReset(2)]
    assert harness.service.snapshot.prefix_resets == 1


def confirmed(harness: SchedulerHarness) -> list[object]:
    messages = harness.gateways.take(GOOD, decode_to_gateway)
    return [message for message in messages if isinstance(message, PrefixCacheReset)]


def test_a_drain_ends_nothing_until_the_service_is_told_to_stop() -> None:
    harness = SchedulerHarness()
    service = harness.service
    assert not service._should_end(harness.now)
    assert service.drain_state == DrainState(draining=False, drained=False, unfinished=0)
    service.drain()
    assert not service._should_end(harness.now)
    assert not service._should_end(harness.now + 1000.0)
    assert service.drain_state == DrainState(draining=True, drained=True, unfinished=0)
    service.stop()
    assert service._should_end(harness.now)


def test_a_drain_takes_its_time_from_its_beginning_on() -> None:
    harness = SchedulerHarness()
    gateway, worker = harness.connect(GOOD), harness.register(WORKER)
    harness.configured(WORKER, worker)
    harness.gateways.hear(GOOD, submit(1), gateway)
    harness.turn()
    harness.service.drain()
    assert not harness.service._should_end(harness.now)
    assert harness.service.drain_state == DrainState(draining=True, drained=False, unfinished=1)
    harness.service.stop()
    assert not harness.service._should_end(harness.now + 29.9)
    assert harness.service._should_end(harness.now + 30.1)


def test_a_service_that_drains_before_its_first_worker_takes_nothing_later_either() -> None:
    harness = SchedulerHarness()
    gateway = harness.connect(GOOD)
    harness.service.stop()
    assert harness.service._should_end(harness.now)
    harness.configured(WORKER, harness.register(WORKER))
    harness.gateways.hear(GOOD, submit(1), gateway)
    harness.turn()
    messages = harness.gateways.take(GOOD, decode_to_gateway)
    assert [message.reason for message in messages if isinstance(message, Refused)] == [Refusal.DRAINING]
    assert harness.service.engine is not None
    assert not harness.service.engine.unfinished


class LeavingHarness(SchedulerHarness):
    """A scheduler whose worker computes a request of `TOKENS` tokens, and has two plans in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.gateway, self.worker = self.connect(GOOD), self.register(WORKER)
        self.configured(WORKER, self.worker)
        self.gateways.hear(GOOD, submit(1, max_tokens=TOKENS), self.gateway)
        self.turn()
        assert self.state.in_flight == 2

    @property
    def state(self) -> Snapshot:
        assert self.service.engine is not None
        return self.service.engine.snapshot

    def tell_to_end(self) -> None:
        self.workers.hear(WORKER, Leave(), self.worker)
        self.turn(1)

    def step(self, name: bytes, fd: int) -> None:
        """Let a worker answer what it has."""
        assert self.answer(name, fd)
        self.turn(1)

    def has(self, name: bytes, kind: type) -> bool:
        """Return whether a worker has an unread message of this kind."""
        return any(isinstance(decode_to_worker(body), kind) for to, body in self.workers.sent if to == name)

    def finish(self, name: bytes, fd: int) -> None:
        """Let a worker do the rest, and check that the gateway has all tokens and no suspicion."""
        while not self.state.finished_length:
            self.step(name, fd)
        messages = self.gateways.take(GOOD, decode_to_gateway)
        rows = [row for message in messages if isinstance(message, Progress) for row in message.rows]
        assert [row.position for row in rows if row.tokens] == list(range(TOKENS))
        assert all(row.scheduling is None or row.scheduling.suspicion == Suspicion() for row in rows)
        assert self.state.worker_losses == 0


def test_a_worker_leaves_its_requests_to_the_one_in_line() -> None:
    harness = LeavingHarness()
    spare = harness.register(SPARE)
    harness.tell_to_end()
    assert not harness.has(WORKER, Stop), "two steps are in flight"
    harness.step(WORKER, harness.worker)
    assert harness.state.in_flight == 0
    assert harness.has(WORKER, Stop)
    assert not harness.has(WORKER, Configure)
    assert harness.has(SPARE, Configure)
    harness.workers.leave(harness.worker)
    harness.configured(SPARE, spare)
    harness.turn()
    harness.finish(SPARE, spare)


def test_a_lone_worker_goes_on_for_a_while_and_then_leaves_its_requests_to_the_next() -> None:
    harness = LeavingHarness()
    harness.tell_to_end()
    told = harness.now
    while not harness.has(WORKER, Stop):
        harness.step(WORKER, harness.worker)
    assert SPARE_WAIT < harness.now - told < SPARE_WAIT + 1.0
    assert (harness.state.running, harness.state.waiting_deferred, harness.state.worker_losses) == (0, 1, 0)
    spare = harness.register(SPARE)
    harness.configured(SPARE, spare)
    harness.turn()
    harness.finish(SPARE, spare)


def test_a_worker_without_requests_leaves_at_once() -> None:
    harness = LeavingHarness()
    harness.finish(WORKER, harness.worker)
    harness.tell_to_end()
    assert harness.has(WORKER, Stop)


def test_a_lone_worker_of_an_engine_that_drains_finishes_the_requests() -> None:
    """Services that are told to end together hear of it in any order."""
    harness = LeavingHarness()
    harness.tell_to_end()
    harness.service.stop()
    assert not harness.service._should_end(harness.now)
    harness.finish(WORKER, harness.worker)
    assert harness.has(WORKER, Stop)
    assert harness.service._should_end(harness.now)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_worker_with_a_wrong_answer_is_lost_before_the_one_in_line_takes_over(leaves: bool) -> None:
    harness = LeavingHarness()
    spare = harness.register(SPARE)
    if leaves:
        harness.tell_to_end()
    for plan in [message for message in harness.sent_to(WORKER) if isinstance(message, StepPlan)]:
        harness.workers.hear(WORKER, StepResult(plan.epoch, plan.step, []), harness.worker)
    harness.turn(2)
    assert harness.state.worker_losses == 1
    harness.configured(SPARE, spare)
    harness.turn()
    assert harness.has(SPARE, StepPlan)
