"""`Intake`: how many bytes the peers of a tcp listener have unread. It is a part of the transport.

libzmq bounds how many messages wait, but neither their bytes nor the frames of one message. The kernel counts the bytes
that came over a connection. Those that were read are counted here: a few too many for each frame, and never more than
came.
"""

import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import zmq

from shared.protocol import MAX_FRAME

MAX_UNREAD = 2 * MAX_FRAME
"""Bytes that one peer may have unread, messages that have not ended included."""

FRAMING = 64
"""Bytes that a frame takes on the wire beside its own, at most."""

TCPI_BYTES_RECEIVED = 128  # offset of the field in Linux' `struct tcp_info`, eight bytes


class Intake:
    """Bytes read from each connection, by its descriptor."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}

    def read(self, frames: Sequence[zmq.Frame]) -> None:
        """Count a message that was read. Its first frame is the sender's identity, which did not travel with it."""
        fd = int(frames[-1].get(zmq.SRCFD))
        self._read[fd] = self._read.get(fd, 0) + sum(len(frame) + FRAMING for frame in frames[1:])

    def cut(self, connected: Iterable[int]) -> list[int]:
        """End the connections that have too much unread, and return their descriptors. libzmq sees them end."""
        self._read = {fd: self._read.get(fd, 0) for fd in connected}
        return [fd for fd in self._read if self._flooded(fd)]

    def _flooded(self, fd: int) -> bool:
        with suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
            came = bytes_received(connection)
            read, self._read[fd] = self._read[fd], came
            if came - read > MAX_UNREAD:
                connection.shutdown(socket.SHUT_RDWR)
                return True
            self._read[fd] = min(read, came)
        return False


def bytes_received(connection: socket.socket) -> int:
    """Return how many bytes have come over a TCP connection. Raises OSError if it is none, or has ended."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCPI_BYTES_RECEIVED + 8)
    return int.from_bytes(info[TCPI_BYTES_RECEIVED:], sys.byteorder)
