"""The scheduler's service before its first worker has come: it has no engine yet."""

from shared.protocol import (
    Abort,
    Progress,
    Refusal,
    Refused,
    Welcome,
    decode_to_gateway,
)
from tests.scheduler.examples import submit
from tests.scheduler.world import GOOD, WORKER, World


def test_requests_before_the_first_worker_are_refused_and_no_gateway_is_welcomed() -> None:
    world = World()
    gateway = world.connect(GOOD)
    world.gateways.hear(GOOD, submit(1), gateway)
    world.gateways.hear(GOOD, Abort(1), gateway)
    world.turn()
    messages = world.gateways.take(GOOD, decode_to_gateway)
    refusals = [message for message in messages if isinstance(message, Refused)]
    assert refusals == [Refused(1, Refusal.NOT_READY, "the engine has not started yet")]
    assert not any(isinstance(message, Welcome | Progress) for message in messages)
    assert world.service.model == ""
    assert world.serves()


def test_a_service_that_drains_before_its_first_worker_takes_nothing_later_either() -> None:
    world = World()
    gateway = world.connect(GOOD)
    world.service.stop()
    assert world.service._should_end(world.now)
    world.configured(WORKER, world.register(WORKER))
    world.gateways.hear(GOOD, submit(1), gateway)
    world.turn()
    messages = world.gateways.take(GOOD, decode_to_gateway)
    assert [message.reason for message in messages if isinstance(message, Refused)] == [Refusal.DRAINING]
    assert world.service.engine is not None
    assert not world.service.engine.unfinished
