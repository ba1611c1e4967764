"""The first steps of every service: log lines to stderr, and stay with the supervisor that started it.

Log lines quote what strangers sent: paths, names, texts in errors. Nothing of that may look like a line of its own or
speak to a terminal, so `LogFormatter` escapes it, whoever wrote the line.
"""

import ctypes
import logging
import os
import signal
import sys
import textwrap

from shared.errors import QuireError

PR_SET_PDEATHSIG = 1

EXIT_REFUSED = 2
"""Exit status of a service that cannot run with these settings or this model; one line on stderr says why."""


class LogFormatter(logging.Formatter):
    """One line a record, and tracebacks below it, which keep their lines but stand indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line and its traceback."""
        line, *trace = super().format(record).split("\n")
        return "\n".join([line, *(textwrap.indent(printable(part), "  ") for part in trace)])


def printable(text: str) -> str:
    """Return `text` with those characters escaped that end lines, control terminals, reorder text or are invisible."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def start_logging() -> None:
    """Log lines from level INFO on, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def set_log_level(level: str) -> None:
    """Leave out lines below `level`, once the settings have said which."""
    logging.getLogger().setLevel(level.upper())


def refuse(service: str, error: QuireError) -> int:
    """Say in one line on stderr why a service cannot run, and return its exit status."""
    print(printable(f"{service}: {error}"), file=sys.stderr)  # noqa: T201  (the line for people)
    return EXIT_REFUSED


def follow(supervisor: int) -> None:
    """If a supervisor (its process id, else 0) started this process: end with it, and leave Ctrl-C to it."""
    if not supervisor:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it ended before the kernel was told
        sys.exit(1)
