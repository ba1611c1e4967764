"""Tests that lines which peers cause are limited, by kind, and that what is left out is counted."""

import logging
from collections import Counter

import pytest

from shared.log_format import of_request, of_requests
from shared.log_limit import INTERVAL, LIMITED, MAX_KINDS, MAX_LINES, LogLimit
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


def test_a_limit_of_its_own(logger: logging.Logger, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    logger.filters = [LogLimit(max_lines=1, interval=60.0, clock=clock)]
    for _ in range(10 * 61):
        logger.warning("no collector")
        clock.now += 0.1
    assert caplog.messages == ["no collector", "no collector (599 such lines before it were left out)"]


@pytest.mark.parametrize("extra", [of_request("a"), of_requests(["a", "b"])])
def test_lines_that_name_a_request_are_all_written_but_those_of_nonsense(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture, extra: dict[str, object]
) -> None:
    for _ in range(100):
        logger.warning("it ended", extra=extra)
        logger.warning("it is no request", extra={**extra, **LIMITED})
        logger.warning("nobody's", extra=of_request(""))
    counts = Counter(caplog.messages)
    assert counts == {"it ended": 100, "it is no request": MAX_LINES, "nobody's": MAX_LINES}


def test_each_service_has_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    start_logging()
    (handler,) = root.handlers
    record = {"name": "peers", "msg": "x"}
    assert sum(bool(handler.filter(logging.makeLogRecord(record))) for _ in range(100)) == MAX_LINES
