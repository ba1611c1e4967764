"""Tests that a service ends with its supervisor, and that nobody can forge log lines."""

import logging
import subprocess
import sys

import psutil
import pytest

from shared.log_format import TextFormatter, printable

CHILD = """
import os, time
from shared.startup import end_with_supervisor
end_with_supervisor(os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
SUPERVISOR = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_service_ends_with_its_supervisor() -> None:
    """PRC-01."""
    argv = [sys.executable, "-c", SUPERVISOR, CHILD]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        service = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    service.wait(timeout=10)


def test_a_service_whose_supervisor_is_gone_does_not_start() -> None:
    argv = [sys.executable, "-c", "from shared.startup import end_with_supervisor; end_with_supervisor(1_000_000_000)"]
    assert subprocess.run(argv, check=False).returncode == 1


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
