"""Until when a worker has to have answered. Time is a number here."""

from msgspec.structs import replace

from services.scheduler.deadlines import CONFIGURING, FACTOR, FIRST_STEP, Deadlines
from tests.scheduler.examples import REGISTER

TIMEOUT = 2.0


def ready(*, step_seconds: float = 0.01, token_seconds: float = 0.001) -> Deadlines:
    """Return the deadlines of a worker that was configured at 0 and has done its first step at 1."""
    made = Deadlines(replace(REGISTER, step_seconds=step_seconds, token_seconds=token_seconds), TIMEOUT, 0.0)
    made.configured(0.5)
    made.sent(0, 1, 0.5)
    made.returned(0.011, 1.0)
    return made


def test_a_worker_that_is_being_configured_has_long() -> None:
    made = Deadlines(REGISTER, TIMEOUT, 10.0)
    assert not made.ready
    assert made.due() == 10.0 + CONFIGURING
    assert made.what(100.0) == "not configured within 60 s"


def test_an_idle_worker_owes_nothing() -> None:
    made = ready()
    assert made.ready
    assert made.due() == float("inf")


def test_a_step_has_the_timeout_or_a_multiple_of_its_prediction() -> None:
    short, long = ready(), ready()
    short.sent(1, 10, 5.0)
    assert short.due() == 5.0 + TIMEOUT
    assert short.what(5.1 + TIMEOUT) == "busy with one step for 2.1 s"
    long.sent(1, 1000, 5.0)
    assert long.due() == 5.0 + FACTOR * 1.01


def test_the_first_step_of_an_epoch_has_longer() -> None:
    made = Deadlines(REGISTER, TIMEOUT, 0.0)
    made.configured(1.0)
    made.sent(0, 1, 5.0)
    assert made.due() == 5.0 + FIRST_STEP


def test_a_second_plan_in_flight_counts_from_the_first_one_s_result() -> None:
    made = ready()
    made.sent(1, 1, 5.0)
    made.sent(2, 1, 5.1)
    assert made.awaited == 1
    made.returned(1.0, 6.5)
    assert made.awaited == 2
    assert made.due() == 6.5 + TIMEOUT
    made.returned(1.0, 7.0)
    assert made.awaited is None


def test_predictions_follow_how_long_steps_take() -> None:
    made = ready(step_seconds=0.5, token_seconds=0.0)
    now = 5.0
    for step in range(1, 100):  # each takes four times what was promised
        made.sent(step, 1, now)
        now += 2.0
        assert made.due() >= now
        made.returned(2.0, now)
    made.sent(100, 1, now)
    assert now + FACTOR * 1.9 < made.due() < now + FACTOR * 2.1


def test_fast_steps_do_not_shorten_the_patience() -> None:
    made = ready(step_seconds=1.0)
    for step in range(1, 100):
        made.sent(step, 0, 5.0)
        made.returned(0.001, 5.0)
    made.sent(100, 0, 5.0)
    assert made.due() == 5.0 + FACTOR * 1.0


def test_a_scheduler_that_slept_does_not_blame_the_worker() -> None:
    made = ready()
    made.sent(1, 1, 1.0)
    made.forgive(100.0)
    assert made.due() == 101.0 + TIMEOUT


def test_speeds_that_cannot_be_are_taken_for_none() -> None:
    made = ready(step_seconds=-5.0, token_seconds=-1.0)
    made.sent(1, 10, 5.0)
    assert made.due() == 5.0 + TIMEOUT
