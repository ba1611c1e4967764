"""Tests the estimate of a step's time."""

from random import Random

import pytest

from services.scheduler.core.step_time import LEARNING_RATE, MAX_ERROR, MIN_SHARE, StepTime


def _measured(step: float = 0.02, token: float = 0.003) -> StepTime:
    time = StepTime()
    time.restart(step, token)
    return time


def test_it_begins_with_what_the_worker_measured() -> None:
    time = _measured()
    assert time.predict(8, 16) == pytest.approx(0.02 + 24 * 0.003)
    assert time.positions_within(0.1, 8) == 18
    assert time.positions_within(0.01, 8) == 0


def test_without_measurements_there_is_no_estimate() -> None:
    for time in (StepTime(), _measured(0.0, 0.0)):
        time.observe(8, 16, 1.0)
        assert time.predict(8, 16) == 0
        assert time.positions_within(0.1, 8) is None


def test_a_step_without_a_time_teaches_nothing() -> None:
    time = _measured()
    time.observe(8, 16, 0.0)
    assert time.predict(8, 16) == _measured().predict(8, 16)


@pytest.mark.parametrize("wrong", [0.25, 1.0, 4.0])
def test_it_learns_each_cost_from_a_mixture_of_steps(wrong: float) -> None:
    """The worker's measurements are wrong by a factor, and rows cost less than tokens."""
    chance, time = Random(1), _measured(0.03 * wrong, 0.003 * wrong)
    for _ in range(400):
        rows, positions = chance.randint(0, 32), chance.choice([0, 16, 64, 128])
        time.observe(rows, positions, 0.03 + rows * 0.002 + positions * 0.003)
    for rows, positions in [(1, 0), (8, 0), (32, 0), (8, 128), (0, 64)]:
        assert time.predict(rows, positions) == pytest.approx(0.03 + rows * 0.002 + positions * 0.003, rel=0.1)


def test_a_step_with_prompts_teaches_what_they_cost_alone() -> None:
    """Otherwise steps of one kind would teach a sum, and never that there is time for more positions."""
    time = _measured()
    for _ in range(50):
        time.observe(8, 16, 0.02 + 8 * 0.003 + 16 * 0.001)
    assert (time.step, time.row) == (0.02, 0.003)
    assert time.positions_within(0.1, 8) == 55
    for _ in range(50):
        time.observe(8, 0, 0.02)
    assert time.predict(8, 0) == pytest.approx(0.02, rel=0.01)
    assert time.token == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize("positions", [0, 16])
def test_a_step_that_waited_for_something_else_counts_little(positions: int) -> None:
    time = _measured()
    time.observe(8, positions, 1e9)
    before = _measured().predict(8, positions)
    assert before < time.predict(8, positions) <= before * (1 + LEARNING_RATE * (MAX_ERROR - 1)) + 1e-12


def test_no_cost_is_ever_negative_or_lost() -> None:
    chance, time = Random(2), _measured(0.01, 1e-12)
    for _ in range(5000):
        time.observe(chance.randint(0, 64), chance.randint(0, 512), chance.choice([1e-9, 1e-4, 1.0, 1e9]))
        assert min(time.step, time.row, time.token) > 0


def test_steps_that_always_have_prompts_correct_the_other_costs_too() -> None:
    """The worker was slow for a while, and then every step has a prompt. A token must not come to cost nothing."""
    time = StepTime()
    time.restart(0.02, 0.001)
    for _ in range(30):
        time.observe(16, 0, 0.12)
    for _ in range(10_000):
        time.observe(16, 20, 0.06)
    assert time.predict(16, 20) == pytest.approx(0.06, rel=0.1)
    assert time.token >= MIN_SHARE * time.step
    assert (time.positions_within(0.1, 16) or 0) < 1000
