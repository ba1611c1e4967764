"""Progress of work that takes a while: a bar where it is seen on a terminal, else a line at its start and its end.

A service's stderr is a pipe to its supervisor, which may in turn write to a terminal; it says so by `VARIABLE`.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tqdm import tqdm

VARIABLE = "QUIRE_ON_TERMINAL"
"""Of the environment; set for processes whose stderr is copied to a terminal. Not a setting."""


def on_terminal(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody looks at this process's stderr as it is written."""
    return sys.stderr.isatty() or VARIABLE in environment


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """For the time of the block; call what it gives with the number of bytes done since the last call."""
    bars, began = on_terminal(), time.monotonic()
    if not bars:
        _say(what)
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, disable=not bars) as bar:
        yield bar.update
    if not bars:
        _say(f"{what}: {tqdm.format_sizeof(total, 'B')} in {time.monotonic() - began:.1f} s")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
