"""`ServiceLog`: the log of `quire serve`, which has the lines of its children and of the supervisor itself."""

import asyncio
import json
import re
import time
from contextlib import suppress
from typing import Any, BinaryIO

from shared.log_format import line_fields

MAX_LINE = 64 * 1024  # bytes; a longer line is cut


class ServiceLog:
    """Writes to the supervisor's stderr.

    As text, each line begins with the name of the child that wrote it. As JSON, each line is an object whose `service`
    is that name; what a child writes that is none becomes one.
    """

    def __init__(self, out: BinaryIO, *, as_json: bool = False) -> None:
        self.out = out
        self.width = len("scheduler")  # of the names
        self.last_lines: dict[str, str] = {}  # of each child, by name
        self._as_json = as_json
        self._erase = b"\x1b[K" if out.isatty() and not as_json else b""  # clears the rest of a longer progress bar

    def write(self, name: str, line: str) -> None:
        """Write what the supervisor has to say about a child."""
        self._write(name, line.encode() + b"\n", "warning")

    async def copy(self, name: str, source: asyncio.StreamReader) -> None:
        """Write the lines of a child's `source` until it ends."""
        rest = b""  # the beginning of a line
        while chunk := await source.read(MAX_LINE):
            *lines, rest = re.split(rb"(?<=[\r\n])", rest + chunk)
            if len(rest) > MAX_LINE:
                lines, rest = [*lines, rest + b"\n"], b""
            for line in lines:
                if line.strip():
                    self._write_line_of(name, line)
        if rest.strip():
            self._write_line_of(name, rest + b"\n")

    def _write_line_of(self, name: str, line: bytes) -> None:
        fields = _decode(line) if self._as_json else None
        message = line.decode(errors="replace") if fields is None else str(fields.get("message"))
        self.last_lines[name] = message.strip()
        self._write(name, line, "info", fields)

    def _write(self, name: str, line: bytes, level: str, fields: dict[str, Any] | None = None) -> None:
        """Write a line, which ends in a newline or, if it is a progress bar, in a carriage return."""
        if self._as_json:
            own = fields or line_fields(name, line.decode(errors="replace").strip(), level, time.time())
            written = json.dumps(own | {"service": name}).encode() + b"\n"
        else:
            written = self._erase + f"{name:<{self.width}} | ".encode() + line
        with suppress(OSError):  # nobody reads the log any more, but serving goes on
            self.out.write(written)
            self.out.flush()


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a line that is a record as JSON, None for another one."""
    if not line.startswith(b"{"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "message" in fields else None
