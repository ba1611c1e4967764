"""The lines of the log, in both formats of `--log-format`.

A record that concerns a request names it by `extra=of_request(...)`, with the id that the client sees. All services log
a request under the same id, so one search finds what happened to it.

Log lines quote what clients sent: paths, names, texts in errors. None of it may look like a log line of its own or
control a terminal, so every record is escaped.
"""

import json
import logging
import textwrap
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

_ONE, _SEVERAL = "request_id", "request_ids"


def of_request(request_id: str) -> dict[str, object]:
    """Return the `extra` of a record that concerns a request; empty if its id is not known."""
    return {_ONE: request_id} if request_id else {}


def of_requests(request_ids: Iterable[str]) -> dict[str, object]:
    """Return the `extra` of a record that concerns several requests, each named once."""
    known = list(dict.fromkeys(filter(None, request_ids)))
    return of_request(known[0]) if len(known) == 1 else {_SEVERAL: known} if known else {}


def names_request(record: logging.LogRecord) -> bool:
    """Return whether a record concerns a request, or several."""
    return bool(_ids(record))


class TextFormatter(logging.Formatter):
    """Formats a record as one line. A traceback follows on indented lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        ids = [value if isinstance(value, str) else ",".join(value) for value in _ids(record).values()]
        return printable(" ".join([super().formatMessage(record), *map("request_id={}".format, ids)]))

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line and its traceback."""
        line, *trace = super().format(record).split("\n")
        return "\n".join([line, *(textwrap.indent(printable(part), "  ") for part in trace)])


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line, traceback included."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        fields = line_fields(self._service, record.getMessage(), record.levelname.lower(), record.created)
        fields |= {"logger": record.name, **_ids(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        return json.dumps(fields)


def line_fields(service: str, message: str, level: str, seconds: float) -> dict[str, Any]:
    """Return the fields that every line has as JSON. `seconds` is the time since the epoch."""
    time = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"time": time, "level": level, "service": service, "message": message}


def printable(text: str) -> str:
    """Return `text` with characters escaped that end lines, control terminals, reorder text or are invisible."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _ids(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in (_ONE, _SEVERAL) if hasattr(record, name)}
