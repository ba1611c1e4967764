"""Bytes of a stream into its lines, which may end with LF, CR LF or CR, as those of server-sent events.

A line is kept in the pieces in which it came until it ends: the work grows with the bytes, however they are cut.
"""

MOST = 8 * 1024 * 1024
"""Bytes of a line, after which it counts as one that will not end."""


class Lines:
    """Cuts what it is fed into lines, and keeps the last until it has ended."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._begun: list[bytes] = []  # of a line whose end has not come
        self._length = 0  # of that
        self._returned = False  # the last byte was a CR: a LF that comes next belongs to it

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end with this, without their ends. Raises `ValueError` for one that is too long."""
        if not data:
            return []
        if self._returned and data.startswith(b"\n"):
            data = data[1:]
        self._returned = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._begun, lines[0]])
            self._begun, self._length = [], 0
        self._begun.append(rest)
        self._length += len(rest)
        if self._length > self._most:
            raise ValueError(f"a line of more than {self._most} bytes")
        return lines
