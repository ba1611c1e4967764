"""The first calls of every service: log to stderr, and end with the supervisor that started it.

Log lines quote what clients sent: paths, names, texts in errors. None of it may look like a log line of its own or
control a terminal, so `LogFormatter` escapes every record.
"""

import ctypes
import logging
import os
import signal
import sys
import textwrap
from collections.abc import Collection

from shared.errors import QuireError
from shared.log_limit import LogLimit

PR_SET_PDEATHSIG = 1

EXIT_CANNOT_START = 2
"""Exit status of a service that cannot run with its settings or its model. One line on stderr says why."""


class LogFormatter(logging.Formatter):
    """Formats a record as one line. A traceback follows on indented lines of its own."""

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
    """Return `text` with characters escaped that end lines, control terminals, reorder text or are invisible."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def start_logging(unlimited: Collection[str] = ()) -> None:
    """Log to stderr, from level INFO on. All loggers but those named in `unlimited` have the limit of `LogLimit`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LogLimit(unlimited))
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def set_log_level(level: str) -> None:
    """Drop lines below `level`, which the settings name."""
    logging.getLogger().setLevel(level.upper())


def report_error(service: str, error: QuireError) -> int:
    """Write the error to stderr as one line, and return the exit status of a service that cannot start."""
    print(printable(f"{service}: {error}"), file=sys.stderr)  # noqa: T201
    return EXIT_CANNOT_START


def end_with_supervisor(supervisor: int) -> None:
    """End this process when its supervisor ends, and leave Ctrl-C to the supervisor.

    `supervisor` is its process id; 0 means that there is none, and nothing is done.
    """
    if not supervisor:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # the supervisor ended before the call above
        sys.exit(1)
