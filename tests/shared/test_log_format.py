"""Tests the lines of the log: nobody can forge one, and each is one JSON object if that is asked for."""

import json
import logging
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from shared.log_format import JsonFormatter, TextFormatter, of_request, of_requests, printable

FORGED = "x\r\n2026-01-01 00:00:00,000 INFO forged"
HARMFUL = [
    "\n",
    "\r",
    "\x1b[2J",
    "\x07",
    "\x7f",
    "\x00",
    "\x85",
    "\x9b2J",
    "\u2028",
    "\u2029",
    "\u202e",
    "\u2066",
    "\udc9b",
]


@pytest.mark.parametrize("text", HARMFUL)
def test_characters_that_control_a_terminal_or_end_a_line_are_escaped(text: str) -> None:
    """HTTP-07."""
    assert printable(f"a{text}b").isprintable()
    assert printable(f"a{text}b").startswith("a\\")
    assert printable(text) != printable(text[1:]), "it can be told what it was"


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 世界 😀", "C:\\x"])
def test_other_text_stays_as_it_is(text: str) -> None:
    """HTTP-07."""
    assert printable(text) == text


def logged(message: str, *values: object, error: BaseException | None = None, stack: str | None = None) -> list[str]:
    """Return the lines of a formatted record."""
    trace = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("name", logging.INFO, __file__, 1, message, values, trace, sinfo=stack)
    return TextFormatter().format(record).split("\n")


def test_a_record_is_one_line() -> None:
    """HTTP-07."""
    (line,) = logged("%s asks for %r", FORGED, "\x1b[31m")
    assert line.isprintable()
    assert line.endswith(r"INFO x\r\n2026-01-01 00:00:00,000 INFO forged asks for '\x1b[31m'")


def test_a_traceback_keeps_its_lines_but_none_looks_like_a_record() -> None:
    """HTTP-07: an error's message may quote what a client sent."""
    try:
        raise ValueError(FORGED + "\x1b[2J")
    except ValueError as error:
        first, *rest = logged("a request failed", error=error, stack="Stack:\n" + FORGED)
    assert first.endswith("INFO a request failed")
    assert rest[0] == "  Traceback (most recent call last):"
    assert any("forged" in line for line in rest)
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def record(message: str, *values: object, extra: dict[str, object] | None = None, error: Any = None) -> Any:
    trace = None if error is None else (type(error), error, error.__traceback__)
    return logging.getLogger("part").makeRecord("part", logging.WARNING, "", 1, message, values, trace, extra=extra)


@pytest.mark.parametrize(
    ("extra", "suffix"),
    [
        ({}, ""),
        (of_request(""), ""),
        (of_request("cmpl-a"), " request_id=cmpl-a"),
        (of_request("a\nb"), r" request_id=a\nb"),
        (of_requests(["a", "", "b", "a"]), " request_id=a,b"),
        (of_requests(["a", "a"]), " request_id=a"),
        (of_requests([]), ""),
    ],
)
def test_a_line_of_text_ends_with_its_requests(extra: dict[str, object], suffix: str) -> None:
    assert TextFormatter().format(record("it is lost", extra=extra)).endswith("WARNING it is lost" + suffix)


def test_a_record_is_one_json_object_with_its_traceback() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        line = JsonFormatter("worker").format(record("%s is lost", FORGED, extra=of_request("a\udc9b"), error=error))
    assert line.isascii()
    assert line.isprintable()
    fields = json.loads(line)
    assert datetime.fromisoformat(fields.pop("time")).utcoffset() is not None
    assert fields.pop("exception").startswith("Traceback (most recent call last):\n")
    assert fields == {
        "level": "warning",
        "service": "worker",
        "message": f"{FORGED} is lost",
        "logger": "part",
        "request_id": "a\udc9b",
    }


def test_several_requests_are_a_list() -> None:
    fields = json.loads(JsonFormatter("worker").format(record("lost", extra=of_requests(["a", "b"]))))
    assert fields["request_ids"] == ["a", "b"]
    assert "request_id" not in fields


CRASH = """
import sys, threading, warnings
from shared.errors import ConfigError
from shared.startup import configure_logging, report_error, start_logging
start_logging()
configure_logging("worker", "info", "json")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
report_error("worker", ConfigError("wrong"))
raise ValueError("two\\nlines")
"""


def test_exceptions_warnings_and_errors_are_objects_too() -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH], stderr=subprocess.PIPE, text=True, check=False)
    warning, thread, error, crash = map(json.loads, ended.stderr.splitlines())
    assert (warning["level"], thread["level"], error["level"], crash["level"]) == ("warning", *["critical"] * 3)
    assert "UserWarning: old" in warning["message"]
    assert thread["exception"].endswith("ZeroDivisionError: division by zero")
    assert error["message"] == "worker: wrong"
    assert crash["exception"].endswith("ValueError: two\nlines")
    assert ended.returncode == 1
