"""`UnreadBytes`: a bound on the bytes that each peer of a tcp listener has sent and the listener has not read.

libzmq bounds how many messages wait, but neither their bytes nor the frames of one message. The kernel counts the bytes
that a connection received. This module counts the bytes that were read. It does not know the exact framing and counts a
few bytes too many per frame, but never more than were received.
"""

import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import zmq

from shared.protocol import MAX_FRAME

MAX_UNREAD = 2 * MAX_FRAME
"""Bytes that one peer may have unread, including those of incomplete messages."""

FRAMING = 64
"""Upper bound of the bytes that a frame takes on the wire in addition to its content."""

TCPI_BYTES_RECEIVED = 128  # offset of the field in Linux' `struct tcp_info`, eight bytes


class UnreadBytes:
    """Counts the bytes read from each connection, and ends those that have too much unread."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}  # bytes read, by the connection's file descriptor

    def count(self, frames: Sequence[zmq.Frame]) -> None:
        """Count a message that was read. Its first frame is the sender's identity, which is not sent with it."""
        fd = int(frames[-1].get(zmq.SRCFD))
        self._read[fd] = self._read.get(fd, 0) + sum(len(frame) + FRAMING for frame in frames[1:])

    def disconnect_floods(self, connected: Iterable[int]) -> list[int]:
        """Shut down the connections with too much unread, and return their descriptors. libzmq then closes them."""
        self._read = {fd: self._read.get(fd, 0) for fd in connected}
        return [fd for fd in self._read if self._disconnect_flood(fd)]

    def _disconnect_flood(self, fd: int) -> bool:
        with suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
            received = bytes_received(connection)
            if received - self._read[fd] > MAX_UNREAD:
                self._read[fd] = received  # so that it is reported once
                end_connection(connection)
                return True
            self._read[fd] = min(self._read[fd], received)
        return False


def end_connection(connection: socket.socket) -> None:
    """Shut down a connection that libzmq holds; libzmq then closes it, which resets a TCP connection.

    Without the reset, a peer that is sending while the receiver's window is closed is not told for up to a minute.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)


def bytes_received(connection: socket.socket) -> int:
    """Return how many bytes a TCP connection has received. Raise OSError if it has ended or is no TCP connection."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCPI_BYTES_RECEIVED + 8)
    return int.from_bytes(info[TCPI_BYTES_RECEIVED:], sys.byteorder)
