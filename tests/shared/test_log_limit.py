"""Tests that lines which peers cause are limited, by kind, and that what is left out is counted."""

import logging

import pytest

from shared.log_limit import INTERVAL, MAX_KINDS, MAX_LINES, LogLimit
from shared.startup import start_logging


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logger(clock: Clock) -> logging.Logger:
    logger = logging.getLogger("tests.log_limit")
    logger.filters = [LogLimit(clock=clock)]
    return logger


def test_a_flood_of_lines_is_cut_and_counted_and_other_kinds_go_on(
    logger: logging.Logger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        logger.warning("peer %d: garbage", number)
        logger.error("peer %d is gone", 7) if number == 500 else None
    assert len(caplog.messages) == MAX_LINES + 1
    assert caplog.messages[-1] == "peer 7 is gone"
    clock.now += INTERVAL
    logger.warning("peer %d: garbage", 1000)
    logger.warning("peer %d: garbage", 1001)
    left_out = 1000 - MAX_LINES
    assert caplog.messages[-2:] == [
        f"peer 1000: garbage ({left_out} such lines before it were left out)",
        "peer 1001: garbage",
    ]


def test_a_message_with_percent_signs_survives_the_note(
    logger: logging.Logger, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2 * MAX_LINES):
        logger.warning("peer %s", "%s%d")
    clock.now += INTERVAL
    logger.warning("peer %s", "%s%d")
    assert caplog.messages[-1].startswith("peer %s%d (20 such lines")


def test_kinds_are_bounded(logger: logging.Logger) -> None:
    (limit,) = logger.filters
    assert isinstance(limit, LogLimit)
    for number in range(3 * MAX_KINDS):
        logger.warning(f"kind {number}")
    assert len(limit._kinds) <= MAX_KINDS


def test_each_service_has_the_limit_and_exempts_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    start_logging(["requests"])
    (handler,) = root.handlers
    written = {
        name: sum(bool(handler.filter(logging.makeLogRecord({"name": name, "msg": "x"}))) for _ in range(100))
        for name in ("requests", "peers")
    }
    assert written == {"requests": 100, "peers": MAX_LINES}
