"""The scheduler's service before its first worker has come: it has no engine yet."""

from shared.admin import DrainState
from shared.protocol import (
    Abort,
    Progress,
    Refusal,
    Refused,
    Welcome,
    decode_to_gateway,
)
from tests.scheduler.examples import submit
from tests.scheduler.scheduler_harness import GOOD, WORKER, SchedulerHarness


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
