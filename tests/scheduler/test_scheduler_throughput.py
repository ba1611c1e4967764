"""Tests the rate of a counter. Time is a parameter."""

import pytest

from services.scheduler.throughput import WINDOW, Throughput


def test_it_is_the_growth_over_the_window_and_not_longer() -> None:
    """API-04: the rate is of tokens a second now, not since the start."""
    throughput, tokens = Throughput(100.0), 0
    assert throughput.rate(0, 100.0) == 0.0
    for tick in range(1, 200):
        tokens += 5
        assert throughput.rate(tokens, 100 + tick / 4) == pytest.approx(20.0)
    assert throughput.rate(tokens, 150 + WINDOW / 2) == pytest.approx(10.0, rel=0.1)
    assert throughput.rate(tokens, 150 + 3 * WINDOW) == 0.0
    assert throughput.rate(tokens, 151 + 3 * WINDOW) == 0.0


def test_a_loop_that_stood_still_gives_the_rate_over_that_time() -> None:
    throughput = Throughput(0.0)
    assert throughput.rate(10, 1.0) == 10.0
    assert throughput.rate(110, 101.0) == pytest.approx(1.0, rel=0.1)
