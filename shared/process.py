"""What every service's process does first: log lines to stderr, and stay with the supervisor that started it."""

import ctypes
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

EXIT_REFUSED = 2
"""Exit status of a service that cannot run with these settings or this model; one line on stderr says why."""


def start_logging() -> None:
    """Log lines from level INFO on, to stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


def set_log_level(level: str) -> None:
    """Leave out lines below `level`, once the settings have said which."""
    logging.getLogger().setLevel(level.upper())


def follow(supervisor: int) -> None:
    """If a supervisor (its process id, else 0) started this process: end with it, and leave Ctrl-C to it."""
    if not supervisor:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it ended before the kernel was told
        sys.exit(1)
