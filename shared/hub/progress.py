"""`progress`: shows the progress of reading or writing files, as a bar on a terminal, or else as two lines.

A service's stderr is a pipe to its supervisor, which sets `TERMINAL_VARIABLE` if it copies the pipe to a terminal.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from shared.startup import logs_json

TERMINAL_VARIABLE = "QUIRE_ON_TERMINAL"
"""An environment variable that the supervisor sets for its services; not a setting of users."""


def on_terminal() -> bool:
    """Return whether this process's stderr is shown on a terminal."""
    return (sys.stderr.isatty() and not logs_json()) or TERMINAL_VARIABLE in os.environ


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show the progress towards `total` bytes. Yield a function to call with the bytes done since its last call."""
    show_bar, began = on_terminal(), time.monotonic()
    if not show_bar:
        _write_line(label)
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, file=sys.stderr, disable=not show_bar) as bar:
        yield bar.update
    if not show_bar:
        _write_line(f"{label}: {tqdm.format_sizeof(total, 'B')} in {time.monotonic() - began:.1f} s")


def _write_line(line: str) -> None:
    if logs_json():
        logging.getLogger(__name__).info("%s", line)
    else:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
