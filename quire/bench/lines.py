"""`Lines` splits the bytes of a stream into lines, which end with LF, CR LF or CR, as server-sent events do.

An unfinished line is kept in the pieces in which it came, so the work is linear in the number of bytes, however small
the pieces are.
"""

MAX_LENGTH = 8 * 1024 * 1024
"""The most bytes of an unfinished line that are kept."""


class Lines:
    """Splits bytes into lines, and keeps the last one until it ends."""

    def __init__(self, max_length: int = MAX_LENGTH) -> None:
        self._max_length = max_length
        self._unfinished: list[bytes] = []  # pieces of a line whose end has not come
        self._length = 0  # of the pieces, in bytes
        self._after_cr = False  # the last byte was a CR; a LF that comes next belongs to it

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without line ends. Raise `ValueError` if the rest is too long."""
        if not data:
            return []
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._unfinished, lines[0]])
            self._unfinished, self._length = [], 0
        self._unfinished.append(rest)
        self._length += len(rest)
        if self._length > self._max_length:
            raise ValueError(f"a line of more than {self._max_length} bytes")
        return lines
