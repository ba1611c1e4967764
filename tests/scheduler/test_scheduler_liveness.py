"""When a worker is late. Time is a number here."""

from msgspec.structs import replace

from services.scheduler.liveness import BUSY, CONFIGURING, FACTOR, FIRST_STEP, INDULGENCE, Effort, Liveness
from tests.scheduler.examples import REGISTER

TIMEOUT = 2.0


def ready(*, step_seconds: float = 0.01, token_seconds: float = 0.001) -> Liveness:
    """A worker that was configured at 0 and has done its first step at 1."""
    made = Liveness(replace(REGISTER, step_seconds=step_seconds, token_seconds=token_seconds), TIMEOUT, 0.0)
    made.beat(0.5)
    made.sent(0, 1, 0.5)
    made.returned(0.011, 1.0)
    return made


def test_a_worker_that_is_being_configured_has_long() -> None:
    made = Liveness(REGISTER, TIMEOUT, 10.0)
    assert not made.ready
    assert made.fault(10.0 + CONFIGURING) == ""
    assert "not configured within 60 s" in made.fault(10.1 + CONFIGURING)


def test_an_idle_worker_has_to_be_heard() -> None:
    made = ready()
    assert made.ready
    assert made.fault(1.0 + TIMEOUT) == ""
    made.beat(2.9)
    assert made.fault(2.9 + TIMEOUT) == ""
    assert made.fault(3.0 + TIMEOUT) == "silent for 2.1 s"


def test_a_step_has_the_timeout_or_a_multiple_of_its_prediction() -> None:
    short, long = ready(), ready()
    short.sent(1, 10, 5.0)
    assert short.fault(5.0 + TIMEOUT) == ""
    assert short.fault(5.1 + TIMEOUT) == "busy with one step for 2.1 s"
    long.sent(1, 1000, 5.0)
    assert long.fault(5.0 + FACTOR * 1.01) == ""
    assert long.fault(5.1 + FACTOR * 1.01) != ""


def test_the_first_step_of_an_epoch_has_longer() -> None:
    made = Liveness(REGISTER, TIMEOUT, 0.0)
    made.beat(1.0)
    made.sent(0, 1, 5.0)
    assert made.fault(5.0 + FIRST_STEP) == ""
    assert made.fault(5.1 + FIRST_STEP) != ""


def test_a_second_plan_in_flight_counts_from_the_first_one_s_result() -> None:
    made = ready()
    made.sent(1, 1, 5.0)
    made.sent(2, 1, 5.1)
    assert made.awaited == 1
    made.returned(1.0, 6.5)
    assert made.awaited == 2
    assert made.fault(6.5 + TIMEOUT) == ""
    assert made.fault(6.6 + TIMEOUT) != ""
    made.returned(1.0, 7.0)
    assert made.awaited is None


def test_predictions_follow_how_long_steps_take() -> None:
    made = ready(step_seconds=0.5, token_seconds=0.0)
    now = 5.0
    for step in range(1, 100):  # each takes four times what was promised
        made.sent(step, 1, now)
        now += 2.0
        assert made.fault(now) == ""
        made.returned(2.0, now)
    made.sent(100, 1, now)
    assert made.fault(now + FACTOR * 1.9) == ""
    assert made.fault(now + FACTOR * 2.1) != ""


def test_fast_steps_do_not_shorten_the_patience() -> None:
    made = ready(step_seconds=1.0)
    for step in range(1, 100):
        made.sent(step, 0, 5.0)
        made.returned(0.001, 5.0)
    made.sent(100, 0, 5.0)
    assert made.fault(5.0 + FACTOR * 1.0) == ""


def test_a_scheduler_that_slept_does_not_blame_the_worker() -> None:
    idle, busy = ready(), ready()
    busy.sent(1, 1, 1.0)
    for made in (idle, busy):
        made.forgive(100.0)
        assert made.fault(101.0 + TIMEOUT) == ""
        assert made.fault(101.1 + TIMEOUT) != ""


def test_speeds_that_cannot_be_are_taken_for_none() -> None:
    made = ready(step_seconds=-5.0, token_seconds=-1.0)
    made.sent(1, 10, 5.0)
    assert made.fault(5.0 + TIMEOUT) == ""
    assert made.fault(5.1 + TIMEOUT) != ""


def test_a_busy_worker_is_excused_for_a_while_with_a_step_and_for_nothing_else() -> None:
    made = ready()
    assert made.fault(1.1 + TIMEOUT, busy=True) != ""  # it owes a beat, which costs nothing
    made.sent(1, 1, 5.0)
    assert made.fault(5.0 + TIMEOUT + INDULGENCE, busy=True) == ""
    assert made.fault(5.1 + TIMEOUT + INDULGENCE, busy=True) != ""
    assert made.fault(5.1 + TIMEOUT, busy=False) != ""


def watch(samples: list[tuple[float, float]]) -> bool:
    """Whether a process with these samples (time, CPU time) is busy at the last of them."""
    effort = Effort()
    for now, used in samples:
        effort.note(used, now)
    return effort.busy(samples[-1][1], samples[-1][0])


def test_effort_is_cpu_time_over_the_last_window() -> None:
    steady = [(at / 4, at / 4) for at in range(41)]
    assert watch(steady)
    assert watch([(at / 4, at / 4 * BUSY * 1.01) for at in range(41)])
    assert not watch([(at / 4, at / 4 * BUSY * 0.9) for at in range(41)])
    stopped = [(10 + at / 4, 10.0) for at in range(1, 9)]
    assert not watch(steady + stopped)
    assert watch(steady + stopped[:2])  # not a whole window ago
    assert not watch(steady[:3])  # too short a look


def test_effort_keeps_no_more_than_a_window_of_samples() -> None:
    effort = Effort()
    for at in range(10_000):
        effort.note(0.0, at / 1000)
    assert len(effort._samples) < 10
