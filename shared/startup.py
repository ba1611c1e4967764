"""The first calls of every service: log to stderr, and end with the supervisor that started it.

`shared.log_format` has the lines of the log.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
from types import TracebackType

from shared.errors import QuireError
from shared.log_format import JsonFormatter, TextFormatter, printable
from shared.log_limit import LogLimit

PR_SET_PDEATHSIG = 1

EXIT_CANNOT_START = 2
"""Exit status of a service that cannot run with its settings or its model. One line on stderr says why."""


def start_logging() -> None:
    """Log to stderr as text, from level INFO on, until the settings are known. Lines are limited by `LogLimit`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LogLimit())
    handler.setFormatter(TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def configure_logging(service: str, level: str, log_format: str) -> None:
    """Drop lines below `level`, and write the others in `log_format`, both of which the settings name."""
    logging.getLogger().setLevel(level.upper())
    if log_format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter(service))
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = _log_exception_of_thread


def logs_json() -> bool:
    """Return whether the log of this process is JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def report_error(service: str, error: QuireError) -> int:
    """Write the error to stderr as one line, and return the exit status of a service that cannot start."""
    line = f"{service}: {error}"
    if logs_json():
        logging.getLogger(service).critical("%s", line)
    else:
        print(printable(line), file=sys.stderr)  # noqa: T201
    return EXIT_CANNOT_START


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an exception that ends the process or a thread: its traceback would otherwise be lines of text."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("quire").critical("an exception that nothing handles", exc_info=(kind, error, trace))


def _log_exception_of_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None:
        _log_exception(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)


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
