"""`LogLimit`: a bound on the log lines that peers can cause by sending nonsense as fast as they can.

Writing a line takes longer than dropping the message that caused it, and fills disks. So each kind of line, told by its
logger and format, is written at most `MAX_LINES` times in `INTERVAL`. The next line of the kind says how many were left
out. Metrics count what was dropped, without a limit.

Lines that name a request are not limited, since a search for its id must find them, and each request costs far more
than its lines. Those that nonsense causes, although it gets an id, have `LIMITED` in their `extra`.
"""

import logging
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from shared.log_format import names_request

MAX_LINES = 20
INTERVAL = 1.0
"""Seconds after which lines of a kind are written again."""

MAX_KINDS = 1_000
"""Kinds of lines that are remembered, in case that formats hold what peers sent."""


LIMITED: Mapping[str, object] = {"limited": True}
"""The `extra` of a record that is limited although it names a request."""


class _Lines(Struct):
    """The lines of one kind in the present interval."""

    began: float
    written: int = 0
    left_out: int = 0


class LogLimit(logging.Filter):
    """Drops lines of kinds that come more than `max_lines` times in `interval`, in seconds as `clock` returns them."""

    def __init__(
        self,
        max_lines: int = MAX_LINES,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._max_lines = max_lines
        self._interval = interval
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Lines] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; note in it how many before it were left out."""
        if names_request(record) and not hasattr(record, "limited"):
            return True
        kind, now = (record.name, str(record.msg)), self._clock()
        lines = self._kinds.get(kind)
        if lines is None or now - lines.began >= self._interval:
            if lines is not None and lines.left_out:
                record.msg = f"{record.getMessage()} ({lines.left_out} such lines before it were left out)"
                record.args = ()
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            lines = self._kinds[kind] = _Lines(now)
        if lines.written >= self._max_lines:
            lines.left_out += 1
            return False
        lines.written += 1
        return True
