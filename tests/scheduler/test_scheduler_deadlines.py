"""Tests the times by which a worker must have answered. Time is a number here."""

from msgspec.structs import replace

from services.scheduler.deadlines import CONFIGURE_TIMEOUT, FIRST_STEP_TIMEOUT, STEP_FACTOR, Deadlines
from tests.scheduler.examples import REGISTER

TIMEOUT = 2.0


def ready(*, step_seconds: float = 0.01, token_seconds: float = 0.001) -> Deadlines:
    """Return the deadlines of a worker that was configured at 0 and has done its first step at 1."""
    deadlines = Deadlines(replace(REGISTER, step_seconds=step_seconds, token_seconds=token_seconds), TIMEOUT, 0.0)
    deadlines.note_configured(0.5)
    deadlines.note_sent(0, 1, 0.5)
    deadlines.note_result(0.011, 1.0)
    return deadlines


def test_a_worker_that_is_being_configured_has_long() -> None:
    deadlines = Deadlines(REGISTER, TIMEOUT, 10.0)
    assert not deadlines.ready
    assert deadlines.due() == 10.0 + CONFIGURE_TIMEOUT
    assert deadlines.describe_overdue(100.0) == "not configured within 60 s"


def test_an_idle_worker_owes_nothing() -> None:
    deadlines = ready()
    assert deadlines.ready
    assert deadlines.due() == float("inf")


def test_a_step_has_the_timeout_or_a_multiple_of_its_prediction() -> None:
    short, long = ready(), ready()
    short.note_sent(1, 10, 5.0)
    assert short.due() == 5.0 + TIMEOUT
    assert short.describe_overdue(5.1 + TIMEOUT) == "busy with one step for 2.1 s"
    long.note_sent(1, 1000, 5.0)
    assert long.due() == 5.0 + STEP_FACTOR * 1.01


def test_the_first_step_of_an_epoch_has_longer() -> None:
    deadlines = Deadlines(REGISTER, TIMEOUT, 0.0)
    deadlines.note_configured(1.0)
    deadlines.note_sent(0, 1, 5.0)
    assert deadlines.due() == 5.0 + FIRST_STEP_TIMEOUT


def test_a_second_plan_in_flight_counts_from_the_first_one_s_result() -> None:
    deadlines = ready()
    deadlines.note_sent(1, 1, 5.0)
    deadlines.note_sent(2, 1, 5.1)
    assert deadlines.awaited_step == 1
    deadlines.note_result(1.0, 6.5)
    assert deadlines.awaited_step == 2
    assert deadlines.due() == 6.5 + TIMEOUT
    deadlines.note_result(1.0, 7.0)
    assert deadlines.awaited_step is None


def test_predictions_follow_how_long_steps_take() -> None:
    deadlines = ready(step_seconds=0.5, token_seconds=0.0)
    now = 5.0
    for step in range(1, 100):  # each takes four times what was promised
        deadlines.note_sent(step, 1, now)
        now += 2.0
        assert deadlines.due() >= now
        deadlines.note_result(2.0, now)
    deadlines.note_sent(100, 1, now)
    assert now + STEP_FACTOR * 1.9 < deadlines.due() < now + STEP_FACTOR * 2.1


def test_fast_steps_do_not_shorten_the_timeout() -> None:
    deadlines = ready(step_seconds=1.0)
    for step in range(1, 100):
        deadlines.note_sent(step, 0, 5.0)
        deadlines.note_result(0.001, 5.0)
    deadlines.note_sent(100, 0, 5.0)
    assert deadlines.due() == 5.0 + STEP_FACTOR * 1.0


def test_a_scheduler_that_slept_does_not_blame_the_worker() -> None:
    deadlines = ready()
    deadlines.note_sent(1, 1, 1.0)
    deadlines.postpone(100.0)
    assert deadlines.due() == 101.0 + TIMEOUT


def test_impossible_speeds_are_ignored() -> None:
    deadlines = ready(step_seconds=-5.0, token_seconds=-1.0)
    deadlines.note_sent(1, 10, 5.0)
    assert deadlines.due() == 5.0 + TIMEOUT
